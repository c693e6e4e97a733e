"""The timeline segments that the finished iterations of a run make up."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fluid.engine.commands import NoteDeviceLost, NoteResize
from fluid.engine.events import DeviceAdded
from fluid.planners.rollout import Segment
from fluid.reports.run.timeline import DeviceChange
from fluid.resources import Device
from fluid.results.iterations import FinishedIterations, StoredIteration
from fluid.results.journal import Recovered
from fluid.results.run_files import devices_in

#: An overlap of two segments on a device by up to this share of the shorter one is taken for clock skew between their
#: lanes: the trials ran one after the other.
_CLOCK_SKEW = 0.05


class Resized(NamedTuple):
    """A resize of a trial.

    Attributes:
        row: the trial's row in the timeline.
        at: when the resize ended, in seconds since the run began.
        seconds: how long the resize took.
        devices: indices of the trial's devices after it.
    """

    row: int
    at: float
    seconds: float
    devices: tuple[int, ...]


@dataclass(frozen=True)
class RecordedSegments:
    """The segments of a run.

    Attributes:
        segments: by row, of trials by themselves, and of fused packs: all trials of one have one segment in common,
            its row is the first one's.
        packs: rows of the trials of each fused pack, by position of its segment.
    """

    segments: list[Segment]
    packs: Mapping[int, tuple[int, ...]]


class _TimedStep(NamedTuple):
    """An iteration of a trial, or one that fused trials took together."""

    rows: tuple[int, ...]
    iteration: StoredIteration


def segments_of(trials: Sequence[Sequence[StoredIteration]]) -> RecordedSegments:
    """The segments of all trials: consecutive iterations on the same devices at the same width are one segment.

    Args:
        trials: (rows,) iterations of each trial, in order.
    """
    steps = _steps_of(trials)
    starts: dict[int, list[float]] = {}
    for _, iteration in steps:
        for device in iteration.devices:
            starts.setdefault(device, []).append(iteration.start)
    found: list[Segment] = []
    members: list[tuple[int, ...]] = []
    #: The segment and the iteration in which each row was last.
    latest: dict[int, tuple[int, StoredIteration]] = {}
    for rows, iteration in steps:
        position, before = latest.get(rows[0], (-1, iteration))
        if position >= 0 and members[position] == rows and _continues(before, iteration, starts):
            found[position] = replace(found[position], end=iteration.end)
        else:
            position = len(found)
            # The width of a fused trial says how many may be fused; the device is all theirs.
            width = 1.0 if iteration.rows > 1 else iteration.width
            found.append(Segment(rows[0], iteration.start, iteration.end, iteration.devices, width))
            members.append(rows)
        latest.update(dict.fromkeys(rows, (position, iteration)))
    order = sorted(range(len(found)), key=lambda position: (found[position].row, found[position].start))
    packs = {place: members[position] for place, position in enumerate(order) if len(members[position]) > 1}
    return RecordedSegments(_without_skew([found[position] for position in order]), packs)


def _steps_of(trials: Sequence[Sequence[StoredIteration]]) -> list[_TimedStep]:
    """The iterations in order of start; those of one fused step, which began and ended at once, are one."""
    alone: list[_TimedStep] = []
    fused: dict[tuple[object, ...], tuple[list[int], StoredIteration]] = {}
    for row, iterations in enumerate(trials):
        for each in iterations:
            if each.rows == 1:
                alone.append(_TimedStep((row,), each))
            else:
                step = each.start, each.end, each.devices, each.rows
                fused.setdefault(step, ([], each))[0].append(row)
    steps = [*alone, *(_TimedStep(tuple(rows), iteration) for rows, iteration in fused.values())]
    return sorted(steps, key=lambda step: (step.iteration.start, step.rows))


def with_pauses(segments: Sequence[Segment], resized: Iterable[Resized]) -> list[Segment]:
    """Adds the resizes to the segments: the segment that a resize began gets its pause."""
    found = list(segments)
    of_row: dict[int, list[int]] = {}
    for position in sorted(range(len(found)), key=lambda i: found[i].start):
        of_row.setdefault(found[position].row, []).append(position)
    for row, at, seconds, devices in resized:
        before = 0.0
        for position in of_row.get(row, ()):
            segment = found[position]
            # The lane's clock and the driver's may differ slightly.
            if segment.start >= at - _CLOCK_SKEW * max(seconds, segment.end - segment.start):
                if set(segment.devices) == set(devices) and not segment.pause:
                    start = max(before, min(at, segment.start) - seconds)
                    found[position] = replace(segment, start=start, pause=min(seconds, segment.start - start))
                break
            before = segment.end
    return found


def _continues(before: StoredIteration, iteration: StoredIteration, starts: Mapping[int, Sequence[float]]) -> bool:
    """Whether the trial probably held its devices from one iteration to the next."""
    if (before.devices, before.width) != (iteration.devices, iteration.width):
        return False
    longer = max(before.end - before.start, iteration.end - iteration.start)
    gap = iteration.start - before.end
    if gap <= _CLOCK_SKEW * longer:
        return True
    # In a longer gap another trial may have run on its devices.
    taken = any(
        bisect.bisect_left(starts[device], iteration.start) > bisect.bisect_left(starts[device], before.end)
        for device in iteration.devices
    )
    return gap <= longer and not taken


def _without_skew(segments: Sequence[Segment]) -> list[Segment]:
    """Ends a segment where the next one on its device starts, if they overlap by clock skew only."""
    on_device: dict[int, list[int]] = {}
    for position in sorted(range(len(segments)), key=lambda i: segments[i].start):
        for device in segments[position].devices:
            on_device.setdefault(device, []).append(position)
    ends = [segment.end for segment in segments]
    for positions in on_device.values():
        open_ones: list[int] = []
        for position in positions:
            start, length = segments[position].start, segments[position].end - segments[position].start
            for other in open_ones:
                shorter = min(length, segments[other].end - segments[other].start)
                if start < ends[other] <= start + _CLOCK_SKEW * shorter and start > segments[other].start:
                    ends[other] = start
            open_ones = [other for other in open_ones if ends[other] > start] + [position]
    return [replace(segment, end=end) for segment, end in zip(segments, ends, strict=True)]


# -- recorded devices ----------------------------------------------------------------------------
#
# The devices of a recorded run: which there were, and when they came and went.


#: Most seconds between two devices with which a session begins.
_TOGETHER_S = 5.0


def device_events(
    journal: Recovered, done: FinishedIterations, row_of: Mapping[str, int]
) -> tuple[list[DeviceChange], list[Resized]]:
    """Devices that were added or lost, and resizes of trials, in seconds since the run began."""
    changes: list[DeviceChange] = []
    resized: list[Resized] = []
    present: set[int] = set()
    #: Of a session that was resumed: devices that it had and that were not reported once more so far, and when it was.
    left, resumed_at = set[int](), 0.0
    #: Those that were added last, one shortly after the other: a session that begins has them all.
    together, added_at = set[int](), -math.inf
    for note, at in done.with_run_times(journal.places):
        time = max(at, 0.0)
        if isinstance(note, DeviceAdded):
            index = note.device.index
            if index in together or time > added_at + _TOGETHER_S:
                together = set()
            if index in present - left:
                left, resumed_at = present - together - {index}, time
            elif index not in present:
                changes.append((time, index, True))
            present.add(index)
            together.add(index)
            left.discard(index)
            added_at = time
            continue
        changes += [(resumed_at, index, False) for index in sorted(left)]
        present -= left
        left = set()
        if isinstance(note, NoteResize):
            if note.trial_id in row_of:
                resized.append(Resized(row_of[note.trial_id], at, note.seconds, note.device_ids))
        elif note.device_id in present:
            present.remove(note.device_id)
            changes.append((time, note.device_id, False))
    changes += [(resumed_at, index, False) for index in sorted(left)]
    return sorted(changes, key=lambda change: change[0]), resized


def devices_of(session: Mapping[str, Any], journal: Recovered, segments: Iterable[Segment]) -> tuple[Device, ...]:
    """The devices that the session began with, those that were added, and any others that trials used."""
    devices = devices_in(session)
    for note in journal.places:
        if isinstance(note, DeviceAdded):
            devices.setdefault(note.device.index, note.device)
        elif isinstance(note, NoteDeviceLost):
            devices.setdefault(note.device_id, Device(note.device_id))
    kind = next(iter(devices.values())).kind if devices else "gpu"
    for index in {device for segment in segments for device in segment.devices} - devices.keys():
        devices[index] = Device(index, kind=kind)
    return tuple(devices[index] for index in sorted(devices))
