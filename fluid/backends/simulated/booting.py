"""Virtual devices that were asked for and have not come yet."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from fluid.resources import Device


class BootingDevices:
    """Gives each device some time after it was asked for.

    Args:
        boot_s: that time, seconds.
        devices: the devices at the start; further ones are like the first of them, and have indices of their own.
    """

    def __init__(self, boot_s: float, devices: Sequence[Device]) -> None:
        self._boot_s = boot_s
        self._like = devices[0] if devices else Device(0)
        self._next = 1 + max((device.index for device in devices), default=-1)
        #: When each of them comes, ascending.
        self._due: deque[float] = deque()

    @property
    def next_at(self) -> float:
        """When the next one comes, seconds; infinite if none was asked for."""
        return self._due[0] if self._due else math.inf

    def ask(self, count: int, now: float) -> None:
        """Makes it ``count`` devices that are to come; those asked for last are withdrawn first."""
        while len(self._due) > max(0, count):
            self._due.pop()
        while len(self._due) < count:
            self._due.append(now + self._boot_s)

    def pop(self, now: float) -> list[Device]:
        """Returns those that have come by now."""
        come = []
        while self._due and self._due[0] <= now:
            self._due.popleft()
            come.append(replace(self._like, index=self._next))
            self._next += 1
        return come
