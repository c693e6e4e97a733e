"""Processes of a session: their deaths, orphans and signals, and how two of them authenticate a connection.

It imports the clock only.
"""
