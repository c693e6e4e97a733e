"""Scenarios on the real engine: trials drawn from a file's description run on the simulated backend.

It imports :mod:`fluid.engine`, :mod:`fluid.backends.simulated`, :mod:`fluid.planners` and lower packages, and numpy.
Start reading in :mod:`fluid.simulation.simulate`.
"""
