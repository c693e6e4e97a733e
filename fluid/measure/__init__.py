"""What was measured of trials: the profile, the runtime model, and cohorts of trials with paces of their own.

Pure, but for reading and writing JSON files. It imports ``errors``, ``_imports``, ``resources``, ``trialgroup`` and
msgspec and numpy. Start reading in :mod:`fluid.measure.runtime_model` (h(w)), then
:mod:`fluid.measure.profile`.
"""
