"""Checkpoints as a lane writes, seals, finds, fetches and restores them."""
