"""The processes that have loaded what trials import, and fork lanes; and who ends all when their host dies."""
