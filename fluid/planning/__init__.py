"""What every planner stands on: the runtime model, instances, occupancy, rollout, bounds and the profile.

Pure functions and state: no clock, no IO, no randomness. It imports ``errors``, ``resources``, ``trialgroup``, numpy.
Start reading in :mod:`fluid.planning.planner` (what a planner is), then :mod:`fluid.planning.runtime_model` (h(w)).
"""
