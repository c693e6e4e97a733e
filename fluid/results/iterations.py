"""The finished iterations of a session, read from ``results.jsonl``."""

from __future__ import annotations

import bisect
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fluid.results.records import Result, TrialFiles, TrialResult, device_seconds
from fluid.results.run_files import as_written, parsed
from fluid.results.submitted import SubmittedTrial
from fluid.trainables.usage import NO_USAGE, Usage
from fluid.trial_fields import StartFrom

#: Results are written in order of time. Where an older Fluid wrote, a step back by more seconds than this is a reboot.
CLOCK_RESET_S = 60.0
#: How a line names what a :class:`StoredIteration` does.
_NAMES = {"trial_id": "trial", "group_id": "group", "number": "iteration"}
_LARGEST = sys.float_info.max


_Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]


class StoredIteration(msgspec.Struct, frozen=True, gc=False, rename=_NAMES):
    """A finished iteration of a submitted trial: a line of ``results.jsonl``.

    Attributes:
        trial_id, group_id: the submitted trial.
        number: the iteration's number within it, from 1.
        seconds: its wall time.
        at: when it ended, in seconds on the time axis of the files; of a :class:`FinishedIterations`, since the run
            began.
        width: ``1/p``, 1 or a number of devices.
        devices: indices of its devices.
        metrics: as JSON has them; of a :class:`FinishedIterations`, nested names are joined by ``/``.
        rows: trials that took it together in one fused step, this one included; 1 if it was not fused.
        usage: what else it used.
        source: the trial that ran it, if another one did for several; empty for itself.
    """

    trial_id: str
    number: int
    seconds: Annotated[float, Meta(ge=0.0, le=_LARGEST)]
    at: _Finite
    width: Annotated[float, Meta(gt=0.0, le=_LARGEST)]
    devices: Annotated[tuple[int, ...], Meta(min_length=1)]
    metrics: Any = None
    rows: Annotated[int, Meta(ge=1)] = 1
    group_id: str = ""
    usage: Usage = NO_USAGE
    source: str = ""

    @property
    def start(self) -> float:
        """When it began."""
        return self.at - self.seconds

    @property
    def end(self) -> float:
        """When it ended."""
        return self.at

    @property
    def device_seconds(self) -> float:
        """Seconds of devices that it used: of a device that trials shared, the trial's part; 0 if it has a source."""
        return 0.0 if self.source else device_seconds(self.seconds, self.width, len(self.devices), self.rows)


_decode = msgspec.json.Decoder(StoredIteration).decode


def read_iteration(text: bytes, read: Callable[[bytes], Any] = parsed) -> Any:
    """The iteration on a line of ``results.jsonl``; if it has none, what ``read`` makes of it."""
    try:
        return _decode(text)
    except (ValueError, RecursionError):
        value = read(text)  # Its metrics may hold NaN, which is none of JSON.
    try:
        return msgspec.convert(value, StoredIteration) if isinstance(value, dict) else value
    except ValueError:  # Also UnicodeEncodeError: half a character in place of a number.
        return value


def only_of(group_ids: Collection[str]) -> Callable[[bytes], Any]:
    """Makes what reads the iterations of some groups: of lines of others it makes nothing, mostly unread."""
    groups, begin = frozenset(group_ids), tuple(f'{{"group": {json.dumps(each)}, '.encode() for each in group_ids)

    def read(text: bytes) -> Any:
        if text.startswith(b'{"group": ') and not text.startswith(begin):
            return None
        found = read_iteration(text, as_written)
        return found if isinstance(found, StoredIteration) and found.group_id in groups else None

    return read


class _Timed(Protocol):
    @property
    def at(self) -> float: ...


_T = TypeVar("_T", bound=_Timed)


class TimeAxis:
    """Puts iterations, given in the order reported, on one time axis.

    It is that of the files (:mod:`fluid.results.run_files`); but a session that an older Fluid resumed after a reboot
    wrote times of a clock that was reset. The length of the break is unknown; 0 is assumed.

    Attributes:
        offsets: seconds to add to times in the files: at first, and after each reset of the clock.
        latest: when the last iteration ended; minus infinity if there is none.
    """

    def __init__(self) -> None:
        self.offsets = [0.0]
        self.latest = -math.inf

    def offset_of(self, one: StoredIteration) -> float:
        """What to add to the times of the next iteration. One that another trial has run comes later than its time."""
        if one.source:
            return self.offsets[-1]
        if one.at + self.offsets[-1] < self.latest - CLOCK_RESET_S:
            self.offsets.append(self.latest - one.start)
        self.latest = max(self.latest, one.at + self.offsets[-1])
        return self.offsets[-1]


class FinishedIterations(TimeAxis):
    """The finished iterations of a run.

    Attributes:
        by_trial: the iterations of each trial, in order.
        origin: when the run began, on the clock of the session.
        repeated: how many iterations were reported more than once.
    """

    def __init__(self, reported: Iterable[StoredIteration] = ()) -> None:
        super().__init__()
        self.by_trial: dict[str, list[StoredIteration]] = {}
        self.origin = 0.0
        self.repeated = 0
        self.extend(reported)

    @property
    def end(self) -> float:
        """When the last iteration ended, in seconds since the run began; 0 if none has."""
        return self.latest - self.origin if math.isfinite(self.latest) else 0.0

    @property
    def ran_by(self) -> dict[str, Sequence[StoredIteration]]:
        """Those that each trial ran itself, in order."""
        return {name: ran_itself(done) for name, done in self.by_trial.items()}

    def extend(self, reported: Iterable[StoredIteration]) -> bool:
        """Adds iterations, given in the order reported.

        Returns:
            whether the time axis stays. If not, this must be made anew of all iterations.
        """
        resets, timed = len(self.offsets), [(one, self.offset_of(one)) for one in reported]
        first = min((one.start + offset for one, offset in timed if not one.source), default=math.inf)
        if not self.by_trial and timed:
            self.origin = first if math.isfinite(first) else min(one.start + offset for one, offset in timed)
        elif first < self.origin or len(self.offsets) > resets:
            return False
        for one, offset in timed:
            known = self.by_trial.setdefault(one.trial_id, [])
            if known and known[-1].number >= one.number:
                self.repeated += any(other.number == one.number for other in known)
            placed = replace(one, at=one.at + offset - self.origin, metrics=flat(one.metrics))
            bisect.insort_right(known, placed, key=_end)
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


def ran_itself(iterations: Sequence[StoredIteration]) -> Sequence[StoredIteration]:
    """Those of a trial's iterations that it ran itself; the same object if these are all, as of most trials."""
    return [one for one in iterations if not one.source] if any(one.source for one in iterations) else iterations


def _end(iteration: StoredIteration) -> float:
    return iteration.at


def shown_iterations(trial: SubmittedTrial, done: FinishedIterations) -> Iterator[StoredIteration]:
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
    if not prefix and type(metrics) is dict and not any(isinstance(value, Mapping) for value in metrics.values()):
        return metrics  # As most are.
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        found.update(flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return found


# -- trial results -------------------------------------------------------------------------------
#
# Makes the records that users get of trials: of submitted trials and their reported iterations.


def result_of(reported: StoredIteration, trial: SubmittedTrial) -> Result:
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
        usage=reported.usage,
        source=reported.source,
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
        start=known_start(parts[0].start, ((result.iteration, result.source) for result in results)),
    )


def known_start(start: StartFrom | None, iterations: Iterable[tuple[int, str]]) -> StartFrom | None:
    """From which state a trial starts, as its iterations tell it.

    They tell the iteration where the newest state was asked for, which run it shares, and whether it ran alone after
    all.

    Args:
        start: as it was submitted.
        iterations: the numbers and the sources of its iterations, in order.
    """
    left = iter(iterations)
    first = next(left, (0, ""))
    if start is None and not first[1]:
        return None  # Shared ones come first.
    known = [first, *left] if first[0] else []
    shared = [each for each in known if each[1]]
    own = next((number for number, source in known if not source), None)
    if start is None:
        return StartFrom(shared[-1][1], shared[-1][0], is_shared=True)
    if start.is_shared:
        return None if own is not None and start.at is not None and own <= start.at else start
    return start._replace(at=own - 1) if start.at is None and own is not None else start


def files_of(run_dir: Path, parts: Sequence[SubmittedTrial]) -> TrialFiles:
    """Where the files of the submitted trials are."""
    return TrialFiles(run_dir, tuple((part.trial_id, part.before) for part in parts))
