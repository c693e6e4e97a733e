"""Waits in which signals are heard, the threads that others wait for, and who holds a virtual clock."""
