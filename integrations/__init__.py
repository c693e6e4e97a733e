"""Adapters to search libraries: they say what to try, Fluid decides how to run it."""
