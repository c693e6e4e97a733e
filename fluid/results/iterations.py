"""The finished iterations of a session, read from ``results.jsonl``."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from fluid.results.records import Result, TrialFiles, TrialResult, device_seconds
from fluid.results.run_files import RunFiles, line_count
from fluid.results.submitted import SubmittedTrial

#: Results are written in order of time. Where an older Fluid wrote, a step back by more seconds than this is a reboot.
CLOCK_RESET_S = 60.0


class ReportedIteration(NamedTuple):
    """A line of ``results.jsonl``: an iteration as it was reported.

    Attributes:
        trial_id, group_id: the submitted trial.
        number: the iteration's number within it, from 1.
        seconds: its wall time.
        at: when it ended, in seconds on the time axis of the files.
        width: ``1/p``, 1 or a number of devices.
        devices: indices of its devices.
        metrics: as JSON has them.
        rows: trials that took it together in one fused step, this one included; 1 if it was not fused.
    """

    trial_id: str
    group_id: str
    number: int
    seconds: float
    at: float
    width: float
    devices: tuple[int, ...]
    metrics: Any
    rows: int = 1


def read_reported(entry: Mapping[str, Any]) -> ReportedIteration | None:
    """Reads a line of ``results.jsonl``; ``None`` if it is no finished iteration."""
    try:
        seconds, at, width = float(entry["seconds"]), float(entry["at"]), float(entry["width"])
        devices, rows = tuple(map(int, entry["devices"])), int(entry.get("rows", 1))
        if not (math.isfinite(seconds + at) and seconds >= 0.0 and 0.0 < width < math.inf and devices and rows >= 1):
            return None
        trial_id, group_id, number = str(entry["trial"]), str(entry.get("group", "")), int(entry["iteration"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return ReportedIteration(trial_id, group_id, number, seconds, at, width, devices, entry.get("metrics"), rows)


def reported_lines(files: RunFiles) -> list[ReportedIteration]:
    """The finished iterations in ``results.jsonl``, in the order written; a note tells of lines that are none."""
    return ReportedLines(files).new()


class ReportedLines:
    """The finished iterations in ``results.jsonl``, read on by each call."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._read = self._unusable = 0

    def new(self) -> list[ReportedIteration]:
        """The iterations that follow those read before, in the order written; a note tells of lines that are none."""
        entries = self._files.results()[self._read :]
        found = [reported for reported in map(read_reported, entries) if reported is not None]
        self._read += len(entries)
        self._unusable += len(entries) - len(found)
        if self._unusable:
            self._files.notes.append(f"{line_count(self._unusable)} of results.jsonl could not be used.")
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
        rows: trials that took it together in one fused step, itself included; 1 if it was not fused.
    """

    number: int
    start: float
    end: float
    width: float
    devices: tuple[int, ...]
    metrics: Mapping[str, Any]
    rows: int = 1

    @property
    def seconds(self) -> float:
        """Its wall time."""
        return self.end - self.start

    @property
    def device_seconds(self) -> float:
        """Seconds of devices that it used: of a device that trials shared, the trial's part."""
        return device_seconds(self.seconds, self.width, len(self.devices), self.rows)


class _Timed(Protocol):
    @property
    def at(self) -> float: ...


_T = TypeVar("_T", bound=_Timed)


class FinishedIterations:
    """The finished iterations of a run, on one time axis.

    It is that of the files (:mod:`fluid.results.run_files`); but a session that an older Fluid resumed after a reboot
    wrote times of a clock that was reset.

    Attributes:
        by_trial: the iterations of each trial, in order.
        group_of: the group of each trial.
        origin: when the run began, on the clock of the session.
        offsets: seconds to add to times on that clock: at first, and after each reset of the clock.
        repeated: how many iterations were reported more than once.
    """

    def __init__(self) -> None:
        self.by_trial: dict[str, list[FinishedIteration]] = {}
        self.group_of: dict[str, str] = {}
        self.origin = 0.0
        self.offsets = [0.0]
        self.repeated = 0
        self._latest = -math.inf

    @property
    def end(self) -> float:
        """When the last iteration ended, in seconds since the run began; 0 if none has."""
        return self._latest - self.origin if self.by_trial else 0.0

    def extend(self, reported: Iterable[ReportedIteration]) -> bool:
        """Adds iterations, given in the order reported.

        Returns:
            whether the time axis stays. If not, this must be made anew of all iterations.
        """
        resets, timed = len(self.offsets), []
        for one in reported:
            offset = self.offsets[-1]
            if one.at + offset < self._latest - CLOCK_RESET_S:
                # The session was resumed after its machine restarted. The length of the break is unknown; 0 is assumed.
                offset = self._latest - (one.at - one.seconds)
                self.offsets.append(offset)
            self._latest = max(self._latest, one.at + offset)
            timed.append((one, one.at - one.seconds + offset, one.at + offset))
        first = min((start for _, start, _ in timed), default=math.inf)
        if not self.by_trial and timed:
            self.origin = first
        elif first < self.origin or len(self.offsets) > resets:
            return False
        for one, start, end in timed:
            iteration = FinishedIteration(
                one.number, start - self.origin, end - self.origin, one.width, one.devices, flat(one.metrics), one.rows
            )
            known = self.by_trial.setdefault(one.trial_id, [])
            if known and known[-1].number >= one.number:
                self.repeated += any(other.number == one.number for other in known)
            bisect.insort_right(known, iteration, key=_end)
            self.group_of.setdefault(one.trial_id, one.group_id)
        return True

    def clock(self) -> RunClock:
        """Tells the times of records, from the first one on."""
        return RunClock(self)

    def with_run_times(self, records: Iterable[_T]) -> Iterator[tuple[_T, float]]:
        """Yields each of the records, given in order of time, with its time in seconds since the run began."""
        clock = self.clock()
        for record in records:
            yield record, clock.seconds(record.at)


class RunClock:
    """Converts times on the clock of a session, given in order, to seconds since the run began."""

    def __init__(self, done: FinishedIterations) -> None:
        self._done = done
        self._latest = -math.inf
        self._resets = 0

    def seconds(self, at: float) -> float:
        """The time of the next record."""
        if at < self._latest - CLOCK_RESET_S:
            self._resets += 1
        self._latest = at
        offsets = self._done.offsets
        return at + offsets[min(self._resets, len(offsets) - 1)] - self._done.origin


def _end(iteration: FinishedIteration) -> float:
    return iteration.end


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


# -- trial results -------------------------------------------------------------------------------
#
# Makes the records that users get of trials: of submitted trials and their reported iterations.


def result_of(reported: ReportedIteration, trial: SubmittedTrial) -> Result:
    """An iteration of a submitted trial, numbered as in the trial it is shown as, with that trial's metrics."""
    metrics = reported.metrics
    if trial.inner is not None:
        inner = metrics.get(trial.inner) if isinstance(metrics, Mapping) else None
        metrics = inner
        if isinstance(inner, Mapping):  # Ray Tune fills in what it knows nothing of.
            metrics = {name: value for name, value in inner.items() if value is not None}
    return Result(
        trial_id=trial.shown_id,
        iteration=reported.number + trial.before,
        metrics=metrics if isinstance(metrics, Mapping) else {},
        seconds=reported.seconds,
        width=reported.width,
        device_ids=reported.devices,
        rows=reported.rows,
        config=trial.config,
    )


def trial_result(
    group: str,
    parts: Sequence[SubmittedTrial],
    results_of: Callable[[SubmittedTrial], Sequence[Result]],
    files: TrialFiles,
) -> TrialResult:
    """A trial, made of the submitted trials that are shown as it; the last determines its state.

    Args:
        group: name of its group.
        parts: the submitted trials, in order.
        results_of: gives the iterations of one of them, in order.
        files: where the trial's files are.
    """
    last = parts[-1]
    results = tuple(result for part in parts for result in results_of(part))
    return TrialResult(
        trial_id=last.shown_id,
        group=group,
        config=last.config,
        state=last.state,
        iteration=max((result.iteration for result in results), default=0),
        metrics=results[-1].metrics if results else {},
        results=results,
        failure=last.failure,
        seeds=last.seeds,
        files=files,
    )


def files_of(run_dir: Path, parts: Sequence[SubmittedTrial]) -> TrialFiles:
    """Where the files of the submitted trials are."""
    return TrialFiles(run_dir, tuple((part.trial_id, part.before) for part in parts))
