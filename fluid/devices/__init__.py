"""Who is where, and what fits: occupancy, idle devices, memory, constraints, the order of starts.

Pure: no IO, no clock, no randomness. It imports ``errors``, ``resources``, ``trialgroup`` and numpy.
Start reading in :mod:`fluid.devices.occupancy`.
"""
