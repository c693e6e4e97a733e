"""What a lane tells of itself after a trial's first iteration and at rest: its own memory, and what it has loaded.

Modules that a trial's code names are loaded by the fork server before any lane. Of those that it finds in other ways,
such as by ``importlib``, the driver learns here, so that lanes that are started later have them from the start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from fluid.lane.device_messages import ModulesLoaded, OwnBytesChanged
from fluid.lane.own_memory import OwnMemory

#: Modules that take long to load and can be loaded before a fork, in the order in which they load each other; PyTorch's
#: optimizers load the last one when the first of them is made.
_SLOW = ("numpy", "torch", "torchvision", "torch._dynamo")


class LaneNews:
    """Finds out what has changed.

    Args:
        own_memory: what the lane takes for itself.
    """

    def __init__(self, own_memory: OwnMemory) -> None:
        self._own_memory = own_memory
        self._lacking = [name for name in _SLOW if name not in sys.modules]

    def since_last(self, held: float, now: float) -> Iterator[OwnBytesChanged | ModulesLoaded]:
        """What is to be told.

        Args:
            held: bytes that the trials in the lane hold, while no memory is cached.
            now: the time, seconds.
        """
        own_bytes = self._own_memory.changed(held)
        if own_bytes is not None:
            yield OwnBytesChanged(now, own_bytes)
        if self._lacking and (loaded := tuple(name for name in self._lacking if name in sys.modules)):
            self._lacking = [name for name in self._lacking if name not in loaded]
            yield ModulesLoaded(now, loaded)
