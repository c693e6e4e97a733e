"""Loggers and callbacks of Tune, in a process of their own."""
