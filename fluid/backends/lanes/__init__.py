"""What the backends with real processes share: lanes, their connections, the fork server, elastic trials.

It imports :mod:`fluid.backends.base` and lower packages; backends import it, never the other way round.
Start reading in :mod:`fluid.backends.lanes.pool` (commands to messages, messages to events).
"""
