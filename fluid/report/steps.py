"""Iterations of a run, and the stretches of time they make up on the devices."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fluid.report.run_files import RunFiles
from fluid.report.words import count
from fluid.strips import Segment

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


def read_steps(files: RunFiles) -> tuple[dict[str, list[Step]], dict[str, str]]:
    """Iterations by trial, on the clock of the session, and the groups of the trials."""
    steps: dict[str, list[Step]] = {}
    groups: dict[str, str] = {}
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
        step = replace(step, start=step.start + later, end=step.end + later)
        latest = max(latest, step.end)
        steps.setdefault(trial, []).append(step)
        groups.setdefault(trial, str(entry.get("group", "")))
    if refused:
        files.notes.append(f"{count(refused, 'line')} of results.jsonl could not be used.")
    for found in steps.values():
        found.sort(key=lambda step: step.end)
    return steps, groups


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
