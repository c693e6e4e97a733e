"""Admission: which of the packed trials that wait start where memory is scarce (docs/theory.md, section 17).

Which of them start is a knapsack on each device: the gain per second of those that start is to be as large as its free
bytes allow. A greedy choice by gain per byte skips what does not fit, and is then improved by exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain, combinations
from typing import NamedTuple

#: Memory is scarce where running and waiting trials want more than this share of what trials may fill (Andes).
SCARCE = 0.9
#: Trials are late starters if those that are at least as large take at least this share of the time of all that wait,
#: and if one alone takes so large a share of it. With more, the last trials end later than in queue order; with less,
#: others end as late as they do there (benchmarks/admission.py).
LATE_TOGETHER = 0.9
LATE_ALONE = 0.4
#: Greedy choices by gain / need ** price: bytes have their full price where they alone are short, and less where slots
#: are, too; at 0, no trial that is worth more than all others together is left out.
_PRICES = (1.0, 0.5, 0.0)
#: Most exchanges that improve a choice: each takes microseconds for each trial chosen.
_MOST_EXCHANGES = 32
#: Pairs are made of so many trials, those of most gain, and for at most so many devices: this takes time for each, and
#: among more devices single exchanges find nearly as much.
_MOST_PAIRED = 64
_FEW_DEVICES = 8


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
    """Chooses the trials that start.

    Greedy by gain per byte, skipping what does not fit, and by gain with bytes at lower prices. Each is improved by
    exchanging up to two chosen trials for one that is worth more; the best one also by exchanging them for two others.

    Args:
        candidates: trials that wait.
        rooms: what devices have left.
        first: trials that start before these, in this order, each if it fits.

    Returns:
        Row -> device, in the order in which they should start.
    """
    open_ = [room for room in rooms if room.slots > 0 and room.free >= 0.0]
    start = _Admission(open_)
    for trial in first:
        start.add(trial)
    fixed = set(start.device_of)
    choices = []
    for price in _PRICES:
        choice = start.copy()
        for trial in sorted(candidates, key=lambda trial: (-_worth(trial, price), trial.need)):
            choice.add(trial)
        choices.append(choice)
    by_gain = sorted(candidates, key=lambda trial: (-trial.gain, trial.need))
    for choice in choices:
        choice.improve(by_gain, fixed)
    best = max(choices, key=lambda choice: choice.gain)
    best.improve_by_pairs(by_gain, fixed)
    return best.device_of


def _worth(trial: Candidate, price: float) -> float:
    return trial.gain / trial.need**price if trial.need > 0.0 else math.inf


class _Admission:
    """Trials chosen so far, and what they leave of the devices."""

    def __init__(self, rooms: Sequence[DeviceRoom]) -> None:
        self.free = {room.device: room.free for room in rooms}
        self.slots = {room.device: room.slots for room in rooms}
        self.chosen: dict[int, Candidate] = {}
        self.device_of: dict[int, int] = {}
        self.gain = 0.0

    def copy(self) -> _Admission:
        other = _Admission(())
        other.free, other.slots, other.gain = dict(self.free), dict(self.slots), self.gain
        other.chosen, other.device_of = dict(self.chosen), dict(self.device_of)
        return other

    def add(self, trial: Candidate) -> bool:
        """Adds a trial on the device with most slots, of these the one with least room; returns whether it fits."""
        if trial.row in self.device_of:
            return False
        best, least = None, (0, math.inf)
        for device, free in self.free.items():
            key = -self.slots[device], free
            if trial.need <= free and self.slots[device] > 0 and key < least and _may(trial, device):
                best, least = device, key
        if best is not None:
            self._put(trial, best)
        return best is not None

    def improve(self, by_gain: Sequence[Candidate], fixed: set[int]) -> None:
        """Exchanges chosen trials, but for the fixed ones, for others that are worth more."""
        for _ in range(_MOST_EXCHANGES):
            others = (trial for trial in by_gain if trial.row not in self.device_of)
            if not any(self._exchange(trial, fixed) for trial in others):
                return
            for trial in by_gain:
                self.add(trial)

    def improve_by_pairs(self, by_gain: Sequence[Candidate], fixed: set[int]) -> None:
        """Exchanges up to two chosen trials of a device, but for the fixed ones, for two others that are worth more."""
        for _ in range(_MOST_EXCHANGES if len(self.free) <= _FEW_DEVICES else 0):
            others = [trial for trial in by_gain if trial.row not in self.device_of][:_MOST_PAIRED]
            if not any(self._exchange_for_pair(device, others, fixed) for device in self.free):
                return
            self.improve(by_gain, fixed)

    def _exchange_for_pair(self, device: int, others: Sequence[Candidate], fixed: set[int]) -> bool:
        there = [self.chosen[row] for row, at in self.device_of.items() if at == device and row not in fixed]
        pairs = _Pairs([trial for trial in others if _may(trial, device)])
        most, best, leaving = 0.0, tuple[Candidate, ...](), tuple[Candidate, ...]()
        for out in chain(combinations(there, 1), combinations(there, 2)):
            if self.slots[device] + len(out) < 2:
                continue
            lost = sum(trial.gain for trial in out)
            pair = pairs.best(self.free[device] + sum(trial.need for trial in out))
            gained = sum(trial.gain for trial in pair)
            if gained > lost * (1.0 + 1e-9) and gained - lost > most:
                most, best, leaving = gained - lost, pair, out
        for trial in leaving:
            self._take_out(trial)
        for trial in best:
            self._put(trial, device)
        return bool(best)

    def _exchange(self, trial: Candidate, fixed: set[int]) -> bool:
        best: tuple[Candidate, ...] = ()
        least, at = trial.gain * (1.0 - 1e-9), -1
        for device, free in self.free.items():
            if not _may(trial, device):
                continue
            there = [self.chosen[row] for row, at_ in self.device_of.items() if at_ == device and row not in fixed]
            lacking = trial.need - free
            for position, one in enumerate(there):
                if one.gain >= least:
                    continue
                if one.need >= lacking:
                    best, least, at = (one,), one.gain, device
                    continue
                for two in there[position + 1 :]:
                    if one.need + two.need >= lacking and one.gain + two.gain < least:
                        best, least, at = (one, two), one.gain + two.gain, device
        for other in best:
            self._take_out(other)
        if best:
            self._put(trial, at)
        return bool(best)

    def _put(self, trial: Candidate, device: int) -> None:
        self.chosen[trial.row], self.device_of[trial.row] = trial, device
        self.free[device] -= trial.need
        self.slots[device] -= 1
        self.gain += trial.gain

    def _take_out(self, trial: Candidate) -> None:
        device = self.device_of.pop(trial.row)
        del self.chosen[trial.row]
        self.free[device] += trial.need
        self.slots[device] += 1
        self.gain -= trial.gain


def _more(one: Candidate, other: Candidate) -> Candidate:
    """The trial of more gain; of equal ones, the first."""
    return other if other.gain > one.gain else one


class _Pairs:
    """Pairs of trials, by the bytes that they need together."""

    def __init__(self, trials: Sequence[Candidate]) -> None:
        self._by_need = sorted(trials, key=lambda trial: (trial.need, -trial.gain))
        #: The trial of most gain among the first 1, 2, ... of these.
        self._most: list[Candidate] = list(accumulate(self._by_need, _more))

    def best(self, room: float) -> tuple[Candidate, ...]:
        """The two trials of most gain that need at most so many bytes; empty if no two do."""
        found, gain, fitting = tuple[Candidate, ...](), -math.inf, 0
        for position in range(len(self._by_need) - 1, 0, -1):
            one = self._by_need[position]
            while fitting < position and self._by_need[fitting].need + one.need <= room:
                fitting += 1
            other = self._most[min(fitting, position) - 1] if fitting else None
            if other is not None and other.gain + one.gain > gain:
                found, gain = (other, one), other.gain + one.gain
        return found


def _may(trial: Candidate, device: int) -> bool:
    return trial.devices is None or device in trial.devices
