"""Fluid under Ray Tune: Tune's searchers and schedulers decide, Fluid's lanes run.

:class:`FluidScheduler` wraps the scheduler of a ``tune.run`` or ``Tuner``; nothing in Ray is patched.
:mod:`fluid.tune` does the wrapping for you.
"""

from fluid.integrations.ray_tune.scheduler import FluidScheduler

__all__ = ["FluidScheduler"]
