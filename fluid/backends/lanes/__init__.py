"""The driver's side of lanes: commands to messages, messages to events, trials in several lanes.

It imports :mod:`fluid.backends.hosts`, :mod:`fluid.backends.base` and lower packages. Start reading in
:mod:`fluid.backends.lanes.pool`.
"""
