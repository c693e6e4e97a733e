"""Ray Tune on Fluid: Tune's searchers and schedulers decide, Fluid's lanes train.

:class:`FluidScheduler` wraps the scheduler of a ``tune.run`` or ``Tuner``; nothing in Ray is patched but the dates of
sweeps. :mod:`fluid.tune` does the wrapping. Start reading at ``scheduler``, then ``manager`` (what the controller
calls) and ``controller.bridge`` (where its requests and the engine's events meet).
"""

from fluid.integrations.ray_tune.scheduler import FluidScheduler

__all__ = ["FluidScheduler"]
