"""Supply: how many devices of each description there were on the average of the last day.

Venn ranks requirements by the devices that come by for each, not by those that happen to be there, as its devices come
and go (docs/theory.md, section 15).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from fluid.resources import Device

#: Seconds over which supply is averaged: what is there at night counts by day.
SUPPLY_S = 24 * 3600.0


class _Stay(NamedTuple):
    """A device of a description that was open from one time to another."""

    device: Device
    since: float
    until: float = math.inf


class Supply:
    """Counts open devices by what they are: all but their index. All times are in seconds, and never go back."""

    def __init__(self) -> None:
        #: device index -> the stay of an open device
        self._open: dict[int, _Stay] = {}
        #: Stays that have ended, by ascending end.
        self._ended: deque[_Stay] = deque()
        self._began: float | None = None

    def begin(self, now: float) -> None:
        """Has to be called when a group comes: what came and went before the first one is no supply."""
        if self._began is None:
            self._began = now

    def set(self, now: float, index: int, device: Device | None) -> None:
        """Notes what device of this index is open from now on; ``None`` for none."""
        device = None if device is None else replace(device, index=0)
        before = self._open.get(index)
        if before is not None:
            if before.device == device:
                return
            self._ended.append(self._open.pop(index)._replace(until=now))
        if device is not None:
            self._open[index] = _Stay(device, now)

    def averages(self, now: float) -> Mapping[Device, float] | None:
        """How many devices of each description there were on average, over :data:`SUPPLY_S` or since the first group.

        ``None`` if those that there are have been there for all of that time, and no others.
        """
        if self._began is None:
            return None
        begin = max(self._began, now - SUPPLY_S)
        while self._ended and self._ended[0].until <= begin:
            self._ended.popleft()
        if now <= begin or not (self._ended or any(stay.since > begin for stay in self._open.values())):
            return None
        found: dict[Device, float] = {}
        for device, since, until in (*self._open.values(), *self._ended):
            share = (min(until, now) - max(since, begin)) / (now - begin)
            found[device] = found.get(device, 0.0) + share
        return found
