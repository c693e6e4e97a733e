"""Spare lanes: unused ones, at hand when a trial starts, or when the lane of one dies.

A trial that is to have a process of its own waits for no fork then, nor for what a lane does at first, such as making a
CUDA context. As soon as the last unused lane of a device was taken, another one is started. Spare lanes follow the
queue: beyond one, which is for a trial whose lane dies, a device has no more of them than trials wait.

What it gains (``benchmarks/isolation.py``): from one trial to the next in a process of its own 4.7 ms, 11.8 ms
without.
"""

from __future__ import annotations

from collections.abc import Iterator

from fluid.engine.core import SessionState
from fluid.engine.policy import Policy
from fluid.engine.records import LaneRecord

#: No spare lane is started on a device for so many seconds after one could not be started there.
SPARE_REFUSED_S = 600.0


class SpareLanes(Policy):
    """Starts and ends spare lanes. They never make a trial wait: a trial that wants their memory has them ended.

    Args:
        core: the session.
        most: spare lanes per device while trials wait, and as many as trials that lately ended there at one instant;
            0 for none.
    """

    def __init__(self, core: SessionState, most: int) -> None:
        self._core = core
        self._most = most
        #: Device -> when a spare lane could not be started there, seconds.
        self._refused: dict[int, float] = {}
        #: Device -> lanes that were ended there at the latest instant at which some were.
        self._ended: dict[int, int] = {}

    def at_end(self) -> None:
        """Starts the spare lanes that are lacking where lanes changed, and ends those that nothing starts in.

        While nothing runs or waits, there is no need of any: those that there are stay for the trials to come.
        """
        core = self._core
        changed, core.lanes.changed_on = core.lanes.changed_on, set()
        ended, core.lanes.ended_on = core.lanes.ended_on, {}
        self._ended |= ended
        for device in sorted(changed):
            if device not in core.occupancy.residents:
                self._refused.pop(device, None)
                self._ended.pop(device, None)
            elif core.occupancy.is_closed(device):
                for lane in self._unused(device):
                    core.lanes.stop(lane.lane_id, core.commands)
            elif self._most and (core.occupancy.held or core.queue):
                self._follow(device)
        core.lanes.changed_on.clear()

    def _follow(self, device: int) -> None:
        """Starts the next spare lane that a device lacks, or ends those that are more than trials wait."""
        core, unused = self._core, self._unused(device)
        at_once = max(self._most, min(self._ended.get(device, 0), core.occupancy.limit(device)))
        wanted = min(at_once, max(1, len(core.queue)))
        for lane in unused[wanted:]:
            core.lanes.stop(lane.lane_id, core.commands)
        # A lane that is starting would be slowed down by another one; the device is looked at again once it is ready.
        if len(unused) < wanted and all(lane.ready for lane in core.lanes.on(device)) and self._has_room(device):
            core.lanes.start(device, core.commands)

    def _unused(self, device: int) -> list[LaneRecord]:
        return [lane for lane in self._core.lanes.on(device) if lane.is_unused]

    def _has_room(self, device: int) -> bool:
        """Whether a device takes another process, and has the memory for it beside all that is there."""
        core, memory = self._core, self._core.memory
        most = core.lanes.most_per_device
        if device in core.occupancy.caps or (most is not None and len(core.lanes.on(device)) >= most):
            return False
        if core.now < self._refused.get(device, -SPARE_REFUSED_S) + SPARE_REFUSED_S:
            return False
        usable = memory.usable_bytes(device)
        if usable is None:
            return True
        if any(memory.need_of(row) is None for row in core.occupancy.residents[device]):
            return False  # It is measured alone, with as much memory as there is.
        return memory.taken_bytes(device) + core.lanes.usual_bytes <= usable

    def memory_short(self, device: int) -> None:
        """Starts no spare lane on a device for a while."""
        self._refused[device] = self._core.now

    def takes_lost(self, lane: LaneRecord, *, blameless: bool) -> bool:
        """Takes note of a lane that was lost; returns whether it was a spare one that could not be started.

        Its device goes on as it is: trials run there.

        Args:
            lane: the lane.
            blameless: whether what lanes depend on had failed, so that the next one may start.
        """
        if lane.ready or lane.holders or lane.others:
            return False
        if not any(other.ready for other in self._core.lanes.on(lane.device_id)):
            return False
        if not blameless:
            self.memory_short(lane.device_id)
        return True

    def problems(self) -> Iterator[str]:
        """What is broken of the invariants: spare lanes are where trials start, and no lane stays that is over."""
        core = self._core
        for lane in core.lanes:
            if lane.is_over:
                yield f"lane {lane.lane_id} has done its work, and goes on"
            if lane.is_unused and core.occupancy.is_closed(lane.device_id):
                yield f"lane {lane.lane_id} is unused on device {lane.device_id}, where nothing starts"
