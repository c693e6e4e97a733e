"""Iterations of a run, and the stretches of time they make up on the devices."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from fluid.display.format import count
from fluid.planning.rollout import Segment
from fluid.report.run_files import RunFiles

#: Two trials that overlap on a device by up to this share of the shorter stretch did not run at the same time: one
#: came after the other, and the clocks of their lanes differ a little.
_JITTER = 0.05
#: Results are written as they come. Where the time goes back by more than this many seconds, the clock began anew.
_RESTART = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """A finished iteration.

    Attributes:
        iteration: its number, from 1.
        start, end: seconds since the run began.
        width: width at which it ran: ``1/p``, 1 or a number of devices.
        devices: indices of its devices.
        metrics: what the trial reported, nested names joined by ``/``.
    """

    iteration: int
    start: float
    end: float
    width: float
    devices: tuple[int, ...]
    metrics: Mapping[str, Any]


class Resized(NamedTuple):
    """A trial that went on at another width.

    Attributes:
        row: the trial.
        at: when it did, seconds since the run began.
        seconds: for how long it made no progress until then.
        devices: indices of its devices from then on.
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
class Iterations:
    """The iterations of a run, from its first on.

    Attributes:
        steps: by trial, in order.
        groups: the groups of the trials.
        zero: when the run began, on the clock of the session.
        later: what to add to times on that clock, and after each time that it began anew.
    """

    steps: dict[str, list[Step]] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    zero: float = 0.0
    later: list[float] = field(default_factory=lambda: [0.0])

    def on_time(self, things: Iterable[_T]) -> Iterator[tuple[_T, float]]:
        """Things in the order in which they happened, each with its time in seconds since the run began."""
        latest, began_anew = -math.inf, 0
        for thing in things:
            if thing.at < latest - _RESTART:
                began_anew += 1
            latest = thing.at
            yield thing, thing.at + self.later[min(began_anew, len(self.later) - 1)] - self.zero


def read_iterations(files: RunFiles) -> Iterations:
    """Reads what was reported of finished iterations."""
    found = Iterations()
    steps, groups = found.steps, found.groups
    refused, latest, later = 0, -math.inf, 0.0
    for entry in files.results():
        try:
            trial, step = str(entry["trial"]), _step(entry)
        except (KeyError, TypeError, ValueError, OverflowError):
            refused += 1
            continue
        if step.end + later < latest - _RESTART:
            # The session went on after its machine was started again. How long that took nobody knows.
            later = latest - step.start
            found.later.append(later)
        step = replace(step, start=step.start + later, end=step.end + later)
        latest = max(latest, step.end)
        steps.setdefault(trial, []).append(step)
        groups.setdefault(trial, str(entry.get("group", "")))
    if refused:
        files.notes.append(f"{count(refused, 'line')} of results.jsonl could not be used.")
    found.zero = zero = min((step.start for of_trial in steps.values() for step in of_trial), default=0.0)
    for trial, of_trial in steps.items():
        moved = (replace(step, start=step.start - zero, end=step.end - zero) for step in of_trial)
        steps[trial] = sorted(moved, key=lambda step: step.end)
    return found


def _step(entry: Mapping[str, Any]) -> Step:
    seconds, at, width = float(entry["seconds"]), float(entry["at"]), float(entry["width"])
    devices = tuple(int(device) for device in entry["devices"])
    if not (math.isfinite(seconds + at) and seconds >= 0.0 and 0.0 < width < math.inf and devices):
        raise ValueError("these are no figures of an iteration")
    return Step(int(entry["iteration"]), at - seconds, at, width, devices, _flat(entry.get("metrics")))


def _flat(metrics: object, prefix: str = "") -> dict[str, Any]:
    """Metrics by name; nested ones by ``outer/inner``."""
    if not isinstance(metrics, Mapping):
        return {prefix.rstrip("/") or "value": metrics} if metrics is not None else {}
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        flat.update(_flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat


def segments_of(trials: Sequence[Sequence[Step]]) -> list[Segment]:
    """Stretches in which a trial held the same devices at the same width; iterations that follow soon are in one.

    Args:
        trials: (rows,) iterations of each trial, in order.
    """
    starts: dict[int, list[float]] = {}
    for step in sorted((step for steps in trials for step in steps), key=lambda step: step.start):
        for device in step.devices:
            starts.setdefault(device, []).append(step.start)
    found: list[Segment] = []
    for row, steps in enumerate(trials):
        before: Step | None = None
        for step in steps:
            if before is not None and _goes_on(before, step, starts):
                found[-1] = replace(found[-1], end=step.end)
            else:
                found.append(Segment(row, step.start, step.end, step.devices, step.width))
            before = step
    return _trimmed(found)


def with_pauses(segments: Sequence[Segment], resized: Iterable[Resized]) -> list[Segment]:
    """The segments, with the pauses of the resizes that some begin with."""
    found = list(segments)
    of_row: dict[int, list[int]] = {}
    for position in sorted(range(len(found)), key=lambda i: found[i].start):
        of_row.setdefault(found[position].row, []).append(position)
    for row, at, seconds, devices in resized:
        before = 0.0
        for position in of_row.get(row, ()):
            segment = found[position]
            # The lane's clock and the driver's differ a little.
            if segment.start >= at - _JITTER * max(seconds, segment.end - segment.start):
                if set(segment.devices) == set(devices) and not segment.pause:
                    start = max(before, min(at, segment.start) - seconds)
                    found[position] = replace(segment, start=start, pause=min(seconds, segment.start - start))
                break
            before = segment.end
    return found


def _goes_on(before: Step, step: Step, starts: Mapping[int, Sequence[float]]) -> bool:
    """Whether the trial held its devices from one iteration to the next, as far as one can see."""
    if (before.devices, before.width) != (step.devices, step.width):
        return False
    longer = max(before.end - before.start, step.end - step.start)
    gap = step.start - before.end
    if gap <= _JITTER * longer:
        return True
    # In a longer pause somebody else may have had its place.
    taken = any(
        bisect.bisect_left(starts[device], step.start) > bisect.bisect_left(starts[device], before.end)
        for device in step.devices
    )
    return gap <= longer and not taken


def _trimmed(segments: Sequence[Segment]) -> list[Segment]:
    """Ends segments where the next one on their device starts, if they overlap by no more than clocks differ."""
    on_device: dict[int, list[int]] = {}
    for position in sorted(range(len(segments)), key=lambda i: segments[i].start):
        for device in segments[position].devices:
            on_device.setdefault(device, []).append(position)
    ends = [segment.end for segment in segments]
    for positions in on_device.values():
        there: list[int] = []
        for position in positions:
            start, length = segments[position].start, segments[position].end - segments[position].start
            for other in there:
                shorter = min(length, segments[other].end - segments[other].start)
                if start < ends[other] <= start + _JITTER * shorter and start > segments[other].start:
                    ends[other] = start
            there = [other for other in there if ends[other] > start] + [position]
    return [replace(segment, end=end) for segment, end in zip(segments, ends, strict=True)]
