"""The finished iterations of a session, read from ``results.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from fluid.results.run_files import RunFiles, line_count

#: Results are written in order of time. A step back by more seconds than this means that the clock was reset.
CLOCK_RESET_S = 60.0


@dataclass(frozen=True, slots=True)
class FinishedIteration:
    """A finished iteration.

    Attributes:
        number: its number within the trial, from 1.
        start, end: seconds since the run began.
        width: ``1/p``, 1 or a number of devices.
        devices: indices of its devices.
        metrics: the reported metrics, nested names joined by ``/``.
        reported: the metrics as JSON has them.
    """

    number: int
    start: float
    end: float
    width: float
    devices: tuple[int, ...]
    metrics: Mapping[str, Any]
    reported: Any = None


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
        files.notes.append(f"{line_count(refused)} of results.jsonl could not be used.")
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
    metrics = entry.get("metrics")
    return FinishedIteration(int(entry["iteration"]), at - seconds, at, width, devices, flat(metrics), metrics)


def flat(metrics: object, prefix: str = "") -> dict[str, Any]:
    """Flattens nested metrics or configs: their names become ``outer/inner``."""
    if not isinstance(metrics, Mapping):
        return {prefix.rstrip("/") or "value": metrics} if metrics is not None else {}
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        found.update(flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return found
