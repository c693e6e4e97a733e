"""Checkpoints of one host: kept in its memory by what they are worth, copied, deleted, sent to other hosts."""
