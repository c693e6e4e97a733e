"""What an earlier session has left of a sweep, so that :func:`fluid.run` can go on with it."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from fluid.engine.commands import ReportEnd
from fluid.engine.events import BudgetExtended, Failure, GroupRecovered
from fluid.engine.journal import IterationReported
from fluid.errors import InvalidFieldError
from fluid.results.loading import load
from fluid.results.records import Result, TrialResult
from fluid.results.run_files import RunFiles
from fluid.results.submitted import SubmittedTrials
from fluid.search_shape import SearchShape
from fluid.trialgroup import Trial, TrialState

_OVER = {TrialState.DONE.value, TrialState.STOPPED.value, TrialState.FAILED.value}


@dataclass(frozen=True, kw_only=True)
class EarlierTrial:
    """A trial of the sweep.

    Attributes:
        trial_id: its id.
        config: its hyperparameters, as JSON has them.
        budget: iterations that it may run in all.
        ended: ``DONE``, ``STOPPED`` or ``FAILED``; ``None`` if it had not ended.
        is_over: whether it had ended for good, and did not wait for a decision.
        extended_by: iterations that it got on top of its first budget.
        failure: why it failed.
    """

    trial_id: str
    config: Mapping[str, Any]
    budget: int
    ended: TrialState | None
    is_over: bool
    extended_by: int
    failure: Failure | None

    @property
    def has_ended_by_itself(self) -> bool:
        """Whether it is done; below its budget, it is as it ended by itself."""
        return self.is_over and self.ended is TrialState.DONE


@dataclass(frozen=True, kw_only=True)
class EarlierEnd:
    """A trial ended.

    Attributes:
        trial_id: its id.
        state: ``DONE``, ``STOPPED`` or ``FAILED``.
        failure: why it failed.
    """

    trial_id: str
    state: TrialState
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class EarlierResumption:
    """A session went on with the sweep that one before it had left."""


EarlierEvent: TypeAlias = Result | EarlierEnd | EarlierResumption


@dataclass(frozen=True, kw_only=True)
class EarlierSweep:
    """A sweep in the folder of a session that has ended.

    Attributes:
        trials: in the order in which they were started.
        events: results and ends of trials, in the order in which the sweep heard of them.
        shape: how far its trials were to run; ``None`` if the folder does not say.
    """

    trials: tuple[EarlierTrial, ...]
    events: tuple[EarlierEvent, ...]
    shape: SearchShape | None = None

    def require_shape(self, shape: SearchShape) -> None:
        """Checks that the trials of a sweep that goes on with this one are to run as far.

        Raises:
            InvalidFieldError: they are not. Those that have ended could not run on.
        """
        if self.shape is not None and replace(self.shape, concurrency=None) != replace(shape, concurrency=None):
            reason = (
                f"the sweep of the folder is one of up to {self.shape.rungs[-1]} iterations, with its own rungs; call "
                "with the same algorithm, budget, eta and min_budget, and for 'sha' and 'hyperband' the same samples"
            )
            raise InvalidFieldError("resume", True, reason)


def read_sweep(run_dir: str | Path, name: str) -> EarlierSweep:
    """Reads a sweep.

    Raises:
        InvalidFieldError: the folder is not that of a session, or has no sweep of this name.
    """
    files = RunFiles(run_dir, "run_dir")
    found = load(run_dir)
    trials = {trial.trial_id: trial for trial in found.trials if trial.group == name}
    if not trials:
        there = sorted({trial.group for trial in found.trials})
        raise InvalidFieldError("name", name, f"is no sweep of {files.path}, which has {', '.join(there) or 'none'}")
    groups = SubmittedTrials(files.trials(), files.journal(), {}).groups()
    known = {trial_id: history for group in files.journal().groups.values() for trial_id, history in group.items()}
    extended_by: Counter[str] = Counter()
    for entry in files.entries():
        if entry.get("what") == BudgetExtended.__name__:
            extended_by[str(entry.get("trial_id"))] += entry.get("iterations", 0)
    return EarlierSweep(
        trials=tuple(
            EarlierTrial(
                trial_id=trial_id,
                config=trial.config,
                budget=max(known[trial_id].budget, trial.iteration) if trial_id in known else max(1, trial.iteration),
                ended=TrialState(trial.state) if trial.state in _OVER else getattr(known.get(trial_id), "ended", None),
                is_over=trial.state in _OVER,
                extended_by=extended_by[trial_id],
                failure=trial.failure,
            )
            for trial_id, trial in sorted(trials.items())
        ),
        events=tuple(_events(files, trials)),
        shape=next((one.search.shape for one in groups if one.name == name and one.search is not None), None),
    )


def _events(files: RunFiles, trials: Mapping[str, TrialResult]) -> Iterator[EarlierEvent]:
    """The events of the journal, and results that it does not have, as a session was killed before it wrote them there.

    Each of these comes where the next session has learnt of it: when that took up the group, or at the end.
    """
    reported = dict.fromkeys((str(entry.get("trial")), entry.get("iteration", 0)) for entry in files.results())
    results = {(one.trial_id, one.iteration): one for trial in trials.values() for one in trial.results}
    left = {key: results[key] for key in reported if key in results}
    ahead: dict[str, deque[int]] = {}  # The iterations in left, by trial.
    for trial_id, iteration in left:
        ahead.setdefault(trial_id, deque()).append(iteration)
    for entry in files.entries():
        what, trial_id = entry.get("what"), str(entry.get("trial_id"))
        if what == GroupRecovered.__name__:
            known = {one["trial"]["trial_id"]: one.get("reported", 0) for one in entry["trials"]}
            if not trials.keys().isdisjoint(known):
                yield from [left.pop(key) for key in list(left) if key[1] <= known.get(key[0], 0)]
                yield EarlierResumption()
        elif trial_id not in trials:
            continue
        elif what == IterationReported.__name__:
            # One entry tells of a run of iterations, by its last.
            while (waiting := ahead.get(trial_id)) and waiting[0] <= entry.get("iteration", 0):
                if (result := left.pop((trial_id, waiting.popleft()), None)) is not None:
                    yield result
        elif what == ReportEnd.__name__:
            state = TrialState(entry["state"])
            failure = trials[trial_id].failure if state is TrialState.FAILED else None
            yield EarlierEnd(trial_id=trial_id, state=state, failure=failure)
    yield from left.values()


def require_same(made: Trial | None, past: EarlierTrial) -> None:
    """Checks that a trial is the one that the earlier session made.

    Raises:
        InvalidFieldError: it is another one.
    """
    if made is None or made.id != past.trial_id or not is_same_config(made.config, past.config):
        raise other_arguments(past.trial_id)


def is_same_config(config: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether a config is the one that is stored as JSON; ``True`` where JSON cannot hold it."""
    try:
        return bool(json.loads(json.dumps(config)) == json.loads(json.dumps(stored)))
    except (TypeError, ValueError):
        return True


def other_arguments(trial_id: str) -> InvalidFieldError:
    """Makes the error about a trial that the sampler or the scheduler would not have started, or not have extended."""
    return InvalidFieldError("resume", True, f"trial {trial_id!r} of the folder does not follow from these arguments")
