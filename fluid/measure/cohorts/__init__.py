"""Trials of one profile key whose configs tell that they are slower or faster than the others (docs/theory.md)."""
