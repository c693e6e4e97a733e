"""Making room: which running trials pause for an urgent one, and on which devices it then starts.

On each device, trials are paused in ascending order of the progress that is lost per byte that they give back, as in
Andes (Liu et al., Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services, 2024),
until the newcomer fits; then those that turn out not to be needed stay. Among devices, the one counts on which least
progress is lost in all, and of equal ones that which is free first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import NamedTuple

from fluid.engine.core import SessionState
from fluid.engine.records import TrialRecord
from fluid.measure.runtime_model import residents_at
from fluid.trialgroup import TrialState


class RoomMate(NamedTuple):
    """A trial on a device.

    Attributes:
        row: the caller's number of the trial; a wide one is on several devices.
        gain: weighted progress that is lost in each second that it pauses.
        size: bytes that it takes or, where those are not known of all trials there, its share of a device.
        freed: bytes that are free once it has paused and keeps its state there.
        state: further bytes that are free if its state is fetched away.
        most: trials that it tolerates on its device, itself included.
        wait: predicted seconds until it has left.
        yields: whether it may be paused.
        leaves: whether it leaves in any case.
        shares: whether the newcomer may run beside it.
    """

    row: int
    gain: float
    size: float = 1.0
    freed: float = 0.0
    state: float = 0.0
    most: int = 1
    wait: float = 0.0
    yields: bool = True
    leaves: bool = False
    shares: bool = True


class Room(NamedTuple):
    """A device as the newcomer sees it.

    Attributes:
        device: its index.
        residents: the trials there.
        most: trials that the newcomer tolerates there, itself included.
        need: bytes that it needs there; 0 if unknown.
        free: bytes that are free now, negative if too many are taken; ``None`` where memory does not bound packing.
        kept: further bytes that are free once states kept there were fetched away, which only a newcomer alone causes.
        pending: whether memory is about to be freed there, or trials are about to leave.
        cap: most trials there, whatever they tolerate.
        host: name of its machine.
        peaks: rows that have left -> ephemeral bytes that the others and the newcomer have at once, where trials take
            turns in lanes; ``free``, ``freed`` and ``need`` are without ephemeral bytes then. ``None`` elsewhere.
    """

    device: int
    residents: Sequence[RoomMate]
    most: int = 1
    need: float = 0.0
    free: float | None = None
    kept: float = 0.0
    pending: bool = False
    cap: float = math.inf
    host: str = ""
    peaks: Callable[[Collection[int]], float] | None = None


class Clearing(NamedTuple):
    """What makes room for a newcomer.

    Attributes:
        loss: weighted progress that is lost in each second, for as long as the newcomer runs.
        wait: predicted seconds until it can start.
        devices: those that it gets.
        rows: the trials to pause, without those that leave anyway.
    """

    loss: float
    wait: float
    devices: tuple[int, ...]
    rows: tuple[int, ...]


def room_on(room: Room) -> Clearing | None:
    """What makes room on one device; ``None`` if nothing does, or it is free now: the newcomer was refused there."""
    pausing = who_pauses(room)
    if pausing is None or not (pausing or _is_pending(room)):
        return None
    loss, wait = _cost(room, pausing, ())
    return Clearing(loss, wait, (room.device,), tuple(each.row for each in pausing))


def choose_rooms(rooms: Sequence[Room], width: int, *, one_host: bool = False) -> Clearing | None:
    """Chooses several devices for a newcomer that needs them at once; at least one of them is not free yet.

    Args:
        rooms: the devices that it may use.
        width: number of devices that it needs.
        one_host: whether they have to be of one machine.

    Returns:
        The choice; ``None`` if no pause makes room.
    """
    if not one_host:
        return _choose(rooms, width)
    by_host: dict[str, list[Room]] = {}
    for room in rooms:
        by_host.setdefault(room.host, []).append(room)
    found = [choice for some in by_host.values() if (choice := _choose(some, width)) is not None]
    return min(found, default=None)


def _choose(rooms: Sequence[Room], width: int) -> Clearing | None:
    gone: dict[int, RoomMate] = {}
    chosen: list[Room] = []
    wait = 0.0
    options = {room.device: (room, pausing) for room in rooms if (pausing := who_pauses(room)) is not None}
    # A wide trial that pauses frees its other devices too: each of those that can be used bears a part of its loss.
    devices_of = Counter(each.row for _, pausing in options.values() for each in pausing)
    while len(chosen) < width:
        if not options:
            return None
        most = width - len(chosen)
        shared = {row: min(most, count) for row, count in devices_of.items()}
        device = min(options, key=lambda device: (*_cost(*options[device], gone, shared), device))
        room, pausing = options.pop(device)
        wait = max(wait, _cost(room, pausing, ())[1])
        chosen.append(room)
        gone |= {each.row: each for each in pausing}
    if not gone and not any(map(_is_pending, chosen)):
        return None
    loss = sum(each.gain for each in gone.values())
    return Clearing(loss, wait, tuple(room.device for room in chosen), tuple(gone))


def _is_pending(room: Room) -> bool:
    return room.pending or any(each.leaves for each in room.residents)


def _cost(
    room: Room, pausing: Collection[RoomMate], gone: Collection[int], shared: Mapping[int, int] | None = None
) -> tuple[float, float]:
    """Progress that is newly lost in each second, and seconds until all have left.

    The loss of a row is divided by the number of devices that ``shared`` has for it.
    """
    by = shared or {}
    loss = sum(each.gain / by.get(each.row, 1) for each in pausing if each.row not in gone)
    leaving = [each.wait for each in room.residents if each.leaves]
    return loss, max([*leaving, *(each.wait for each in pausing)], default=0.0)


def who_pauses(room: Room) -> tuple[RoomMate, ...] | None:
    """The residents of a device that have to pause so that the newcomer fits there; ``None`` if that does not do.

    Empty if it fits once those have left that leave anyway.
    """
    order = sorted(
        (each for each in room.residents if each.yields and not each.leaves),
        key=lambda each: (each.gain / each.size if each.size > 0.0 else math.inf, each.wait, each.row),
    )
    gone: list[RoomMate] = []
    for resident in (None, *order):
        if resident is not None:
            gone.append(resident)
        if _fits(room, {each.row for each in gone}):
            break
    else:
        return None
    for resident in sorted(gone, key=lambda each: -each.gain):
        rest = [each for each in gone if each is not resident]
        if _fits(room, {each.row for each in rest}):
            gone = rest
    return tuple(gone)


def _fits(room: Room, gone: Set[int]) -> bool:
    """Whether the newcomer fits once these, and those that leave anyway, have left."""
    left = [each for each in room.residents if each.leaves or each.row in gone]
    stay = [each for each in room.residents if not (each.leaves or each.row in gone)]
    tolerated = min([room.most, room.cap, *(each.most for each in stay)])
    if stay and (len(stay) + 1 > tolerated or not all(each.shares for each in stay)):
        return False
    if room.free is None:
        return True
    free = room.free + sum(each.freed for each in left)
    if not stay:
        free += room.kept + sum(each.state for each in left)
    if room.peaks is not None:
        free -= room.peaks({each.row for each in left})
    return free >= room.need


# -- urgent rooms --------------------------------------------------------------------------------
#
# Urgent rooms: devices as they look to an urgent trial that waits for one (:mod:`fluid.policies.urgent.rooms`).


class UrgentRooms:
    """Describes devices for urgent trials, one after another, as those before have left them.

    Args:
        core: the state of the session.

    Attributes:
        sent_back: when trials were queued again that had not begun yet, by row: each is at most once in an instant.
    """

    def __init__(self, core: SessionState) -> None:
        self.sent_back: dict[int, float] = {}
        self._core = core
        #: Trials for which a device is being cleared, by device.
        self._joining: dict[int, list[TrialRecord]] = {}
        #: Devices that were cleared for a waiting trial in vain, by its row: it did not fit after all.
        self._vain: dict[int, set[int]] = {}

    def begin(self, rows: Set[int]) -> None:
        """Begins a round; ``rows`` are the urgent trials that wait."""
        self._joining = {}
        if self.sent_back:
            self.sent_back = {row: at for row, at in self.sent_back.items() if at >= self._core.now}
        if self._vain:
            self._vain = {row: devices for row, devices in self._vain.items() if row in rows}

    def join(self, trial: TrialRecord, devices: Sequence[int]) -> None:
        """Counts a trial as resident of devices that are being cleared for it."""
        for device in devices:
            self._joining.setdefault(device, []).append(trial)

    def residents_of(self, devices: Sequence[int]) -> list[tuple[int, ...]]:
        """The rows on each of these devices."""
        return [tuple(self._core.occupancy.residents[device]) for device in devices]

    def are_being_cleared(self, devices: Sequence[int], rows: list[tuple[int, ...]]) -> bool:
        """Whether these devices, on which these rows were, are cleared as before, and for one trial alone.

        Looking at all devices again at every event takes long where there are many.
        """
        core = self._core
        for device in devices:
            if device not in core.occupancy.residents or core.occupancy.is_closed(device) or device in self._joining:
                return False
        there = (core.trials.by_row.get(row) for some in rows for row in some)
        return self.residents_of(devices) == rows and any(trial is not None and leaves(trial) for trial in there)

    def give_up(self, trial: TrialRecord, devices: Sequence[int]) -> None:
        """Notes that a trial still waits though devices were cleared for it, if nothing is pending there any more.

        They are not cleared for it again: others would be paused time after time.
        """
        core = self._core
        there = [device for device in devices if device in core.occupancy.residents]
        if not there or any(is_pending(self._core, device) for device in there):
            return
        holders = [core.trials.by_row.get(row) for device in there for row in core.occupancy.residents[device]]
        if any(other is None or leaves(other) or other.group_priority >= trial.group_priority for other in holders):
            return
        self._vain.setdefault(trial.row, set()).update(there)

    def was_in_vain(self, trial: TrialRecord, device: int) -> bool:
        """Whether a device was cleared for a trial in vain."""
        return device in self._vain.get(trial.row, ())

    def may_pause(self, trial: TrialRecord, newcomer: TrialRecord) -> bool:
        """Whether a trial on a device can be made to leave it for an urgent one."""
        if trial.group_priority >= newcomer.group_priority or trial.placement.preemption is not None:
            return False
        if trial.state is TrialState.STARTING:
            return not trial.placement.launched and trial.row not in self.sent_back
        # One that cannot be saved keeps one lane of several, and would go on as narrow as that.
        is_wide = len(trial.placement.lanes) > 1
        return trial.state is TrialState.RUNNING and (trial.spec.can_save or not is_wide)

    def on(self, device: int, trial: TrialRecord, width: float) -> Room | None:
        """A device as a trial of that width sees it; ``None`` if it may not use it."""
        core, occupancy = self._core, self._core.occupancy
        eligible = occupancy.eligible.of(trial.constraint)
        if occupancy.is_closed(device) or device == trial.limits.avoids or self.was_in_vain(trial, device):
            return None
        if (eligible is not None and device not in eligible) or self._is_kept_for_others(device, trial):
            return None
        lane = None if trial.residence.lane is None else core.lanes[trial.residence.lane]
        if trial.pinned and lane is not None and device not in lane.device_ids:
            return None
        need, most = core.estimates.need(trial), residents_at(width)
        by_model = core.estimates.by_model(trial)
        if by_model is not None:
            there = by_model[occupancy.device(device).model]
            need, most = there.need, min(most, max(1, there.packing))
        held_lane = lane.holders if trial.pinned and lane is not None else ()
        rows = occupancy.residents[device]
        residents = [self._resident(core.trials.by_row.get(row), row, device, trial, held_lane) for row in rows]
        newcomers = self._joining.get(device, [])
        residents += [
            RoomMate(each.row, 0.0, most=residents_at(each.width), yields=False, shares=_agree(each, trial))
            for each in newcomers
        ]
        free, kept = self._bytes(device, trial, newcomers)
        peaks = self._peaks(device, [*newcomers, trial])
        return Room(
            device,
            residents,
            most=most,
            need=0.0 if need is None else need.peak_bytes if peaks is None else need.persistent_bytes,
            free=free,
            kept=kept,
            pending=is_pending(self._core, device),
            cap=occupancy.caps.get(device, float("inf")),
            host=occupancy.device(device).host,
            peaks=peaks,
        )

    def _peaks(self, device: int, coming: Sequence[TrialRecord]) -> Callable[[Collection[int]], float] | None:
        """The ephemeral bytes of a device's lanes with these trials, where trials take turns there."""
        memory, estimates = self._core.memory, self._core.estimates
        if not self._core.occupancy.groups.take_turns(device):
            return None
        needs = [estimates.need_on(trial, device) for trial in coming]
        return lambda left: memory.ephemeral_bytes(device, without=left, joining=needs)

    def _is_kept_for_others(self, device: int, trial: TrialRecord) -> bool:
        """Whether a device is reserved for a trial that starts before this one."""
        return any(device in kept_before(trial) for kept_before in self._core.policies.kept_before)

    def _resident(
        self, other: TrialRecord | None, row: int, device: int, trial: TrialRecord, held_lane: Collection[str]
    ) -> RoomMate:
        core = self._core
        if other is None:  # Another device's trial, which moves there from this one.
            return RoomMate(row, 0.0, yields=False, shares=False)
        need, count = core.memory.need_of(row), len(core.occupancy.residents[device])
        known = core.memory.usable_bytes(device) is not None and all(
            core.memory.need_of(each) is not None for each in core.occupancy.residents[device]
        )
        estimates = core.estimates
        stretch = estimates.stretch(other) if other.placement.move is None else 1.0
        size = need.peak_bytes if known and need is not None else 1.0 / count
        size *= len(core.occupancy.held[row])
        in_turns = core.occupancy.groups.take_turns(device)
        return RoomMate(
            row,
            gain=max(0.0, other.group_priority) / stretch,
            size=size,
            freed=0.0 if need is None or in_turns else need.peak_bytes - need.persistent_bytes,
            state=0.0 if need is None or not other.spec.can_save else need.persistent_bytes,
            most=residents_at(other.width),
            wait=0.0 if other.state is TrialState.STARTING else iteration_left(core, other),
            yields=self.may_pause(other, trial),
            leaves=leaves(other),
            shares=_agree(other, trial) and other.trial_id not in held_lane,
        )

    def _bytes(self, device: int, trial: TrialRecord, newcomers: Sequence[TrialRecord]) -> tuple[float | None, float]:
        """Bytes that are free on a device, and those that are once states kept there were fetched away.

        Where trials take turns, their ephemeral bytes are free.
        """
        core = self._core
        usable = core.memory.usable_bytes(device)
        if usable is None:
            return None, 0.0
        free, kept = usable - core.memory.taken_bytes(device), 0.0
        in_turns = core.occupancy.groups.take_turns(device)
        if in_turns:
            free += core.memory.ephemeral_bytes(device)
        for each in newcomers:
            need = core.estimates.need_on(each, device)
            free -= 0.0 if need is None else need.persistent_bytes if in_turns else need.peak_bytes
        for lane_id, trial_id in core.lanes.kept_on(device):
            other, size = core.trials[trial_id], core.lanes.kept_bytes(lane_id, trial_id)
            if other is trial or other.residence.saving:
                free += size
            elif other.spec.can_save and not other.calls:
                kept += size
        return free, kept


def is_pending(core: SessionState, device: int) -> bool:
    """Whether states are about to leave a device, or lanes to be rid of a trial."""
    if any(lane.draining or lane.dismissed for lane in core.lanes.on(device)):
        return True
    return any(core.trials[trial_id].residence.saving for _, trial_id in core.lanes.kept_on(device))


def iteration_left(core: SessionState, trial: TrialRecord) -> float:
    """Predicted seconds until a trial on a device has ended the iteration that it runs, or begins with."""
    estimates, place = core.estimates, trial.placement
    begun = place.since if place.iterates else core.now
    step = estimates.pace(trial) * (estimates.stretch(trial) if place.move is None else 1.0)
    return max(0.0, begun + step - core.now)


def leaves(trial: TrialRecord) -> bool:
    """Whether a trial on a device was told to leave it."""
    return trial.placement.preemption is not None or trial.state is TrialState.STOPPING


def _agree(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether two trials may share a device."""
    return one.sharing_group == other.sharing_group
