"""What an earlier session has left of a sweep, so that :func:`fluid.run` can go on with it."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from fluid.engine.commands import ReportEnd
from fluid.engine.events import BudgetExtended, Failure, GroupRecovered, TrialHistory
from fluid.errors import InvalidFieldError
from fluid.results.journal import IterationReported
from fluid.results.loading import sweep_in
from fluid.results.metrics import Goal
from fluid.results.records import Result, TrialResult
from fluid.results.stored_run import StoredRun, read_run
from fluid.results.submitted import SubmittedGroup
from fluid.search.schedules import with_schedules
from fluid.search_shape import SearchShape
from fluid.session.folder.resume import closes_gap
from fluid.sweeping.plan import GroupOptions
from fluid.trialgroup import Trial, TrialState

#: Terms of a group that a call gives.
_TERMS = ("owner", "priority", "preempt", "weight")
_OVER = {state.value for state in TrialState if state.ended}


@dataclass(frozen=True, kw_only=True)
class EarlierTrial:
    """A trial of the sweep.

    Attributes:
        trial_id: its id.
        config: its hyperparameters, as JSON has them.
        budget: iterations that it may run in all.
        ended: ``DONE``, ``STOPPED``, ``INFEASIBLE`` or ``FAILED``; ``None`` if it had not ended.
        is_over: whether it had ended for good, and did not wait for a decision.
        extended_by: iterations that it got on top of its first budget.
        failure: why it failed.
        retried: whether it had failed, and is to be tried again.
    """

    trial_id: str
    config: Mapping[str, Any]
    budget: int
    ended: TrialState | None
    is_over: bool
    extended_by: int
    failure: Failure | None
    retried: bool = False

    @property
    def first_budget(self) -> int:
        """Iterations that it was to run when it was submitted."""
        return self.budget - self.extended_by

    @property
    def has_ended_by_itself(self) -> bool:
        """Whether it is done; below its budget, it is as it ended by itself."""
        return self.is_over and self.ended is TrialState.DONE


@dataclass(frozen=True, kw_only=True)
class EarlierEnd:
    """A trial ended.

    Attributes:
        trial_id: its id.
        state: ``DONE``, ``STOPPED``, ``INFEASIBLE`` or ``FAILED``.
        failure: why it failed, or is infeasible.
    """

    trial_id: str
    state: TrialState
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class EarlierResumption:
    """A session went on with the sweep that one before it had left.

    Attributes:
        unfinished: ids of the trials that ran on, also of those that had failed before.
    """

    unfinished: frozenset[str] = frozenset()


EarlierEvent: TypeAlias = Result | EarlierEnd | EarlierResumption


@dataclass(frozen=True, kw_only=True)
class EarlierSweep:
    """A sweep in the folder of a session that has ended.

    Attributes:
        trials: in the order in which they were started.
        events: results and ends of trials, in the order in which the sweep heard of them.
        group: its group; ``None`` if the folder does not say.
    """

    trials: tuple[EarlierTrial, ...]
    events: tuple[EarlierEvent, ...]
    group: SubmittedGroup | None = None

    def retries(self) -> Counter[str]:
        """How often each trial was tried again after it had failed, the time to come included."""
        found = Counter(trial.trial_id for trial in self.trials if trial.retried)
        failed: set[str] = set()
        for event in self.events:
            if isinstance(event, EarlierEnd) and event.state is TrialState.FAILED:
                failed.add(event.trial_id)
            elif isinstance(event, EarlierResumption):
                found.update(failed & event.unfinished)
                failed -= event.unfinished
        return found

    @property
    def failed(self) -> list[str]:
        """Ids of the trials that have failed, and are not tried again."""
        return [trial.trial_id for trial in self.trials if trial.ended is TrialState.FAILED and not trial.retried]

    def require_goals(self, goals: Sequence[Goal]) -> None:
        """Checks that a sweep that goes on with this one optimizes the same metrics.

        Raises:
            InvalidFieldError: it does not.
        """
        search = None if self.group is None else self.group.search
        if search is None or search.metric is None:
            return
        known = [(search.metric, search.mode), *search.besides]
        given = [(goal.metric, goal.mode) for goal in goals]
        if known != given:
            reason = f"cannot be with resume=True: the sweep of the folder optimizes {known}, and this call {given}"
            raise InvalidFieldError("metric", [metric for metric, _ in given], reason)

    def require_group(self, options: GroupOptions) -> None:
        """Checks that the group of a sweep that goes on with this one has the same terms.

        Raises:
            InvalidFieldError: it has others.
        """
        if self.group is None:
            return
        there = {"requires": self.group.requires, **{name: getattr(self.group.terms, name) for name in _TERMS}}
        for name, known in there.items():
            if (given := getattr(options, name)) != known:
                reason = f"cannot be with resume=True: the sweep of the folder has {known!r}"
                raise InvalidFieldError(name, given, reason)

    def require_shape(self, shape: SearchShape) -> None:
        """Checks that the trials of a sweep that goes on with this one are to run as far.

        Raises:
            InvalidFieldError: they are not. Those that have ended could not run on.
        """
        known = None if self.group is None or self.group.search is None else self.group.search.shape
        if known is None:
            return
        mine, theirs = asdict(replace(known, concurrency=None)), asdict(replace(shape, concurrency=None))
        other = [f"{name} {value}, not {theirs[name]}" for name, value in mine.items() if value != theirs[name]]
        if other:
            reason = (
                f"the sweep of the folder is one of up to {known.rungs[-1]} iterations, with {'; '.join(other)}; call "
                "with the same algorithm, budget, eta and min_budget, and where a rung waits for all the same samples"
            )
            raise InvalidFieldError("resume", True, reason)


def read_sweep(run_dir: str | Path, name: str, *, retry_failed: bool = False) -> EarlierSweep:
    """Reads a sweep.

    Args:
        run_dir: the folder.
        name: of the sweep.
        retry_failed: whether trials that have failed are to be tried again.

    Raises:
        InvalidFieldError: the folder is not that of a session, or has no sweep of this name.
    """
    run = read_run(run_dir)
    found = sweep_in(run)
    trials = {trial.trial_id: trial for trial in found.trials if trial.group == name}
    if not trials:
        there = sorted({trial.group for trial in found.trials})
        raise InvalidFieldError("name", name, f"is no sweep of {run.path}, which has {', '.join(there) or 'none'}")
    journal = run.journal
    known = {trial_id: history for group in journal.groups.values() for trial_id, history in group.items()}
    again = {
        trial_id
        for trial_id, trial in trials.items()
        if trial_id in known and closes_gap(known[trial_id], trial.iteration, journal.durable.get(trial_id))
    }
    extended_by: Counter[str] = Counter()
    for entry in run.entries:
        if entry.get("what") == BudgetExtended.__name__:
            extended_by[str(entry.get("trial_id"))] += entry.get("iterations", 0)
    return EarlierSweep(
        trials=tuple(
            EarlierTrial(
                trial_id=trial_id,
                config=trial.config,
                budget=max(known[trial_id].budget, trial.iteration) if trial_id in known else max(1, trial.iteration),
                ended=None if trial_id in again else _ended(trial, known.get(trial_id)),
                is_over=trial.state in _OVER and trial_id not in again,
                extended_by=extended_by[trial_id],
                failure=trial.failure,
                retried=retry_failed and trial.state == TrialState.FAILED,
            )
            for trial_id, trial in sorted(trials.items())
        ),
        events=tuple(_events(run, trials, again)),
        group=next((one for one in run.groups if one.name == name), None),
    )


def _ended(trial: TrialResult, history: TrialHistory | None) -> TrialState | None:
    if trial.state in _OVER:
        return TrialState(trial.state)
    return None if history is None else history.ended


def _events(run: StoredRun, trials: Mapping[str, TrialResult], again: Collection[str]) -> Iterator[EarlierEvent]:
    """The events of the journal, and results that it does not have, as a session was killed before it wrote them there.

    Each of these comes where the next session has learnt of it: when that took up the group, or at the end. The end of
    a trial that is run ``again``, as its last results are lost, is none.
    """
    reported = dict.fromkeys((one.trial_id, one.number) for one in run.reported)
    results = {(one.trial_id, one.iteration): one for trial in trials.values() for one in trial.results}
    left = {key: results[key] for key in reported if key in results}
    ahead: dict[str, deque[int]] = {}  # The iterations in left, by trial.
    for trial_id, iteration in left:
        ahead.setdefault(trial_id, deque()).append(iteration)
    for entry in run.entries:
        what, trial_id = entry.get("what"), str(entry.get("trial_id"))
        if what == GroupRecovered.__name__:
            known = {one["trial"]["trial_id"]: one.get("reported", 0) for one in entry["trials"]}
            if not trials.keys().isdisjoint(known):
                yield from [left.pop(key) for key in list(left) if key[1] <= known.get(key[0], 0)]
                yield EarlierResumption(
                    unfinished=frozenset(
                        one["trial"]["trial_id"] for one in entry["trials"] if one.get("ended") is None
                    )
                )
        elif trial_id not in trials or (what == ReportEnd.__name__ and trial_id in again):
            continue
        elif what == IterationReported.__name__:
            # One entry tells of a run of iterations, by its last.
            while (waiting := ahead.get(trial_id)) and waiting[0] <= entry.get("iteration", 0):
                if (result := left.pop((trial_id, waiting.popleft()), None)) is not None:
                    yield result
        elif what == ReportEnd.__name__:
            state = TrialState(entry["state"])
            has_reason = state in (TrialState.FAILED, TrialState.INFEASIBLE)
            failure = (trials[trial_id].failure or _failure_in(entry)) if has_reason else None
            yield EarlierEnd(trial_id=trial_id, state=state, failure=failure)
    yield from left.values()


def _failure_in(entry: Mapping[str, Any]) -> Failure:
    """Why a trial failed that was tried again since."""
    known = entry.get("failure")
    known = known if isinstance(known, Mapping) else {}
    return Failure(str(known.get("kind", "error")), str(known.get("message", "")), str(known.get("traceback", "")))


def require_same(made: Trial | None, past: EarlierTrial) -> None:
    """Checks that a trial is the one that the earlier session made.

    Raises:
        InvalidFieldError: it is another one.
    """
    if made is None or made.id != past.trial_id:
        raise other_arguments(past.trial_id, "they make fewer trials, so give at least as many samples")
    if not is_same_config(made.config, past.config):
        names = [name for name in {**past.config, **made.config} if not _is_same_entry(name, made.config, past.config)]
        name = names[0] if names else ""
        there, given = past.config.get(name), made.config.get(name)
        hint = f"its config[{name!r}] is {there!r}, and would be {given!r}; give the same space, seed and points"
        raise other_arguments(past.trial_id, hint)


def is_same_config(config: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether a config is the one that is stored as JSON; what JSON cannot hold, but for schedules, is not compared."""
    return config.keys() == stored.keys() and all(_is_same_entry(name, config, stored) for name in config)


def _is_same_entry(name: str, config: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    if (name in config) != (name in stored):
        return False
    try:
        return bool(json.loads(json.dumps(with_schedules(config[name], repr))) == json.loads(json.dumps(stored[name])))
    except (TypeError, ValueError):
        return True


def other_arguments(trial_id: str, why: str) -> InvalidFieldError:
    """Makes the error about a trial that the sampler or the scheduler would not have started, or not have extended."""
    reason = f"trial {trial_id!r} of the folder does not follow from these arguments: {why}"
    return InvalidFieldError("resume", True, reason)
