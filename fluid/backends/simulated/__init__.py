"""A backend on a virtual clock: it answers the engine's commands as devices would, by the runtime model.

It imports the engine's commands and events, :mod:`fluid.planners`, :mod:`fluid.measure` and lower packages. Start
reading in :mod:`fluid.backends.simulated.backend` (commands to events); :mod:`fluid.backends.simulated.steps` says what
an iteration is, and :mod:`fluid.backends.simulated.devices` how fast it is.
"""

from fluid.backends.simulated.backend import SimulatedBackend
from fluid.backends.simulated.steps import Truth

__all__ = ["SimulatedBackend", "Truth"]
