"""Admission: which of the packed trials that wait start first where memory is scarce (docs/theory.md, section 17).

Which of them start is a knapsack on each device: the gain per second of those that start is to be as large as its free
bytes allow. It is filled greedily by gain per byte, and what does not fit is skipped. Devices are kept for trials that
are passed over for long. It costs nothing where memory bounds no device, or where all trials that wait are alike.

What it gains (``benchmarks/admission.py``): mean ends of 0.85 to 1.00 of the queue's order, makespans of 0.99 to
1.01. Exchanges that improve a choice change neither by more than 2 %, in either direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine import tuning
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.placing.allocations import RemainingWork
from fluid.engine.policy import Choice, Policy
from fluid.engine.records import TrialRecord, Trials
from fluid.measure.runtime_model import residents_at
from fluid.resources import MemoryNeed

#: So many queue lines are looked at, and about twice as many trials of them: more would take milliseconds each time.
LINES_ADMITTED = 256
#: A device is kept for a trial that was passed over for long for one device in so many, and for one at least.
DEVICES_PER_KEPT = 8

#: Memory is scarce where running and waiting trials want more than this share of what trials may fill (Andes).
SCARCE = 0.9
#: Trials are late starters if those that are at least as large take at least this share of the time of all that wait,
#: and if one alone takes so large a share of it. With more, the last trials end later than in queue order; with less,
#: others end as late as they do there (benchmarks/admission.py).
LATE_TOGETHER = 0.9
LATE_ALONE = 0.4


class Candidate(NamedTuple):
    """A trial that waits.

    Attributes:
        row: the trial.
        gain: weight x share of its remaining work that it does in a second.
        need: device memory, bytes.
        devices: the devices that it may get; ``None`` for any.
    """

    row: int
    gain: float
    need: float
    devices: frozenset[int] | None = None


class DeviceRoom(NamedTuple):
    """What a device has left.

    Attributes:
        device: its index.
        free: bytes.
        slots: number of further trials that it takes.
    """

    device: int
    free: float
    slots: int


class AlikeTrials(NamedTuple):
    """Trials that wait and need the same memory.

    Attributes:
        need: device memory of each, bytes.
        work: seconds of work of all, at width 1.
        longest: that of the longest.
    """

    need: float
    work: float
    longest: float


class LateStarters(NamedTuple):
    """Trials that would end last if others started first: those that need, or take, at least so much.

    Attributes:
        need: bytes.
        seconds: of work at width 1.
    """

    need: float
    seconds: float

    def has(self, need: float, seconds: float) -> bool:
        """Whether a trial that needs so many bytes and takes so many seconds is one of them."""
        return need >= self.need or seconds >= self.seconds


def is_scarce(wanted: float, usable: float) -> bool:
    """Whether so many bytes, wanted by the trials that run or wait, make memory scarce."""
    return wanted > SCARCE * usable


def late_starters(waiting: Sequence[AlikeTrials], usable: Sequence[float], slots: int) -> LateStarters:
    """Which trials have to start in queue order, the longest first, so that the last trial does not end later.

    Trials that need at least ``x`` bytes cannot all end before ``B(x)``: a device has room for ``usable / x`` of them
    at once, and for ``slots``, and their bytes times their seconds take a part of all memory. So long as those of
    at least ``x`` bytes take most of the time of all, others gain nothing for the last end by starting before them.

    Args:
        waiting: at least one.
        usable: bytes that trials may fill on each device.
        slots: most trials on one device.
    """
    memory, bounds = sum(usable), list[tuple[float, float]]()
    work = area = 0.0
    for alike in sorted(waiting, reverse=True):
        work += alike.work
        area += alike.work * alike.need
        need = alike.need
        at_once = sum(slots if slots * need <= room else math.floor(room / need) for room in usable)
        bounds.append((need, max(work / max(1, at_once), area / memory)))
    longest = max(alike.longest for alike in waiting)
    bound = max(longest, *(each for _, each in bounds))
    least = next((need for need, each in bounds if each >= LATE_TOGETHER * bound), math.inf)
    return LateStarters(least, LATE_ALONE * bound)


def admit(
    candidates: Sequence[Candidate], rooms: Sequence[DeviceRoom], first: Sequence[Candidate] = ()
) -> dict[int, int]:
    """Chooses the trials that start: greedily by gain per byte, or by gain alone, whichever gains more.

    By gain alone, no trial that is worth more than all others together is left out.

    Args:
        candidates: trials that wait.
        rooms: what devices have left.
        first: trials that start before these, in this order, each if it fits.

    Returns:
        Row -> device, in the order in which they should start. No trial is left out that would still fit.
    """
    choices = []
    for price in (1.0, 0.0):
        choice = _Admission({room.device: room for room in rooms})
        by_worth = sorted(candidates, key=lambda trial: (-trial.gain / max(trial.need, 1.0) ** price, trial.need))
        for trial in chain(first, by_worth):
            choice.add(trial)
        choices.append(choice)
    return max(choices, key=lambda choice: choice.gain).device_of


@dataclass(slots=True)
class _Admission:
    """Trials chosen so far, and what they leave of the devices."""

    rooms: dict[int, DeviceRoom]
    device_of: dict[int, int] = field(default_factory=dict)
    gain: float = 0.0

    def add(self, trial: Candidate) -> None:
        """Adds a trial, if it fits, on the device with most slots, of these the one with least room."""
        fitting = [
            room
            for room in self.rooms.values()
            if trial.need <= room.free and room.slots > 0 and (trial.devices is None or room.device in trial.devices)
        ]
        if fitting and trial.row not in self.device_of:
            room = min(fitting, key=lambda room: (-room.slots, room.free))
            self.rooms[room.device] = DeviceRoom(room.device, room.free - trial.need, room.slots - 1)
            self.device_of[trial.row] = room.device
            self.gain += trial.gain


class Admitting(Policy):
    """Chooses among queued trials by gain per byte, and keeps devices for those that would wait for ever.

    Args:
        trials: the trials of the session.
        queue: the trials that wait.
        occupancy: which trial holds which device.
        estimates: what trials need.
        work: seconds of work that each trial has left.

    Attributes:
        is_scarce: whether memory is scarce in the present round of the queue.
        targets: row -> device that was chosen for it in the present round.
        kept: row of a trial that was passed over for long -> device on which only it starts next.
    """

    def __init__(
        self, trials: Trials, queue: StartQueue, occupancy: Occupancy, estimates: Estimates, work: RemainingWork
    ) -> None:
        self.is_scarce = False
        self.targets: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self._trials = trials
        self._queue = queue
        self._occupancy = occupancy
        self._estimates = estimates
        self._work = work
        #: row -> when a device is to be kept for it, seconds, of trials that were passed over.
        self._patient_until: dict[int, float] = {}

    def begin_round(self) -> None:
        """Begins a round of the queue: finds out whether memory is scarce."""
        if not self._queue:
            return
        if self.targets:
            self.targets = {}
        self.is_scarce = self._occupancy.memory.is_bounded and self._find_scarce()
        if self._patient_until:
            queue = self._queue
            self._patient_until = {row: at for row, at in self._patient_until.items() if row in queue}
            self.kept = {row: device for row, device in self.kept.items() if row in queue and self._is_open(device)}

    def end_round(self, refused: Sequence[TrialRecord]) -> None:
        """Keeps devices for trials that were passed over for long.

        Args:
            refused: trials that did not fit, one of those that are alike to placement.
        """
        for trial in refused if self.is_scarce else ():
            if trial.row in self._queue and trial.width < 1.0 and not trial.pinned:
                self._passed_over(trial)

    def give_up(self, is_emptying: Callable[[int], bool]) -> bool:
        """Gives up on devices kept for trials that do not start there though nothing else runs, or leaves.

        Args:
            is_emptying: whether states are about to leave a device.

        Returns:
            Whether there were any.
        """
        residents = self._occupancy.residents
        vain = [
            row
            for row, device in self.kept.items()
            if row not in self._queue or device not in residents or not (residents[device] or is_emptying(device))
        ]
        for row in vain:
            del self.kept[row]
            self._patient_until.pop(row, None)
        return bool(vain)

    def forbidden_to(self, trial: TrialRecord) -> frozenset[int]:
        """The devices kept for others, of no lower priority than this trial's.

        Trials of a fixed width have reservations of their own; what waits for one of both must not wait for the other.
        """
        if trial.fixed_width is not None or trial.pinned:
            return frozenset()
        by_row = self._trials.by_row
        return frozenset(
            device
            for row, device in self.kept.items()
            if row != trial.row and (row not in by_row or by_row[row].priority >= trial.priority)
        )

    # -- the choice ----------------------------------------------------------------------------------------

    @property
    def choice(self) -> Choice | None:
        """:meth:`choose` where memory is scarce."""
        return self.choose if self.is_scarce else None

    def target_of(self, trial: TrialRecord) -> int | None:
        """The device that was chosen for a trial in this round."""
        return self.targets.get(trial.row)

    @property
    def room_for(self) -> Mapping[int, int]:
        """Where states make room for trials that were passed over for long: :attr:`kept`."""
        return self.kept

    @property
    def keeps_devices(self) -> bool:
        """Whether devices are kept for trials that were passed over for long."""
        return bool(self.kept)

    @property
    def kept_devices(self) -> frozenset[int]:
        """The devices that are kept for them."""
        return frozenset(self.kept.values())

    def choose(self, width: float, lines: Sequence[Mapping[int, int]]) -> list[int]:
        """The rows to be offered first, in this order, of queue lines of one class.

        Args:
            width: theirs.
            lines: row -> ticket, by ascending ticket, of those that are alike to placement.
        """
        if width >= 1.0 or len(lines) < 2:
            return []
        rooms = self._rooms(residents_at(width))
        if not rooms:
            return []
        late = self._late_starters(lines, residents_at(width))
        lines = lines[:LINES_ADMITTED]
        each = max(1, LINES_ADMITTED // len(lines))
        by_ticket: dict[int, Candidate] = {}
        others: list[Candidate] = []
        for rows in lines:
            # The longest of a line come first, those of most gain last.
            for row in dict.fromkeys(chain(islice(rows, each), islice(reversed(rows), each))):
                candidate, seconds = self._candidate(row)
                if candidate is None:
                    break  # so are those alike
                if late is None or late.has(candidate.need, seconds):
                    by_ticket[rows[row]] = candidate
                else:
                    others.append(candidate)
        if not others:
            return []  # The order of the queue is just right.
        self.targets.update(chosen := admit(others, rooms, [by_ticket[ticket] for ticket in sorted(by_ticket)]))
        return list(chosen)

    def _candidate(self, row: int) -> tuple[Candidate | None, float]:
        trial, seconds = self._trials.by_row[row], max(self._work.by_row[row], tuning.LEAST_HEIGHT_S)
        need = self._estimates.need(trial)
        if need is None or trial.pinned or trial.residence.device is not None:
            return None, seconds
        devices = self._occupancy.eligible.of(trial.constraint)
        forbidden = self.forbidden_to(trial) if self.kept else frozenset[int]()
        if trial.limits.avoids is not None:
            forbidden |= {trial.limits.avoids}
        if forbidden:
            devices = frozenset(self._occupancy.residents if devices is None else devices) - forbidden
        allowed = None if devices is None else frozenset(devices)
        return Candidate(row, 1.0 / seconds, self._bytes(trial, need), allowed), seconds

    def _late_starters(self, lines: Sequence[Mapping[int, int]], slots: int) -> LateStarters | None:
        waiting = []
        for rows in lines:
            first, last = next(iter(rows)), next(reversed(rows))
            trial = self._trials.by_row[first]
            need = self._estimates.need(trial)
            if need is not None:
                # They are queued by descending work.
                ends = self._work.by_row[first], self._work.by_row[last]
                waiting.append(AlikeTrials(self._bytes(trial, need), sum(ends) / 2.0 * len(rows), max(ends)))
        return late_starters(waiting, self._usable(), slots) if waiting else None

    def _rooms(self, slots: int) -> list[DeviceRoom]:
        occupancy, rooms = self._occupancy, []
        for index, rows in occupancy.residents.items():
            usable = occupancy.memory.usable_bytes(index)
            open_ = min(slots, occupancy.limit(index)) - len(rows) if rows else slots
            if usable is None:
                return []  # Its memory is not scarce.
            if open_ > 0 and not occupancy.is_closed(index):
                free = usable - occupancy.memory.filled_bytes(index)
                if free > 0.0:
                    rooms.append(DeviceRoom(index, free, open_))
        return rooms

    def _bytes(self, trial: TrialRecord, need: MemoryNeed) -> float:
        return self._occupancy.groups.typical(trial.sharing_group, need).peak_bytes

    # -- scarcity ------------------------------------------------------------------------------------------

    def _usable(self) -> list[float]:
        memory = self._occupancy.memory
        rooms = (memory.usable_bytes(index) for index in self._occupancy.residents)
        return [room for room in rooms if room is not None]

    def _find_scarce(self) -> bool:
        """Whether running and waiting trials want most of the memory; needs that are unknown count for nothing."""
        usable, wanted, kinds = sum(self._usable()), 0.0, 0
        for row, count in self._queue.lines():
            trial = self._trials.by_row[row]
            need = self._estimates.need(trial)
            if need is not None:
                wanted += self._bytes(trial, need) * count
                kinds += 1
                if kinds > 1 and is_scarce(wanted, usable):
                    return True
        if not kinds or (kinds == 1 and not self._patient_until):
            return False  # There is nothing to choose.
        memory = self._occupancy.memory
        return is_scarce(wanted + sum(map(memory.running_bytes, self._occupancy.residents)), usable)

    # -- trials that are passed over -----------------------------------------------------------------------

    def _passed_over(self, trial: TrialRecord) -> None:
        row, now = trial.row, self._occupancy.now
        until = self._patient_until.get(row)
        if until is None:
            # All the work that is here now would be done by then on the devices, one trial on each.
            unpacked = self._work.total / max(1, len(self._occupancy))
            self._patient_until[row] = now + unpacked + self._work.by_row.get(row, 0.0)
        elif now >= until and row not in self.kept:
            most = max(1, len(self._occupancy) // DEVICES_PER_KEPT)
            device = self._to_keep(trial) if len(self.kept) < most else None
            if device is not None:
                self.kept[row] = device

    def _to_keep(self, trial: TrialRecord) -> int | None:
        """The device that has room for a trial first if no other one starts there."""
        need, eligible = self._estimates.need(trial), self._occupancy.eligible.of(trial.constraint)
        if need is None:
            return None
        found = []
        for index in self._occupancy.residents if eligible is None else eligible:
            taken = index in self.kept.values() or not self._occupancy.residents[index]
            if self._is_open(index) and index != trial.limits.avoids and not taken:
                wait = self._seconds_until(index, need)
                if wait is not None:
                    found.append((wait, index))
        return min(found)[1] if found else None

    def _seconds_until(self, index: int, need: MemoryNeed) -> float | None:
        """Predicted seconds until a trial of that need fits on a device; ``None`` if it will not."""
        memory = self._occupancy.memory
        usable, wait, gone = memory.usable_bytes(index), 0.0, list[int]()
        filled = memory.filled_bytes(index)
        lacking = need.peak_bytes if usable is None else filled + memory.added_bytes(index, need) - usable
        there = [trial for row in self._occupancy.residents[index] if (trial := self._trials.by_row.get(row))]
        for left, row in sorted((self._estimates.seconds_left(trial), trial.row) for trial in there):
            if lacking <= 0.0:
                break
            wait = left
            gone.append(row)
            lacking -= memory.left_bytes(index, need, gone)
        return wait if lacking <= 0.0 else None

    def _is_open(self, device: int) -> bool:
        return device in self._occupancy.residents and not self._occupancy.is_closed(device)
