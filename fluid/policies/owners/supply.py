"""Supply: how many devices of each description there were on the average of the last day.

Venn ranks requirements by the devices that come by for each, not by those that happen to be there, as its devices come
and go (docs/theory.md, section 15).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from fluid.resources import Device

#: Seconds over which supply is averaged: what is there at night counts by day.
SUPPLY_S = 24 * 3600.0


class _Step(NamedTuple):
    """So many devices from then on, and the device-seconds until then."""

    at: float
    number: int
    before: float

    def until(self, at: float) -> float:
        """The device-seconds until a later time."""
        return self.before + self.number * (at - self.at)


class Supply:
    """Counts open devices by what they are: all but their index. All times are in seconds, and never go back."""

    def __init__(self) -> None:
        #: Of each description, how many there were, from the last change before the period on.
        self._steps: dict[Device, deque[_Step]] = {}
        #: device index -> description of an open device
        self._open: dict[int, Device] = {}
        self._began: float | None = None
        self._changed_at = 0.0

    def begin(self, now: float) -> None:
        """Has to be called when a group comes: what came and went before the first one is no supply."""
        if self._began is None:
            self._began = now

    def set(self, now: float, index: int, device: Device | None) -> None:
        """Notes what device of this index is open from now on; ``None`` for none."""
        device = None if device is None else replace(device, index=0)
        before = self._open.get(index)
        if device == before:
            return
        if before is not None:
            del self._open[index]
            self._step(now, before, -1)
        if device is not None:
            self._open[index] = device
            self._step(now, device, 1)

    def averages(self, now: float) -> Mapping[Device, float] | None:
        """How many devices of each description there were on average, over :data:`SUPPLY_S` or since the first group.

        ``None`` if those that there are have been there for all of that time, and no others.
        """
        if self._began is None:
            return None
        begin = max(self._began, now - SUPPLY_S)
        if self._changed_at <= begin or now <= begin:
            return None
        found = {}
        for device, steps in list(self._steps.items()):
            while len(steps) > 1 and steps[1].at <= begin:
                steps.popleft()
            if len(steps) == 1 and not steps[0].number:
                del self._steps[device]
            else:
                before = steps[0].until(begin) if steps[0].at <= begin else 0.0
                found[device] = (steps[-1].until(now) - before) / (now - begin)
        return found

    def _step(self, now: float, device: Device, more: int) -> None:
        self._changed_at = now
        steps = self._steps.setdefault(device, deque())
        if not steps:
            steps.append(_Step(now, more, 0.0))
            return
        last = steps[-1]
        if last.at == now:
            steps.pop()
        steps.append(_Step(now, last.number + more, last.until(now)))
