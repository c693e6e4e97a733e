"""The finished iterations of a run, and the timeline segments that they make up."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from fluid.display.format import count
from fluid.planning.rollout import Segment
from fluid.report.run_files import RunFiles
from fluid.session.earlier_results import CLOCK_RESET_S

#: An overlap of two segments on a device by up to this share of the shorter one is taken for clock skew between their
#: lanes: the trials ran one after the other.
_CLOCK_SKEW = 0.05


@dataclass(frozen=True, slots=True)
class FinishedIteration:
    """A finished iteration.

    Attributes:
        number: its number within the trial, from 1.
        start, end: seconds since the run began.
        width: ``1/p``, 1 or a number of devices.
        devices: indices of its devices.
        metrics: the reported metrics, nested names joined by ``/``.
    """

    number: int
    start: float
    end: float
    width: float
    devices: tuple[int, ...]
    metrics: Mapping[str, Any]


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


class _Timed(Protocol):
    @property
    def at(self) -> float: ...


_T = TypeVar("_T", bound=_Timed)


@dataclass
class FinishedIterations:
    """The finished iterations of a run, on one time axis.

    A session that is resumed after its machine restarted has a clock that was reset.

    Attributes:
        by_trial: the iterations of each trial, in order.
        group_of: the group of each trial.
        origin: when the run began, on the clock of the session.
        offsets: seconds to add to times on that clock: at first, and after each reset of the clock.
    """

    by_trial: dict[str, list[FinishedIteration]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    origin: float = 0.0
    offsets: list[float] = field(default_factory=lambda: [0.0])

    def with_run_times(self, records: Iterable[_T]) -> Iterator[tuple[_T, float]]:
        """Yields each of the records, given in order of time, with its time in seconds since the run began."""
        latest, resets = -math.inf, 0
        for record in records:
            if record.at < latest - CLOCK_RESET_S:
                resets += 1
            latest = record.at
            yield record, record.at + self.offsets[min(resets, len(self.offsets) - 1)] - self.origin


def read_iterations(files: RunFiles) -> FinishedIterations:
    """Reads the finished iterations from ``results.jsonl``."""
    found = FinishedIterations()
    by_trial = found.by_trial
    refused, latest, offset = 0, -math.inf, 0.0
    for entry in files.results():
        try:
            trial, iteration = str(entry["trial"]), _read(entry)
        except (KeyError, TypeError, ValueError, OverflowError):
            refused += 1
            continue
        if iteration.end + offset < latest - CLOCK_RESET_S:
            # The session was resumed after its machine restarted. The length of the break is unknown; 0 is assumed.
            offset = latest - iteration.start
            found.offsets.append(offset)
        iteration = replace(iteration, start=iteration.start + offset, end=iteration.end + offset)
        latest = max(latest, iteration.end)
        by_trial.setdefault(trial, []).append(iteration)
        found.group_of.setdefault(trial, str(entry.get("group", "")))
    if refused:
        files.notes.append(f"{count(refused, 'line')} of results.jsonl could not be used.")
    found.origin = origin = min((first.start for of_trial in by_trial.values() for first in of_trial), default=0.0)
    for trial, of_trial in by_trial.items():
        shifted = (replace(each, start=each.start - origin, end=each.end - origin) for each in of_trial)
        by_trial[trial] = sorted(shifted, key=lambda iteration: iteration.end)
    return found


def _read(entry: Mapping[str, Any]) -> FinishedIteration:
    seconds, at, width = float(entry["seconds"]), float(entry["at"]), float(entry["width"])
    devices = tuple(int(device) for device in entry["devices"])
    if not (math.isfinite(seconds + at) and seconds >= 0.0 and 0.0 < width < math.inf and devices):
        raise ValueError("not a finished iteration")
    return FinishedIteration(int(entry["iteration"]), at - seconds, at, width, devices, _flat(entry.get("metrics")))


def _flat(metrics: object, prefix: str = "") -> dict[str, Any]:
    """Flattens nested metrics: their names become ``outer/inner``."""
    if not isinstance(metrics, Mapping):
        return {prefix.rstrip("/") or "value": metrics} if metrics is not None else {}
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        flat.update(_flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat


def segments_of(trials: Sequence[Sequence[FinishedIteration]]) -> list[Segment]:
    """The segments of all trials: consecutive iterations on the same devices at the same width are one segment.

    Args:
        trials: (rows,) iterations of each trial, in order.
    """
    starts: dict[int, list[float]] = {}
    for iteration in sorted((each for iterations in trials for each in iterations), key=lambda each: each.start):
        for device in iteration.devices:
            starts.setdefault(device, []).append(iteration.start)
    found: list[Segment] = []
    for row, iterations in enumerate(trials):
        before: FinishedIteration | None = None
        for iteration in iterations:
            if before is not None and _continues(before, iteration, starts):
                found[-1] = replace(found[-1], end=iteration.end)
            else:
                found.append(Segment(row, iteration.start, iteration.end, iteration.devices, iteration.width))
            before = iteration
    return _without_skew(found)


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


def _continues(before: FinishedIteration, iteration: FinishedIteration, starts: Mapping[int, Sequence[float]]) -> bool:
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
