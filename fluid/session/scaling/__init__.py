"""How many devices a session holds: as its goals need, and as the backend gives."""
