"""Trials of one class that are trained as one: which may be, and in which packs."""
