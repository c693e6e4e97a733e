"""Spare lanes: warm lanes without a trial, one per host, at hand when the lane of a trial on the longest path dies.

A lane is bound to its device, so a spare one is on the device of the trial whose critical path is the longest: the
seconds that it has left, and those of the iterations that later rungs may add. Any trial that starts on that device
takes the spare lane as an idle one (:meth:`fluid.engine.lanes.Lanes.acquire`), and the engine starts another one.
Lanes that are idle anyway are spare lanes, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fluid.engine import tuning
from fluid.engine.core import SessionState
from fluid.engine.lane_record import LaneRecord
from fluid.engine.records import TrialRecord


class SpareDeadline(NamedTuple):
    """When to look whether a host should have another spare lane."""


_DEADLINE = SpareDeadline()


class SpareLanes:
    """Starts and ends spare lanes. They never make a trial wait: a trial that wants their memory has them ended.

    Args:
        core: the session.
        most: spare lanes per host; 0 for none.
        max_failures: times that a failed trial is tried again: one that would not be needs no spare lane.
    """

    def __init__(self, core: SessionState, most: int, max_failures: int) -> None:
        self._core = core
        self._most = most
        self._max_failures = max_failures
        #: When they are looked at, if a deadline is set.
        self._look_at = 0.0
        #: Device -> when a spare lane could not be started there, seconds.
        self._refused: dict[int, float] = {}

    # -- when to look ----------------------------------------------------------------------------------------

    def consider(self) -> None:
        """Has spare lanes looked at soon, as trials or devices came or went."""
        self._core.scheduling.placing.warm.clear()
        if self._most and (self._core.drained or self._core.occupancy.held):
            self._look_in(tuning.SPARE_AFTER_S)

    def _look_in(self, seconds: float) -> None:
        """Has them looked at after so many seconds, or earlier."""
        at, deadlines = self._core.now + seconds, self._core.deadlines
        if _DEADLINE not in deadlines or at < self._look_at:
            self._look_at = at
            deadlines.set(_DEADLINE, at)

    def due(self, key: SpareDeadline) -> None:
        """Starts the spare lanes that are lacking, and ends those that are on the wrong device."""
        core = self._core
        residents = core.occupancy.residents
        self._refused = {device: at for device, at in self._refused.items() if device in residents}
        self._end_where_nothing_starts()
        if core.drained or not core.occupancy.held:
            return
        soon, paths, lanes = False, self._paths(), self._idle_lanes()
        hosts: dict[str, list[int]] = {}
        for device in core.occupancy.open_devices:
            hosts.setdefault(device.host, []).append(device.index)
        for devices in hosts.values():
            soon |= self._look_at_host(devices, paths, lanes)
        self._look_in(tuning.SPARE_LOOK_SOON_S if soon else tuning.SPARE_LOOK_S)

    def _look_at_host(self, devices: list[int], paths: dict[int, float], lanes: dict[int, list[LaneRecord]]) -> bool:
        """Starts and ends spare lanes of a host; returns whether to look again soon.

        Args:
            devices: those of the host that take trials.
            paths: device -> seconds of the longest critical path there, if it is known.
            lanes: device -> its idle lanes.
        """
        core = self._core
        if not self._are_ready(devices):
            return True
        busy = [device for device in devices if core.occupancy.residents[device]]
        at_rest = sum(device in lanes for device in devices if not core.occupancy.residents[device])
        wanted = self._wanted(busy, paths, lanes)[: max(0, self._most - at_rest)]
        lacking = [device for device in wanted if device not in lanes]
        elsewhere = [lane for device in busy if device not in wanted for lane in lanes.get(device, ())]
        # Idle lanes beyond the number that is wanted are left alone: trials may be packed there again.
        excess = at_rest + len(elsewhere) + len(wanted) - self._most
        if excess > 0 and lacking:
            if core.queue:
                return False  # Trials that wait may take those lanes.
            for lane in [lane for lane in elsewhere if lane.ready and lane.is_empty][:excess]:
                core.lanes.stop(lane.lane_id, core.commands)
                excess -= 1
        for device in lacking[: len(lacking) - max(0, excess)]:
            core.lanes.start(device, core.commands).spare = True
        return any(device not in paths for device in busy)

    # -- what there is ---------------------------------------------------------------------------------------

    def _paths(self) -> dict[int, float]:
        """Device -> seconds of the longest critical path of the trials there; devices where one is not known lack.

        A trial that is starting, or that would not be tried again, has none.
        """
        core, found = self._core, {}
        pace = core.estimates.usual_pace()
        for device in core.occupancy.open_devices:
            rows = core.occupancy.residents[device.index]
            trials = [core.trials.by_row[row] for row in rows if row in core.trials.by_row]
            if trials and all(trial.placement.iterates and core.estimates.is_measured(trial) for trial in trials):
                found[device.index] = max(self._path(trial, pace) for trial in trials)
        return found

    def _path(self, trial: TrialRecord, usual_pace: float) -> float:
        """Seconds until the critical path that begins with a trial ends; 0 if a spare lane would be of no use to it."""
        if trial.limits.failures >= self._max_failures or trial.spec.gang:
            return 0.0
        return self._core.estimates.seconds_left(trial) + trial.progress.follow_up_iterations * usual_pace

    def _idle_lanes(self) -> dict[int, list[LaneRecord]]:
        """Device -> the lanes there that a trial could take."""
        found: dict[int, list[LaneRecord]] = {}
        for lane in self._core.lanes:
            if not (lane.holders or lane.draining or lane.others or lane.killing is not None):
                found.setdefault(lane.device_id, []).append(lane)
        return found

    def _are_ready(self, devices: list[int]) -> bool:
        """Whether all lanes of these devices are warm: starting another one would slow those that are not."""
        return all(lane.ready for device in devices for lane in self._core.lanes.on(device))

    def _wanted(self, busy: list[int], paths: dict[int, float], lanes: dict[int, list[LaneRecord]]) -> list[int]:
        """The devices that spare lanes are for, the one with the longest path first.

        One that has an idle lane keeps it unless another path is much longer: a lane moves by being ended and started.
        """
        worth = [device for device in busy if device in paths and paths[device] >= tuning.LEAST_SPARED_S]
        able = [device for device in worth if device in lanes or self._has_room(device)]
        return sorted(able, key=lambda device: -paths[device] * (tuning.MOVES_SPARE if device in lanes else 1.0))

    def _has_room(self, device: int) -> bool:
        """Whether a device takes another process, and has the memory for it beside all that is there."""
        core, memory = self._core, self._core.memory
        most = core.lanes.most_per_device
        if device in core.occupancy.caps or (most is not None and len(core.lanes.on(device)) >= most):
            return False
        if core.now < self._refused.get(device, -tuning.SPARE_REFUSED_S) + tuning.SPARE_REFUSED_S:
            return False
        usable = memory.usable_bytes(device)
        if usable is None:
            return True
        if any(memory.need_of(row) is None for row in core.occupancy.residents[device]):
            return False  # It is measured alone, with as much memory as there is.
        return memory.taken_bytes(device) + core.lanes.usual_bytes <= usable

    # -- what becomes of them --------------------------------------------------------------------------------

    def lane_lost(self, lane: LaneRecord) -> None:
        """Has the trial of a lost lane placed where a warm lane is at rest, if there is none on its own device."""
        core = self._core
        if not self._most or len(lane.holders) != 1 or lane.others or lane.device_id not in core.occupancy.residents:
            return
        lanes, lost = self._idle_lanes(), core.occupancy.device(lane.device_id)
        warm = {device for device, there in lanes.items() if any(each.ready for each in there)}
        if lane.device_id in warm:
            return
        for device in core.occupancy.open_devices:
            is_alike = (device.host, device.model, device.speed) == (lost.host, lost.model, lost.speed)
            if is_alike and device.index in warm and not core.occupancy.residents[device.index]:
                trial = core.trials[next(iter(lane.holders))]
                core.scheduling.placing.warm[trial.row] = device.index
                return

    def could_not_start(self, lane: LaneRecord, *, blameless: bool) -> bool:
        """Takes note of a lane that was lost; returns whether it was a spare one that could not be started.

        Its device goes on as it is: trials run there.

        Args:
            lane: the lane.
            blameless: whether what lanes depend on had failed, so that the next one may start.
        """
        if lane.ready or not lane.spare:
            return False
        if blameless:
            return True
        self._refused[lane.device_id] = self._core.now
        return True

    def _end_where_nothing_starts(self) -> None:
        """Ends the spare lanes of devices that take no more trials."""
        core = self._core
        for lane in core.lanes:
            if lane.spare and (core.drained or core.occupancy.is_closed(lane.device_id)):
                core.lanes.stop(lane.lane_id, core.commands)

    def problems(self) -> Iterator[str]:
        """What is broken of the invariants: there are not too many spare lanes, and they take no trial's memory."""
        core, counts = self._core, dict[str, int]()
        for lane in core.lanes:
            if not lane.spare:
                continue
            host = core.occupancy.device(lane.device_id).host
            counts[host] = counts.get(host, 0) + 1
            if not lane.is_empty:
                yield f"lane {lane.lane_id} is spare, and holds trials"
            usable, taken = core.memory.usable_bytes(lane.device_id), core.memory.taken_bytes(lane.device_id)
            if usable is not None and lane.own_bytes > 0.0 and taken > usable:
                yield f"lane {lane.lane_id} is spare on device {lane.device_id}, where {taken - usable:.0f} bytes lack"
        for host, count in counts.items():
            if count > self._most:
                yield f"host {host!r} has {count} spare lanes, not {self._most}"
