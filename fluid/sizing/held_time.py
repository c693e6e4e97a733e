"""How long devices have been held: what is to be paid for."""

from __future__ import annotations

import math


class HeldTime:
    """Adds up the time for which devices are held, each from its arrival to its loss. Pure.

    Example:
        >>> from fluid.sizing.held_time import HeldTime
        >>> meter = HeldTime()
        >>> meter.came(0, at=0.0)
        >>> meter.came(1, at=10.0)
        >>> meter.left(0, at=30.0)
        >>> meter.device_seconds(40.0)
        60.0

    Attributes:
        has_heard: whether a device has ever arrived.
    """

    def __init__(self) -> None:
        self.has_heard = False
        self._since: dict[int, float] = {}
        self._before = 0.0

    @property
    def held(self) -> frozenset[int]:
        """The devices that are held, by index."""
        return frozenset(self._since)

    def came(self, device: int, at: float) -> None:
        """A device can be used, from ``at`` seconds on. One that is held already stays held."""
        self.has_heard = True
        self._since.setdefault(device, at)

    def left(self, device: int, at: float) -> None:
        """A device was lost or given back; nothing changes if it was not held."""
        since = self._since.pop(device, math.inf)
        self._before += max(0.0, at - since)

    def all_left(self, at: float) -> None:
        """All devices were given back, as at the end of a session."""
        for device in self.held:
            self.left(device, at)

    def device_seconds(self, now: float) -> float:
        """Seconds for which devices were held by ``now``, added up over the devices."""
        return self._before + sum(max(0.0, now - since) for since in self._since.values())
