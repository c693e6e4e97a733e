"""Which trial ran on which devices, and when: the :class:`Timeline` that every Gantt chart draws.

It turns segments into bars on devices and blocks across devices, and computes the utilisation. A lane of a chart is the
row of one device.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fluid.measure.runtime_model import FloatArray
from fluid.planners.rollout import Segment
from fluid.resources import Cluster, Device

if TYPE_CHECKING:
    from fluid.planners.planner import Plan
    from fluid.simulation.simulation_result import SimulationResult


#: A device added (``True``) or lost (``False``) at a time in seconds.
DeviceChange = tuple[float, int, bool]


@dataclass(frozen=True, slots=True)
class Bar:
    """A segment on one of its devices.

    Attributes:
        segment: position of the segment in :attr:`Timeline.segments`.
        row: the trial's row.
        start, end: seconds.
        slot: the bar's slot on the device, from 0; trials that run side by side have different slots.
        slots: number of slots of the device while this bar and its neighbours run.
    """

    segment: int
    row: int
    start: float
    end: float
    slot: int
    slots: int


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of the chart: a segment on adjacent lanes. A wide trial on scattered devices has several.

    Attributes:
        segment: position of the segment in :attr:`Timeline.segments`.
        lane: the first lane, counted from 0 in order of device index.
        lanes: number of lanes.
        slot: the slot within the lane, from 0.
        slots: number of slots of the lane at that time.
    """

    segment: int
    lane: int
    lanes: int
    slot: int
    slots: int


@dataclass(frozen=True)
class Timeline:
    """What ran, or is predicted to run, on every device.

    Attributes:
        devices: the devices by index, including those added later.
        segments: the segments, in any order.
        trial_ids: (rows,) names by row. A trial that was submitted several times has several rows, of one name or of
            names such as ``trial 3, stage 0`` and ``trial 3, stage 1``.
        makespan: seconds.
        lower_bound: seconds; 0 if unknown.
        changes: added and lost devices, in order of time.
        packs: rows of the trials that trained as one fused pack, by position of its segment in ``segments``.
    """

    devices: tuple[Device, ...]
    segments: tuple[Segment, ...]
    trial_ids: tuple[str, ...]
    makespan: float
    lower_bound: float = 0.0
    changes: tuple[DeviceChange, ...] = ()
    packs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of_plan(cls, plan: Plan) -> Timeline:
        """The predicted run of a plan."""
        return cls(
            plan.instance.cluster.devices,
            tuple(plan.schedule.segments),
            plan.instance.trial_ids,
            plan.makespan,
            plan.lower_bound,
        )

    @classmethod
    def of_result(cls, result: SimulationResult) -> Timeline:
        """A simulated run; it must have been simulated with ``record=True``."""
        return cls(
            _all_devices(result.cluster, result.segments, result.device_changes),
            result.segments,
            result.trial_ids,
            result.makespan,
            result.lower_bound,
            tuple(sorted(result.device_changes)),
        )

    @cached_property
    def trials(self) -> tuple[int, ...]:
        """(rows,) number of each row's trial: its position in :attr:`names`."""
        numbers = {name: number for number, name in enumerate(self.names)}
        return tuple(numbers[_trial_of(name)] for name in self.trial_ids)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The distinct names of the trials, in order of first appearance."""
        return tuple(dict.fromkeys(map(_trial_of, self.trial_ids)))

    @cached_property
    def named(self) -> frozenset[int]:
        """The trials, by their position in :attr:`names`, that have a bar of their own; others were always fused."""
        alone = (segment.row for position, segment in enumerate(self.segments) if position not in self.packs)
        return frozenset(self.trials[row] for row in alone)

    def pack_name(self, segment: int) -> str:
        """What a bar says of a fused pack, ``"32 fused"``; empty for the segment of a trial by itself."""
        rows = self.packs.get(segment)
        return "" if rows is None else f"{len(rows)} fused"

    @cached_property
    def bars(self) -> Mapping[int, tuple[Bar, ...]]:
        """Device index to its bars, by start. Bars that overlap have different slots."""
        segments = self.segments
        on_device: dict[int, list[int]] = {device.index: [] for device in self.devices}
        for position in sorted(range(len(segments)), key=lambda i: (segments[i].start, segments[i].row)):
            for device in segments[position].devices:
                on_device[device].append(position)
        return {device: tuple(_assign_slots(segments, positions)) for device, positions in on_device.items()}

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The rectangles of the chart, by segment, then lane: adjacent bars of one segment are merged."""
        bars: dict[int, list[tuple[int, Bar]]] = {}
        for lane, device in enumerate(self.devices):
            for bar in self.bars[device.index]:
                bars.setdefault(bar.segment, []).append((lane, bar))
        return tuple(block for segment in sorted(bars) for block in _merge_lanes(bars[segment]))

    @cached_property
    def absences(self) -> Mapping[int, tuple[tuple[float, float], ...]]:
        """Device index to the intervals, in seconds, in which the device was absent; only devices that were."""
        found: dict[int, list[tuple[float, float]]] = {}
        absent_since: dict[int, float] = {}
        known: set[int] = set()
        for time, device, added in self.changes:
            if added and device not in known:  # It was added late, so it was absent until now.
                absent_since[device] = 0.0
            known.add(device)
            if added:
                found.setdefault(device, []).append((absent_since.pop(device), min(time, self.makespan)))
            else:
                absent_since[device] = time
        for device, since in absent_since.items():
            found.setdefault(device, []).append((since, self.makespan))
        kept = {device: [(a, b) for a, b in intervals if a < b] for device, intervals in found.items()}
        return {device: tuple(intervals) for device, intervals in kept.items() if intervals}

    @cached_property
    def busy_intervals(self) -> Mapping[int, tuple[tuple[float, float], ...]]:
        """Device index to the intervals, in seconds, in which at least one trial held it."""
        return {device: _union((bar.start, bar.end) for bar in bars) for device, bars in self.bars.items()}

    @cached_property
    def shared_intervals(self) -> Mapping[int, tuple[tuple[float, float], ...]]:
        """Device index to the intervals, in seconds, in which it has several slots."""
        return {
            device: _union((bar.start, bar.end) for bar in bars if bar.slots > 1) for device, bars in self.bars.items()
        }

    @cached_property
    def busy_fractions(self) -> Mapping[int, float]:
        """Device index to its busy share of the time in which it was present."""
        fractions = {}
        for device, intervals in self.busy_intervals.items():
            present = self.makespan - _length(self.absences.get(device, ()))
            fractions[device] = _length(intervals) / present if present > 0.0 else 0.0
        return fractions

    @cached_property
    def device_seconds(self) -> float:
        """Seconds for which devices were held, added up over the devices."""
        return self.makespan * len(self.devices) - sum(map(_length, self.absences.values()))

    @cached_property
    def utilisation(self) -> float:
        """Busy device-seconds divided by those for which devices were held."""
        held = self.device_seconds
        return sum(map(_length, self.busy_intervals.values())) / held if held > 0.0 else 0.0

    def utilisation_steps(self) -> tuple[FloatArray, FloatArray]:
        """Utilisation over time as a step function.

        Returns:
            (m + 1,) times in seconds, ascending, and (m,) the busy share of the available devices from each time to
            the next.
        """
        ends = [(0.0, 0), (self.makespan, 0)]
        busy_times, busy = _steps([*ends, *_edges(self.busy_intervals)])
        absent_times, absent = _steps([*ends, *_edges(self.absences)])
        times = np.union1d(busy_times, absent_times)
        busy_at = busy[np.searchsorted(busy_times, times[:-1], side="right") - 1]
        present = len(self.devices) - absent[np.searchsorted(absent_times, times[:-1], side="right") - 1]
        return times, busy_at / np.maximum(present, 1.0)

    def utilisation_bins(self, count: int) -> FloatArray:
        """(count,) mean utilisation in each of ``count`` equal parts of the makespan."""
        if self.makespan <= 0.0:
            return np.zeros(count)
        times, shares = self.utilisation_steps()
        total = np.concatenate([[0.0], np.cumsum(shares * np.diff(times))])
        edges = np.linspace(0.0, self.makespan, count + 1)
        return np.asarray(np.diff(np.interp(edges, times, total)) * count / self.makespan)


def _trial_of(name: str) -> str:
    return name.split(", stage ")[0]


def _assign_slots(segments: Sequence[Segment], positions: Sequence[int]) -> Iterable[Bar]:
    """Gives each bar of one device the lowest free slot; ``positions`` are in order of start.

    Bars that overlap, directly or through others, have the same number of slots, so that no bar changes its thickness
    when a neighbour starts or ends.
    """
    run: list[tuple[int, int]] = []
    ends: list[tuple[float, int]] = []  # heap of (end, slot) of the bars that have not ended
    free: list[int] = []
    for position in positions:
        segment = segments[position]
        while ends and ends[0][0] <= segment.start:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if not ends:
            yield from _run_of_bars(segments, run)
            run, free = [], []
        slot = heapq.heappop(free) if free else len(ends)
        heapq.heappush(ends, (segment.end, slot))
        run.append((position, slot))
    yield from _run_of_bars(segments, run)


def _run_of_bars(segments: Sequence[Segment], run: Sequence[tuple[int, int]]) -> Iterable[Bar]:
    slots = 1 + max((slot for _, slot in run), default=0)
    for position, slot in run:
        segment = segments[position]
        yield Bar(position, segment.row, segment.start, segment.end, slot, slots)


def _merge_lanes(bars: Sequence[tuple[int, Bar]]) -> Iterable[Block]:
    """Merges the bars of one segment, given by lane, into blocks."""
    first, before = bars[0]
    lanes = 1
    for lane, bar in bars[1:]:
        if lane == first + lanes and (bar.slot, bar.slots) == (before.slot, before.slots):
            lanes += 1
            continue
        yield Block(before.segment, first, lanes, before.slot, before.slots)
        first, before, lanes = lane, bar, 1
    yield Block(before.segment, first, lanes, before.slot, before.slots)


def _all_devices(cluster: Cluster, segments: Iterable[Segment], changes: Iterable[DeviceChange]) -> tuple[Device, ...]:
    """The cluster's devices, and those of which only the index is known."""
    devices = {device.index: device for device in cluster.devices}
    indices = {index for segment in segments for index in segment.devices} | {index for _, index, _ in changes}
    for index in indices - devices.keys():
        devices[index] = Device(index, kind=cluster.devices[0].kind)
    return tuple(devices[index] for index in sorted(devices))


def _union(intervals: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The union of intervals, given in order of start."""
    joined: list[tuple[float, float]] = []
    for start, end in intervals:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return tuple(joined)


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _edges(intervals: Mapping[int, Iterable[tuple[float, float]]]) -> Iterable[tuple[float, int]]:
    for device in intervals.values():
        for start, end in device:
            yield start, 1
            yield end, -1


def _steps(edges: Sequence[tuple[float, int]]) -> tuple[FloatArray, FloatArray]:
    """The distinct times, and the sum of all changes up to and including each."""
    times = np.array([time for time, _ in edges], dtype=np.float64)
    distinct, place = np.unique(times, return_inverse=True)
    changes = np.bincount(place, weights=[change for _, change in edges], minlength=len(distinct))
    return distinct, np.cumsum(changes)
