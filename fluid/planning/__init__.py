"""The basis of all planners: the runtime model, instances, occupancy, rollout, bounds and the profile.

Pure, but for reading and writing JSON files: no clock, no randomness. It imports ``errors``, ``_imports``,
``resources``, ``trialgroup`` and numpy, and cattrs to read files.
Start reading in :mod:`fluid.planning.planner` (what a planner is), then :mod:`fluid.planning.runtime_model` (h(w)).
"""
