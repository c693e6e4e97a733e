"""Lanes that do not start: how often in a row on each device, and the caps of devices that take no further process.

A lane that cannot start beside others leaves its device with the trials that it has: its memory is full, or MPS or its
compute mode refuse a further client. Neither need last, so the cap ends after a while, and sooner once memory was freed
there. If a lane is refused again, the next cap lasts twice as long, so that a long sweep sees few such starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluid.engine import tuning
from fluid.engine.core import SessionState


@dataclass(frozen=True, slots=True)
class CapDeadline:
    """When to lift the cap of a device."""

    device: int


@dataclass(slots=True)
class _DeviceCap:
    """What there was on a device when it took no further process.

    Attributes:
        at: when that was, seconds.
        lasts: for how long the cap is to hold, seconds.
        lanes: lanes on the device.
        taken: bytes taken there, as far as they are known.
        is_eased: whether memory or a process has gone since, so that the cap is lifted sooner.
    """

    at: float
    lasts: float
    lanes: int
    taken: float
    is_eased: bool = False


class LaneStarts:
    """Counts lanes that did not start, caps devices at the trials that they have, and lifts the caps.

    A device that falls idle loses its cap at once.
    """

    def __init__(self, core: SessionState) -> None:
        self._core = core
        #: device -> lanes in a row that did not start, though none ran there
        self._failed: dict[int, int] = {}
        self._caps: dict[int, _DeviceCap] = {}
        #: device -> for how long the last cap was to hold, seconds; absent once a lane could start beside others
        self._lasted: dict[int, float] = {}

    def refused(self, device: int) -> None:
        """Caps a device on which a lane could not start beside others, at the trials that it has."""
        core = self._core
        before = self._lasted.get(device)
        lasts = self._lasted[device] = tuning.CAP_S if before is None else min(2.0 * before, tuning.LONGEST_CAP_S)
        lanes, taken = len(core.lanes.on(device)), core.memory.taken_bytes(device)
        self._caps[device] = _DeviceCap(core.now, lasts, lanes, taken)
        core.occupancy.cap(device, len(core.occupancy.residents[device]))
        core.deadlines.set(CapDeadline(device), core.now + lasts)

    def failed(self, device: int) -> int:
        """Counts a lane that did not start on a device without others; returns how many that are in a row."""
        count = self._failed[device] = self._failed.get(device, 0) + 1
        return count

    def succeeded(self, device: int) -> None:
        """A lane has started on a device; where it did beside others, the device refuses no further ones."""
        self._failed.pop(device, None)
        if device not in self._core.occupancy.caps and sum(lane.ready for lane in self._core.lanes.on(device)) > 1:
            self._lasted.pop(device, None)

    def forget(self, device: int) -> None:
        """Counts anew for a device that has joined."""
        self._failed.pop(device, None)
        self._lasted.pop(device, None)

    def ease(self) -> None:
        """Brings the end of caps forward where a process has ended, or known memory was freed, since the refusal."""
        core = self._core
        for device, cap in list(self._caps.items()):
            if device not in core.occupancy.caps:  # The device has fallen idle, or is gone.
                del self._caps[device]
                core.deadlines.clear(CapDeadline(device))
            elif not cap.is_eased and self._has_room(device, cap):
                cap.is_eased = True
                core.deadlines.set(CapDeadline(device), max(core.now, cap.at + cap.lasts * tuning.EASED_CAP))

    def _has_room(self, device: int, cap: _DeviceCap) -> bool:
        freed = cap.taken - self._core.memory.taken_bytes(device)
        return len(self._core.lanes.on(device)) < cap.lanes or freed > self._core.lanes.usual_bytes

    def due(self, key: CapDeadline) -> None:
        """Lifts a cap whose time has come, so that trials that wait may try the device again."""
        if self._caps.pop(key.device, None) is not None:
            self._core.occupancy.lift_cap(key.device)
            self._core.changed = True
