"""Tune's schedulers: how far they let trials run, which trials continue, and two that Tune does not have."""
