"""The loop of a native sweep: starts trials, extends and stops them as a scheduler of :mod:`fluid.search` decides.

:mod:`fluid.sweep` is the door. Start reading in :mod:`fluid.sweeping.loop`.
"""
