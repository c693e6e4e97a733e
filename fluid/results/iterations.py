"""The finished iterations of a session, read from ``results.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from fluid.results.run_files import RunFiles, line_count
from fluid.results.submitted import SubmittedTrial

#: Results are written in order of time. A step back by more seconds than this means that the clock was reset.
CLOCK_RESET_S = 60.0


class ReportedIteration(NamedTuple):
    """A line of ``results.jsonl``: an iteration as it was reported.

    Attributes:
        trial_id, group_id: the submitted trial.
        number: the iteration's number within it, from 1.
        seconds: its wall time.
        at: when it ended, in seconds on the clock of the session that wrote it.
        width: ``1/p``, 1 or a number of devices.
        devices: indices of its devices.
        metrics: as JSON has them.
    """

    trial_id: str
    group_id: str
    number: int
    seconds: float
    at: float
    width: float
    devices: tuple[int, ...]
    metrics: Any


def read_reported(entry: Mapping[str, Any]) -> ReportedIteration | None:
    """Reads a line of ``results.jsonl``; ``None`` if it is no finished iteration."""
    try:
        seconds, at, width = float(entry["seconds"]), float(entry["at"]), float(entry["width"])
        devices = tuple(map(int, entry["devices"]))
        if not (math.isfinite(seconds + at) and seconds >= 0.0 and 0.0 < width < math.inf and devices):
            return None
        trial_id, group_id, number = str(entry["trial"]), str(entry.get("group", "")), int(entry["iteration"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return ReportedIteration(trial_id, group_id, number, seconds, at, width, devices, entry.get("metrics"))


def reported_lines(files: RunFiles) -> list[ReportedIteration]:
    """The finished iterations in ``results.jsonl``, in the order written; a note tells of lines that are none."""
    entries = files.results()
    found = [reported for reported in map(read_reported, entries) if reported is not None]
    if len(found) < len(entries):
        files.notes.append(f"{line_count(len(entries) - len(found))} of results.jsonl could not be used.")
    return found


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


def finished_iterations(reported: Iterable[ReportedIteration]) -> FinishedIterations:
    """Brings iterations, given in the order reported, on one time axis."""
    found = FinishedIterations()
    by_trial = found.by_trial
    latest, offset = -math.inf, 0.0
    for one in reported:
        start, end = one.at - one.seconds + offset, one.at + offset
        if end < latest - CLOCK_RESET_S:
            # The session was resumed after its machine restarted. The length of the break is unknown; 0 is assumed.
            offset = latest - (one.at - one.seconds)
            found.offsets.append(offset)
            start, end = one.at - one.seconds + offset, one.at + offset
        latest = max(latest, end)
        iteration = FinishedIteration(one.number, start, end, one.width, one.devices, flat(one.metrics))
        by_trial.setdefault(one.trial_id, []).append(iteration)
        found.group_of.setdefault(one.trial_id, one.group_id)
    found.origin = origin = min((first.start for of_trial in by_trial.values() for first in of_trial), default=0.0)
    for trial, of_trial in by_trial.items():
        shifted = (replace(each, start=each.start - origin, end=each.end - origin) for each in of_trial)
        by_trial[trial] = sorted(shifted, key=lambda iteration: iteration.end)
    return found


def shown_iterations(trial: SubmittedTrial, done: FinishedIterations) -> Iterator[FinishedIteration]:
    """The iterations of a submitted trial, numbered as in the trial it is shown as, with that trial's metrics."""
    for iteration in done.by_trial.get(trial.trial_id, ()):
        if trial.before:
            iteration = replace(iteration, number=iteration.number + trial.before)
        if trial.inner is not None:
            iteration = replace(iteration, metrics=_nested(iteration.metrics, f"{trial.inner}/"))
        yield iteration


def _nested(metrics: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix) and value is not None
    }


def flat(metrics: object, prefix: str = "") -> dict[str, Any]:
    """Flattens nested metrics or configs: their names become ``outer/inner``."""
    if not isinstance(metrics, Mapping):
        return {prefix.rstrip("/") or "value": metrics} if metrics is not None else {}
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        found.update(flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return found
