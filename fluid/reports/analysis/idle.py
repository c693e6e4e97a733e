"""Idle device time of a run, and why: from the run's history and the busy intervals of its devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fluid.reports.run.timeline import Timeline
from fluid.reports.story.history import Measured, RunHistory, Stay, Wait

#: The figure that says that a device was idle without need.
WAITED = "idle while a trial waited"

_Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class IdleTime:
    """Device-seconds in which no iteration ran, from the first submission to the end of the last iteration.

    Attributes:
        start: until a device's first iteration, while a trial held it: its lane started, and the trial was set up.
        hand_over: after that, while a trial held the device: from its placement to its first iteration there.
        unreported: a trial was set up there, between two of its iterations, as while it was saved, or in one that was
            never reported: that failed or was cut off, or that it repeated after a failure.
        waited: no trial held the device, and a queued trial could have run there.
        no_trial: no trial held the device, and none was queued that could have run there.
        ramp_up: not idle: the device ran fewer trials than it could, as packing was still being measured, while a
            trial waited that could have been packed there.
        total: device-seconds of the sweep: devices times makespan, less the time in which devices were absent.
    """

    start: float
    hand_over: float
    unreported: float
    waited: float
    no_trial: float
    ramp_up: float
    total: float

    @property
    def figures(self) -> dict[str, float]:
        """The seconds by their names in reports."""
        return {
            "start": self.start,
            "hand-over": self.hand_over,
            "saves, unreported work": self.unreported,
            WAITED: self.waited,
            "no trial to run": self.no_trial,
            "packing ramp-up": self.ramp_up,
        }

    @property
    def waited_share(self) -> float:
        """``waited`` as a share of the device-seconds of the sweep."""
        return self.waited / self.total if self.total > 0.0 else 0.0


def idle_time(history: RunHistory, timeline: Timeline) -> IdleTime | None:
    """Splits the idle time of a run; ``None`` if its journal does not tell where trials were placed.

    Args:
        history: the run's journal.
        timeline: which trial ran on which devices.
    """
    if not history.tells or not timeline.segments:
        return None
    window = (min(history.start, 0.0), timeline.makespan)
    wanting = _union(part for waits in history.waits.values() for wait in waits for part in _wants_a_device(wait))
    held: dict[int, list[Stay]] = {}
    for stays in history.stays.values():
        for stay in stays:
            for index in stay.devices:
                held.setdefault(index, []).append(stay)
    start = hand_over = unreported = waited = no_trial = ramp_up = 0.0
    for device in timeline.devices:
        stays = held.get(device.index, [])
        busy = list(timeline.busy_intervals.get(device.index, ()))
        absent = list(timeline.absences.get(device.index, ()))
        idle = _without(_without([window], busy), absent)
        first = busy[0][0] if busy else math.inf
        at_trials = _both(idle, _union((stay.start, stay.end) for stay in stays))
        at_work = _both(idle, _union((stay.set_up, stay.end) for stay in stays))
        before_work = _without(at_trials, at_work)
        start += _length(part for part in before_work if part[0] < first)
        hand_over += _length(part for part in before_work if part[0] >= first)
        unreported += _length(at_work)
        free = _without(idle, at_trials)
        open_until = min(history.drained.get(device.index, math.inf), history.drained.get(None, math.inf))
        could_run = _both(_both(free, [(-math.inf, open_until)]), wanting)
        waited += _length(could_run)
        no_trial += _length(free) - _length(could_run)
        ramp_up += _length(_both(_both(_with_room(history, stays), busy), wanting))
    return IdleTime(start, hand_over, unreported, waited, no_trial, ramp_up, timeline.device_seconds)


def _wants_a_device(wait: Wait) -> _Intervals:
    """When a trial waited for one device or a part of one, and memory was no reason."""
    if not wait.reasons:
        return [(wait.start, wait.end)]
    ends = [*(reason.at for reason in wait.reasons[1:]), wait.end]
    return [
        (max(wait.start, reason.at), end)
        for reason, end in zip(wait.reasons, ends, strict=True)
        if reason.reason == "DEVICES" and float(reason.note.get("width", 1.0)) <= 1.0
    ]


def _with_room(history: RunHistory, stays: Sequence[Stay]) -> _Intervals:
    """When a device held fewer trials than it could later: until packing was measured to pay for so many."""
    found: _Intervals = []
    edges = [(stay.start, 1, stay) for stay in stays] + [(stay.end, 0, stay) for stay in stays]
    there: list[Stay] = []
    since = -math.inf
    for at, comes, stay in sorted(edges, key=lambda edge: edge[:2]):
        limits = [_ramp(history, each) for each in there]
        if limits and len(there) < min(most for _, most in limits):
            found.append((since, min(at, *(until for until, _ in limits))))
        since = at
        if comes:
            there.append(stay)
        elif stay in there:
            there.remove(stay)
    return _union(found)


def _ramp(history: RunHistory, stay: Stay) -> tuple[float, int]:
    """When c of a trial's key on its device's model first was as high as at the end, and what it was then."""
    model = history.models.get(stay.devices[0]) if stay.devices else None
    of_key = history.measured.get(history.key_of.get(stay.trial, ""), [])
    # Journals of earlier versions do not say on which model a key was measured.
    measured = [each for each in of_key if each.model in (model, None)]
    if not measured:
        return -math.inf, 1
    most = _most(measured[-1])
    return next(each.at for each in measured if _most(each) >= most), most


def _most(measured: Measured) -> int:
    """How many trials of a key may be on a device: in processes of their own, or fused."""
    return max(measured.packing, measured.rows)


def _union(intervals: Iterable[tuple[float, float]]) -> _Intervals:
    joined: _Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _both(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> _Intervals:
    """The intersection of two unions of intervals, each in order."""
    found: _Intervals = []
    left = right = 0
    while left < len(one) and right < len(other):
        start, end = max(one[left][0], other[right][0]), min(one[left][1], other[right][1])
        if start < end:
            found.append((start, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found


def _without(intervals: Sequence[tuple[float, float]], gone: Sequence[tuple[float, float]]) -> _Intervals:
    """What of a union of intervals is not in another one, each in order."""
    edges = [-math.inf, *(edge for pair in gone for edge in pair), math.inf]
    return _both(intervals, list(zip(edges[::2], edges[1::2], strict=True)))


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
