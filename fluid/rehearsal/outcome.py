"""What a sweep took and found, from its run folder: of a rehearsal, or of a real run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fluid.errors import InvalidFieldError, require_number
from fluid.measure.json_input import read_record
from fluid.results.best import eligible
from fluid.results.iterations import FinishedIterations, StoredIteration, shown_iterations
from fluid.results.loading import completed
from fluid.results.metrics import Goal, goals_of, known_goals
from fluid.results.stored_run import read_run
from fluid.results.submitted import SubmittedGroup, SubmittedTrial
from fluid.sizing.held_time import HeldTime

#: Version of an outcome's JSON form.
_FORMAT = 1
#: Times closer together than this share of the time are one instant.
_SAME_INSTANT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTrial:
    """One trial of a sweep.

    Attributes:
        trial_id: its id.
        config: its hyperparameters.
        state: ``"DONE"``, ``"STOPPED"``, ``"FAILED"`` and so on, as in reports.
        iterations: how many it reached.
        value: its best value of the metric; ``None`` if it reported none.
        began_s: when its first iteration began, seconds since the start; ``None`` if it finished none.
        ended_s: when its last iteration ended.
        seconds: of its iterations, by the wall.
        device_seconds: that its iterations used.
    """

    trial_id: str
    config: Mapping[str, Any]
    state: str
    iterations: int
    value: float | None = None
    began_s: float | None = None
    ended_s: float | None = None
    seconds: float = 0.0
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOutcome:
    """What a sweep took and found. Times are seconds since its start, when its first trial was submitted.

    Attributes:
        makespan_s: from the start to the end of the last iteration.
        lead_s: from the start until the first iteration began: lanes started, and a trial was set up.
        device_hours: for which devices were held in that time.
        busy_share: the share of these in which iterations ran.
        trace: when the best value so far improved, and the value.
        results: finished iterations.
        trials: how many there were.
        devices: how many there were at once, at most.
        metric, mode: what the sweep optimizes, and ``"min"`` or ``"max"``; ``None`` if unknown: there is no trace then.
        name: of the sweep.
        played: its trials, in order of submission.
    """

    makespan_s: float
    lead_s: float = 0.0
    device_hours: float
    busy_share: float
    trace: tuple[tuple[float, float], ...]
    results: int
    trials: int
    devices: int
    metric: str | None = None
    mode: str | None = None
    name: str = ""
    played: tuple[PlayedTrial, ...] = field(default=(), repr=False)

    @property
    def best(self) -> float | None:
        """The best value; ``None`` if no trial reported one."""
        return self.trace[-1][1] if self.trace else None

    @property
    def goal(self) -> Goal | None:
        """What it optimizes; ``None`` if unknown."""
        return None if self.metric is None else Goal(self.metric, self.mode == "min")

    def seconds_to(self, value: float) -> float | None:
        """Seconds until the best value so far was at least as good as ``value``; ``None`` if it never was.

        Raises:
            InvalidFieldError: the value is no number.
        """
        require_number("value", value, at_least=-math.inf)
        goal = self.goal
        if goal is None:
            return None
        return next((at for at, best in self.trace if not goal.is_better(value, best)), None)

    def best_at(self, seconds: float) -> float | None:
        """The best value after so many seconds; ``None`` if there was none yet."""
        return next((best for at, best in reversed(self.trace) if at <= seconds), None)

    def cost(self, price: float) -> float:
        """US dollars for its devices, at so many for a device-hour."""
        return self.device_hours * require_number("price", price, at_least=0.0)

    def as_json(self) -> dict[str, Any]:
        """The outcome as JSON holds it."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SweepOutcome:
        """Reads what :meth:`as_json` gave.

        Raises:
            InvalidFieldError: it is something else.
        """
        fields = {name: value for name, value in content.items() if name != "format"}
        if content.get("format") != _FORMAT:
            raise InvalidFieldError("outcome", content.get("format"), f"must be of format {_FORMAT}")
        return read_record(fields, cls, "outcome", place="outcome")


def outcome_of(
    run_dir: str | Path, metric: str | None = None, mode: str | None = None, *, group: str | None = None
) -> SweepOutcome:
    """Reads what a sweep took and found from its run folder, rehearsed or real.

    Example:
        >>> import fluid
        >>> from fluid.rehearsal import ReplayedIteration
        >>> from fluid.rehearsal.outcome import outcome_of
        >>> class Model:
        ...     @staticmethod
        ...     def replay(config, iterations):
        ...         return [ReplayedIteration({"loss": config["lr"] / i}, seconds=1800.0) for i in iterations]
        >>> trials = [fluid.Trial(Model, {"lr": lr}, budget=2) for lr in (0.5, 0.25)]
        >>> with fluid.FluidExecutor(backend="simulated", devices=2, max_width=1, run_dir="run", verbose=0) as executor:
        ...     ended = executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
        >>> outcome = outcome_of("run", "loss", "min")
        >>> outcome.makespan_s, outcome.device_hours, outcome.busy_share, outcome.best, outcome.seconds_to(0.25)
        (3600.0, 2.0, 1.0, 0.125, 1800.0)

    Args:
        run_dir: the run folder.
        metric: what is optimized; ``None`` for what the search says. Of several metrics, the first.
        mode: ``"min"`` or ``"max"``; ``None`` for what the search says, else for what the metric's name does.
        group: the name of one of several groups; ``None`` for all.

    Raises:
        InvalidFieldError: the path is not a run folder; there is no such group; or metric or mode cannot be used.
    """
    outcomes = _PlayedFolder(run_dir)
    known = outcomes.groups
    if group is not None:
        known = [each for each in known if each.name == group]
        if not known:
            raise InvalidFieldError("group", group, f"must be one of {[each.name for each in outcomes.groups]}")
    return outcomes.outcome(known, metric, mode)


def outcomes_of(run_dir: str | Path, metric: str | None = None, mode: str | None = None) -> list[SweepOutcome]:
    """Reads what each sweep of a session took and found, in order of submission.

    Each group of a search is a sweep by itself; groups that no search submitted, such as rungs, are one sweep together.

    Args:
        run_dir: the run folder.
        metric, mode: as for :func:`outcome_of`.

    Raises:
        InvalidFieldError: as for :func:`outcome_of`.
    """
    outcomes = _PlayedFolder(run_dir)
    sweeps: dict[str, list[SubmittedGroup]] = {}
    for group in outcomes.groups:
        sweeps.setdefault("" if group.search is None else group.group_id, []).append(group)
    return [outcomes.outcome(groups, metric, mode) for groups in sweeps.values()]


class _PlayedFolder:
    """A run folder, read once."""

    def __init__(self, run_dir: str | Path) -> None:
        run = read_run(run_dir)
        self._done = FinishedIterations(run.reported)
        self.groups = list(run.groups)
        #: Seconds since the run began at which each group was submitted, by id.
        self._submitted: dict[str, float] = {}
        #: When devices came (True) or left, in order.
        self._changes: list[tuple[float, int, bool]] = []
        self._read_times(run.entries)

    def _read_times(self, entries: Iterable[Mapping[str, Any]]) -> None:
        clock, held, latest = self._done.clock(), set[int](), 0.0
        for entry in entries:
            what, at = entry.get("what"), entry.get("at")
            if not isinstance(at, (int, float)) or not math.isfinite(at):
                continue
            before, latest = latest, clock.seconds(at)
            try:
                if what == "GroupSubmitted":
                    self._submitted.setdefault(str(entry["group_id"]), latest)
                elif what == "DeviceAdded":
                    index = int(entry["device"]["index"])
                    if index in held:  # The session was resumed: it had given its devices back by its last entry.
                        self._changes += [(before, each, False) for each in sorted(held)]
                        held.clear()
                    held.add(index)
                    self._changes.append((latest, index, True))
                elif what == "NoteDeviceLost":
                    index = int(entry["device_id"])
                    held.discard(index)
                    self._changes.append((latest, index, False))
            except (KeyError, TypeError, ValueError):  # An entry that is not as it should be.
                continue

    def outcome(self, groups: Sequence[SubmittedGroup], metric: str | None, mode: str | None) -> SweepOutcome:
        """The outcome of some groups together."""
        goal = _goal_of(metric, mode, groups)
        shown = [parts for group in groups for parts in group.trials.values()]
        iterations = [[each for part in parts for each in shown_iterations(part, self._done)] for parts in shown]
        shared = [part for group in groups for parts in group.shared_runs.values() for part in parts]
        ran = [*iterations, *(shown_iterations(part, self._done) for part in shared)]
        every = [each for of_trial in ran for each in of_trial if not each.source]
        first = min((each.start for each in every), default=0.0)
        submitted = [self._submitted[group.group_id] for group in groups if group.group_id in self._submitted]
        start = min([first, *submitted])
        end = max((each.end for each in every), default=start)
        held, most = self._held(start, end, every)
        busy = math.fsum(_busy(every))
        played = tuple(_played(parts, each, goal, start) for parts, each in zip(shown, iterations, strict=True))
        names = dict.fromkeys(group.name for group in groups)
        return SweepOutcome(
            makespan_s=end - start,
            lead_s=first - start if first - start > _SAME_INSTANT * max(1.0, abs(first)) else 0.0,
            device_hours=held / 3600.0,
            busy_share=min(1.0, busy / held) if held > 0.0 else 0.0,
            trace=() if goal is None else _trace(shown, iterations, goal, start),
            results=len(every),
            trials=len(shown),
            devices=most,
            metric=None if goal is None else goal.metric,
            mode=None if goal is None else goal.mode,
            name=", ".join(names),
            played=played,
        )

    def _held(self, start: float, end: float, every: Iterable[StoredIteration]) -> tuple[float, int]:
        """Device-seconds held between two times, and the most devices held at once."""
        if not self._changes:  # A journal that is missing, or of the first versions.
            used = {device for each in every for device in each.devices}
            return len(used) * (end - start), len(used)
        meter, most = HeldTime(), 0
        for at, device, came in self._changes:
            if at >= end > start and came:
                continue
            inside = min(max(at, start), end)
            if came:
                meter.came(device, inside)
            else:
                meter.left(device, inside)
            most = max(most, len(meter.held))
        return meter.device_seconds(end), most


def _goal_of(metric: str | None, mode: str | None, groups: Sequence[SubmittedGroup]) -> Goal | None:
    found, its_mode = completed(metric, mode, [group.search for group in groups])
    goals = known_goals(found, its_mode) if metric is None else goals_of(found, its_mode)
    return goals[0] if goals else None


def _trace(
    shown: Sequence[Sequence[SubmittedTrial]],
    iterations: Sequence[Sequence[StoredIteration]],
    goal: Goal,
    start: float,
) -> tuple[tuple[float, float], ...]:
    """When the best value improved. Failed trials do not count, unless all have failed."""
    sound = eligible(zip(shown, iterations, strict=True), lambda pair: pair[0][-1].state)
    found: list[tuple[float, float]] = []
    for one in sorted((one for _, each in sound for one in each), key=lambda one: one.end):
        value = goal.value_in(one.metrics)
        if value is not None and (not found or goal.is_better(value, found[-1][1])):
            at = one.end - start
            if found and at - found[-1][0] <= _SAME_INSTANT * max(1.0, at):
                at = found.pop()[0]
            found.append((at, value))
    return tuple(found)


def _busy(every: Iterable[StoredIteration]) -> Iterable[float]:
    """Seconds in which iterations ran, for each device in turn."""
    of_device: dict[int, list[tuple[float, float]]] = {}
    for each in every:
        for device in each.devices:
            of_device.setdefault(device, []).append((each.start, each.end))
    for spans in of_device.values():
        latest = -math.inf
        for start, end in sorted(spans):
            yield max(0.0, end - max(start, latest))
            latest = max(latest, end)


def _played(
    parts: Sequence[SubmittedTrial], iterations: Sequence[StoredIteration], goal: Goal | None, start: float
) -> PlayedTrial:
    last = parts[-1]
    values = [] if goal is None else [goal.value_in(each.metrics) for each in iterations]
    known = [value for value in values if value is not None]
    pick = min if goal is not None and goal.less else max
    return PlayedTrial(
        trial_id=last.shown_id,
        config=last.config,
        state=last.state,
        iterations=max((each.number for each in iterations), default=0),
        value=pick(known) if known else None,
        began_s=min((each.start for each in iterations), default=start) - start if iterations else None,
        ended_s=max(each.end for each in iterations) - start if iterations else None,
        seconds=math.fsum(each.seconds for each in iterations if not each.source),
        device_seconds=math.fsum(each.device_seconds for each in iterations),
    )
