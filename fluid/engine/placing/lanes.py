"""The lanes of a session: which trial runs in each, and whose states it keeps. Knows nothing of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from fluid.devices.memory import MemoryLedger
from fluid.engine.commands import Command, StartLane, StopLane
from fluid.engine.records import LaneRecord, TrialRecord
from fluid.resources import whole_bytes

#: Idle lanes of a device, each of which keeps the state of one trial: so many if the machine has room for them. And so
#: many if the states cannot be saved, as long as it is not known what the machine has.
MOST_IDLE = 32
DEFAULT_PROCESSES = 128


class Fusion(NamedTuple):
    """With which trials one may share a lane.

    Attributes:
        group: those.
        rows: as many are to share a lane; where all lanes of a device have so many, a further one has another lane.
    """

    group: str
    rows: int

    def joins(self, lane: LaneRecord) -> bool:
        """Whether the trial may share a lane that others hold."""
        return lane.sharing_group == self.group and len(lane.holders) < self.rows


class Company(Protocol):
    """With which trials one may share a lane."""

    @property
    def group(self) -> str:
        """Those that the lane may be shared with from then on."""

    def joins(self, lane: LaneRecord) -> bool:
        """Whether the trial may share a lane that others hold."""


class Lanes:
    """The lanes of all devices.

    Args:
        resident_limit: how many states of unknown bytes one device keeps of trials that do not run there; beyond it
            the least recently used one is evicted.
        memory: ledger of the bytes that lanes and residents take on their devices.

    Attributes:
        most_per_device: as many processes as can use one device; ``None`` for no limit. Trials hold no more lanes than
            that (:mod:`fluid.session.options`); idle ones that are in the way of a further lane are ended.
        most_idle: lanes of a device that keep the state of one trial each.
        most_processes: such lanes of a device that the machine can have processes for, where the states cannot be
            saved.
    """

    def __init__(self, resident_limit: int, memory: MemoryLedger) -> None:
        self.resident_limit = resident_limit
        self.most_per_device: int | None = None
        self.most_idle = MOST_IDLE
        self.most_processes = DEFAULT_PROCESSES
        self._memory = memory
        #: The most bytes that a lane takes for itself, as measured last: the estimate for lanes that were not measured.
        self.usual_bytes = 0.0
        #: Whether a lane with memory of its own was ended since :meth:`pop_freed` was called.
        self._has_freed = False
        #: Devices on which lanes were ended to make room, which takes them a moment.
        self._retired: set[int] = set()
        #: Lanes that a trial has left since :meth:`end_over` was called.
        self._left: set[int] = set()
        #: Devices of which a lane was taken, or came or went, since :mod:`fluid.policies.spare_lanes` looked at them;
        #: and how many were ended there as their trials had left.
        self.changed_on: set[int] = set()
        self.ended_on: dict[int, int] = {}
        #: Lanes that have to be told, or may have to, how many trials they train in one step.
        self.rows_due: set[int] = set()
        self._lanes: dict[int, LaneRecord] = {}
        self._by_device: dict[int, dict[int, LaneRecord]] = {}
        self._next = 0

    def __getitem__(self, lane_id: int) -> LaneRecord:
        return self._lanes[lane_id]

    def get(self, lane_id: int) -> LaneRecord | None:
        """The lane of that id; ``None`` if there is none."""
        return self._lanes.get(lane_id)

    def __contains__(self, lane_id: object) -> bool:
        return lane_id in self._lanes

    def __iter__(self) -> Iterator[LaneRecord]:
        return iter(list(self._lanes.values()))

    def __len__(self) -> int:
        return len(self._lanes)

    def on(self, device_id: int) -> list[LaneRecord]:
        """The lanes of a device."""
        return list(self._by_device.get(device_id, {}).values())

    def most_idle_beside(self, running: int) -> int:
        """How many lanes of a device may keep the state of a trial each, beside so many in which trials run."""
        if self.most_per_device is None:
            return self.most_idle
        return min(self.most_idle, max(0, self.most_per_device - running - 1))

    def width_of(self, trial: TrialRecord, width: float, *, fused: bool) -> float:
        """The width at which a trial iterates, as results tell it: the share of a device, or how many it has.

        Args:
            trial: a trial that holds lanes.
            width: its place in the plan. Of p trials that share a lane, each has ``1/p``; while one of them iterates
                by itself, the lane's part of the device is all its own.
            fused: whether it iterates together with those of its lane.
        """
        lanes = trial.placement.hosts or trial.placement.lanes
        if fused or width > 1.0 or trial.sharing_group is None or not lanes:
            return width
        device = self._lanes[lanes[0]].device_id
        return 1.0 / max(1, sum(bool(lane.holders) for lane in self._by_device[device].values()))

    # -- lanes come and go -------------------------------------------------------------------------------

    def start(self, device_id: int, commands: list[Command], others: tuple[int, ...] = ()) -> LaneRecord:
        """Asks for a new lane on a device; with ``others``, for one that runs gangs on all of them."""
        lane = LaneRecord(self._next, device_id, others)
        self._next += 1
        if self.most_per_device is not None:
            for device in lane.device_ids:
                self._end_idle(device, len(self.on(device)) + 1 - self.most_per_device, commands)
        self._lanes[lane.lane_id] = lane
        lane.own_bytes = self.usual_bytes
        for device in lane.device_ids:
            self._by_device.setdefault(device, {})[lane.lane_id] = lane
            self._update_memory(device)
            self.changed_on.add(device)
        commands.append(StartLane(lane.lane_id, device_id, others))
        return lane

    def ready(self, lane_id: int, own_bytes: float) -> None:
        """Marks a lane as warm.

        Args:
            lane_id: the lane.
            own_bytes: device memory that it takes for itself; 0 if unknown.
        """
        self._lanes[lane_id].ready = True
        self.changed_on.update(self._lanes[lane_id].device_ids)
        if own_bytes > 0.0:
            self.measured(lane_id, own_bytes)

    def measured(self, lane_id: int, own_bytes: float) -> None:
        """Books what a lane was measured to take for itself, in place of what it took before.

        Args:
            lane_id: the lane.
            own_bytes: device memory, above 0.
        """
        lane = self._lanes[lane_id]
        was_most = lane.is_measured and lane.own_bytes >= self.usual_bytes
        lane.own_bytes, lane.is_measured = whole_bytes(own_bytes), True
        if was_most or lane.own_bytes > self.usual_bytes:
            self._update_usual()
        for device_id in lane.device_ids:
            self._update_memory(device_id)

    def _update_usual(self) -> None:
        """Estimates again what lanes take that were not measured."""
        usual = max((lane.own_bytes for lane in self._lanes.values() if lane.is_measured), default=self.usual_bytes)
        if usual == self.usual_bytes:
            return
        self.usual_bytes = usual
        for lane in self._lanes.values():
            if not lane.is_measured:
                lane.own_bytes = usual
        for device_id in self._by_device:
            self._update_memory(device_id)

    def lose(self, lane_id: int) -> LaneRecord:
        """Removes a lane and frees what it reserved."""
        lane = self._lanes.pop(lane_id)
        for device_id in lane.device_ids:
            on_device = self._by_device[device_id]
            del on_device[lane_id]
            if not on_device:
                del self._by_device[device_id]
            self._update_memory(device_id)
            self.changed_on.add(device_id)
        for trial_id in list(lane.reserved):
            self._free_memory(lane, trial_id)
        if lane.is_measured and lane.own_bytes >= self.usual_bytes:
            self._update_usual()
        return lane

    def stop_device(self, device_id: int, commands: list[Command]) -> list[LaneRecord]:
        """Removes and ends all lanes of a device, also those that have other devices too."""
        lost = [self.lose(lane.lane_id) for lane in self.on(device_id)]
        commands += [StopLane(lane.lane_id) for lane in lost]
        self._retired.discard(device_id)
        return lost

    def retire(self, device_id: int, commands: list[Command], *, while_: Callable[[], bool] | None = None) -> None:
        """Ends empty lanes of a device, but for one, while that is wanted; all of them if it is not said.

        How much that frees is for the ledger to say: room for one lane is beyond the watermark.
        """
        lanes = self.on(device_id)
        left = len(lanes)
        for lane in lanes:
            if left == 1 or not (while_ is None or while_()):
                break
            if lane.own_bytes > 0.0 and lane.is_empty:
                left -= 1
                self._end(lane, commands)
                self._retired.add(device_id)

    def have_retired(self, device_ids: Iterable[int]) -> bool:
        """Whether lanes of these devices were ended to make room since the last call about them."""
        retired = self._retired.intersection(device_ids)
        self._retired -= retired
        return bool(retired)

    # -- which trial runs where --------------------------------------------------------------------------

    def acquire(
        self,
        device_id: int,
        trial: TrialRecord,
        commands: list[Command],
        company: Company | None = None,
        *,
        is_wide: bool = False,
    ) -> LaneRecord:
        """Gives a trial a lane of a device: the one that keeps its state, else one that it may have, else a new one.

        Of lanes that run trials one after another, one that another trial is about to leave comes before idle ones:
        then no more trials run on the device than hold it. Lanes of gangs that hold nothing are ended there. A trial
        that may share a lane joins one that others hold, if it is to. One that ``is_wide`` has further lanes.
        """
        best: LaneRecord | None = None
        best_rank: tuple[bool, bool, bool, bool, bool, int] | None = None
        gangs = False
        for lane in self._by_device.get(device_id, {}).values():
            if lane.others:
                gangs = True
            elif _may_have(trial, lane, company, is_wide=is_wide):
                away = trial.trial_id not in lane.residents
                rank = (not lane.holders, away, not lane.draining, not lane.used, not lane.ready, len(lane.residents))
                if best_rank is None or rank < best_rank:
                    best, best_rank = lane, rank
        if gangs:
            self._end_idle_gangs((device_id,), commands)
        if best is None:
            best = self.start(device_id, commands)
        best.sharing_group = None if company is None else company.group
        return self._give(best, trial)

    def acquire_all(
        self,
        device_ids: Sequence[int],
        trial: TrialRecord,
        commands: list[Command],
        company: Company | None = None,
    ) -> list[LaneRecord]:
        """Gives a trial lanes of its devices: one on each, or for a gang one of them all."""
        if trial.spec.gang:
            return [self._acquire_gang(tuple(device_ids), trial, commands)]
        is_wide = len(device_ids) > 1
        return [self.acquire(device_id, trial, commands, company, is_wide=is_wide) for device_id in device_ids]

    def _acquire_gang(self, device_ids: tuple[int, ...], trial: TrialRecord, commands: list[Command]) -> LaneRecord:
        """Gives a gang an idle lane of exactly these devices; those of other sets that hold nothing are ended."""
        wanted = set(device_ids)
        idle = [lane for lane in self.on(device_ids[0]) if set(lane.device_ids) == wanted and _may_have(trial, lane)]
        best = max(
            idle, key=lambda lane: (trial.trial_id in lane.residents, not lane.draining, lane.ready), default=None
        )
        self._end_idle_gangs(device_ids, commands, but=best)
        if best is None:
            best = self.start(device_ids[0], commands, device_ids[1:])
        return self._give(best, trial)

    def _give(self, lane: LaneRecord, trial: TrialRecord) -> LaneRecord:
        lane.holders[trial.trial_id] = None
        lane.shared = not trial.spec.isolated
        self.rows_due.add(lane.lane_id)
        self._note_holders(lane)
        return lane

    def _note_holders(self, lane: LaneRecord) -> None:
        """Has spare lanes and memory looked at, as a lane was given to a trial, or one has left it."""
        for device_id in lane.device_ids:
            self.changed_on.add(device_id)
            self._update_memory(device_id)

    def use(self, lane_ids: Iterable[int]) -> None:
        """Marks lanes as used: they are about to be told of a trial."""
        for lane_id in lane_ids:
            self._lanes[lane_id].used = True  # It has a holder, so that its memory is booked as it was.

    def spend(self, lane_id: int) -> None:
        """Gives a lane to no further trial, as one has changed its process for good."""
        if lane_id in self._lanes:
            self._lanes[lane_id].spent = True
            self._left.add(lane_id)

    def end_over(self, commands: list[Command]) -> None:
        """Ends the lanes in which no trial is to run any more, of those that trials have left."""
        left, self._left = self._left, set()
        for lane_id in sorted(left):
            lane = self._lanes.get(lane_id)
            if lane is not None and lane.is_over:
                self._end(lane, commands)
                for device_id in lane.device_ids:
                    self.ended_on[device_id] = self.ended_on.get(device_id, 0) + 1

    def _end_idle_gangs(
        self, device_ids: tuple[int, ...], commands: list[Command], but: LaneRecord | None = None
    ) -> None:
        """Ends lanes of gangs that hold nothing, as their devices are wanted otherwise."""
        for device_id in device_ids:
            for lane in self.on(device_id):
                if lane.others and lane is not but and lane.ready and lane.is_empty:
                    self._end(lane, commands)

    def _end_idle(self, device_id: int, count: int, commands: list[Command]) -> None:
        """Ends so many lanes of a device that hold nothing, if there are so many."""
        idle = [lane for lane in self.on(device_id) if lane.ready and lane.is_empty]
        for lane in idle[: max(0, count)]:
            self._end(lane, commands)

    def stop(self, lane_id: int, commands: list[Command]) -> None:
        """Ends a lane that holds nothing."""
        self._end(self._lanes[lane_id], commands)

    def _end(self, lane: LaneRecord, commands: list[Command]) -> None:
        self._has_freed = self._has_freed or lane.own_bytes > 0.0
        self.lose(lane.lane_id)
        commands.append(StopLane(lane.lane_id))

    def pop_freed(self) -> bool:
        """Whether a lane was ended since the last call: memory of its devices, which may be several, is free then."""
        freed, self._has_freed = self._has_freed, False
        return freed

    def release(self, trial_id: str, lane_ids: Iterable[int]) -> None:
        """Takes a trial off lanes that it holds; lost ones are ignored."""
        for lane_id in lane_ids:
            lane = self._lanes.get(lane_id)
            if lane is not None:
                lane.holders.pop(trial_id, None)
                self._left.add(lane_id)
                if not lane.holders:
                    lane.sharing_group = None
                self._note_holders(lane)

    def drain(self, lane_id: int, trial_id: str, memory: float) -> None:
        """Marks a lane as draining: the trial that may run there was told to leave, and holds memory until it has."""
        lane = self._lanes[lane_id]
        lane.draining.add(trial_id)
        self._hold_memory(lane, trial_id, memory)

    def drained(self, lane_id: int, trial_id: str) -> bool:
        """Ends the draining of a lane that a trial has left; returns whether the lane waited for that trial."""
        lane = self._lanes.get(lane_id)
        if lane is None:
            return False
        self._left.add(lane_id)
        lane.dismissed.discard(trial_id)  # A trial that has failed has dropped that, too.
        if trial_id not in lane.draining:
            return False
        lane.draining.remove(trial_id)
        self._free_memory(lane, trial_id)
        return True

    # -- kept states -------------------------------------------------------------------------------------

    def keep(self, lane_id: int, trial_id: str, memory: float) -> None:
        """Keeps the state of a trial that does not run, as a resident of a lane."""
        lane = self._lanes[lane_id]
        lane.residents[trial_id] = None
        self._hold_memory(lane, trial_id, memory)

    def remove_resident(self, lane_id: int, trial_id: str) -> None:
        """Removes a resident that runs again or has left, and frees its memory in the lane's account."""
        lane = self._lanes.get(lane_id)
        if lane is not None:
            lane.residents.pop(trial_id, None)
            lane.dismissed.discard(trial_id)
            self._left.add(lane_id)
            if trial_id not in lane.draining:
                self._free_memory(lane, trial_id)

    def dismiss(self, lane_id: int, trial_id: str) -> None:
        """Removes a resident that was told to leave; its memory stays reserved until the lane reports that it left."""
        lane = self._lanes[lane_id]
        lane.residents.pop(trial_id, None)
        lane.dismissed.add(trial_id)

    def dropped(self, lane_id: int, trial_id: str) -> bool:
        """Takes note that a lane has dropped a resident that was told to leave; returns whether there was one.

        The lane may have been told since to run the trial, and to stop it: that has an answer of its own.
        """
        lane = self._lanes.get(lane_id)
        if lane is None or trial_id not in lane.dismissed:
            return False
        self.remove_resident(lane_id, trial_id)
        return True

    def check_memory(self, lane_id: int | None) -> None:
        """Looks after this instant whether all still fits on a lane's devices, if there is that lane."""
        for device in self._lanes[lane_id].device_ids if lane_id in self._lanes else ():
            self._memory.request_check(device)

    def kept_on(self, device_id: int) -> list[tuple[int, str]]:
        """(lane, trial) for each state that a device keeps."""
        on_device = self._by_device.get(device_id, {})
        return [(lane.lane_id, trial_id) for lane in on_device.values() for trial_id in lane.residents]

    # -- memory ------------------------------------------------------------------------------------------

    def kept_bytes(self, lane_id: int, trial_id: str) -> float:
        """Bytes reserved for what a lane keeps of a trial."""
        return self._lanes[lane_id].reserved.get(trial_id, 0.0)

    def _update_memory(self, device_id: int) -> None:
        """Tells placement what the lanes of a device take for themselves."""
        if self.usual_bytes > 0.0:
            lanes = self._by_device.get(device_id, {}).values()
            memory = sum(lane.own_bytes for lane in lanes)
            resting = sum(lane.used and not lane.shared and not lane.holders for lane in lanes)
            self._memory.set_lanes(device_id, len(lanes), memory, self.usual_bytes, resting)

    def _hold_memory(self, lane: LaneRecord, trial_id: str, memory: float) -> None:
        self._free_memory(lane, trial_id)
        if memory > 0.0:
            lane.reserved[trial_id] = held = whole_bytes(memory)
            for device_id in lane.device_ids:
                self._memory.reserve(device_id, held)

    def _free_memory(self, lane: LaneRecord, trial_id: str) -> None:
        memory = lane.reserved.pop(trial_id, 0.0)
        for device_id in lane.device_ids if memory else ():
            self._memory.reserve(device_id, -memory)


def _may_have(trial: TrialRecord, lane: LaneRecord, company: Company | None = None, *, is_wide: bool = False) -> bool:
    """Whether a trial may run in a lane.

    One that is to have a process of its own may where no trial has run; and where its state is kept, if it goes on with
    that there. It does not once the state is being saved, and not together with other lanes, which have to restore it.
    """
    goes_on = trial.trial_id in lane.residents and not trial.residence.saving
    if trial.spec.isolated:
        is_fresh = not (lane.used or lane.spent or lane.killing is not None)
        return not lane.holders and (is_fresh or (goes_on and not is_wide))
    if not goes_on and (lane.spent or (lane.used and not lane.shared)):
        return False
    return not lane.holders or (company is not None and company.joins(lane))
