"""What a sweep is to do: the checked arguments of :func:`fluid.run`, and the trials as the loop knows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.random_state import Seeds
from fluid.resources import Requires
from fluid.results.iterations import known_start
from fluid.results.metrics import Goal
from fluid.results.records import Result, Shared, TrialFiles, TrialResult
from fluid.results.submitted import UNFINISHED
from fluid.results.sweep import SweepResult
from fluid.search import BOHB, PBT, Searcher, SearchOutcome
from fluid.search.schedulers import FullBudget, RungScheduler
from fluid.search.space import ConditionalSpace, Space
from fluid.search.stop_rules import StopRules
from fluid.search.suggestion import Suggestion
from fluid.search_shape import SearchShape
from fluid.session.listeners import TrialFailedError, TrialListener
from fluid.session.reuse import Reuse
from fluid.session.specs import terms_of
from fluid.trial_fields import StartFrom, start_from_of
from fluid.trialgroup import Search, TrialGroup, TrialState


@dataclass(frozen=True)
class GroupOptions:
    """What a sweep's group requires of devices, and its terms.

    Attributes:
        requires, owner: see :class:`fluid.TrialGroup`.
        priority, preempt, weight: see :meth:`fluid.FluidExecutor.submit_trialgroup`.
    """

    requires: Requires | None = None
    owner: str | None = None
    priority: float = 1.0
    preempt: bool = False
    weight: float = 1.0

    @classmethod
    def checked(cls, requires: Any, owner: Any, priority: Any, preempt: Any, weight: Any) -> GroupOptions:
        """What the user gave, checked.

        Raises:
            InvalidFieldError: one cannot be used.
        """
        terms = terms_of(TrialGroup(name="", requires=requires, owner=owner), priority, preempt, weight=weight)
        return cls(requires, terms.owner, terms.priority, terms.preempt, terms.weight)


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The checked arguments of a sweep.

    Attributes:
        trainable: what to train.
        name: of the group, and the first part of the trials' ids.
        algorithm: its name.
        options: of the algorithm; ``None``, the default, if it has none.
        searcher: suggests configs.
        learns: whether it learns from results, and may therefore be slow.
        constants: what is in each config besides.
        scheduler: decides which trials run how far.
        rules: end trials, or the sweep, early.
        goals: the metrics to optimize.
        samples: number of trials; ``None`` for no limit.
        budget: most iterations of a trial.
        under_way: most trials under way at once; ``None`` for no limit.
        time_budget_s: seconds after which the sweep ends; ``None`` for no limit.
        deadline_s: seconds within which it is to end, if that sizes an executor in force; ``None`` for no deadline.
        oom_is_worst: whether a trial that ran out of memory counts as the worst, rather than as failed.
        trial_options: further fields of each trial.
        callbacks: listeners of the trials.
        shape: of what the scheduler decides; ``None``, the default, if unknown.
        group: what its group requires of devices, and its terms.
        seed: adds to the seeds of the trials; ``None`` for other seeds every time.
        goes_on: whether a later call can go on with the sweep; not where a searcher has its own state.
        keeps_best: whether the checkpoint of the best trial outlives the session, unless the executor says what does.
        space: what the configs are drawn from; ``None`` where a searcher of the user's suggests them.
        points: configs that are tried first.
        starts: the states from which trials of points start, by the trial's number.
        reuse: finds states of earlier runs; ``None`` if all is to be computed.
        takes_other_code: whether a driver may run other code than the first one of a shared folder.
    """

    trainable: Any
    name: str
    algorithm: str
    searcher: Searcher
    learns: bool
    constants: Mapping[str, Any]
    scheduler: RungScheduler
    rules: StopRules
    goals: tuple[Goal, ...]
    samples: int | None
    budget: int
    under_way: int | None
    time_budget_s: float | None
    deadline_s: float | None = None
    oom_is_worst: bool
    trial_options: Mapping[str, Any]
    callbacks: tuple[TrialListener, ...]
    options: BOHB | PBT | None = None
    shape: SearchShape | None = None
    group: GroupOptions = GroupOptions()
    seed: int | None = 0
    goes_on: bool = True
    keeps_best: bool = True
    space: Space | ConditionalSpace | None = None
    points: Sequence[Mapping[str, Any]] = ()
    starts: Mapping[int, StartFrom] = field(default_factory=dict)
    reuse: Reuse | None = None
    takes_other_code: bool = False

    @property
    def extends(self) -> bool:
        """Whether a trial that has used up its budget may be extended.

        One that a searcher has named a lower budget for may be, too: it has iterations that may follow.
        """
        return not isinstance(self.scheduler, FullBudget)

    def search(self, under_way: int | None) -> Search:
        """What reports, forecasts and the live view say of the sweep.

        Args:
            under_way: most trials under way at once; ``None`` for no limit.
        """
        goal = self.goals[0]
        besides = tuple((other.metric, other.mode) for other in self.goals[1:])
        # A searcher may name budgets below the sweep's, and let trials continue.
        shape = None if self.shape is None or self.algorithm == "full" else replace(self.shape, concurrency=under_way)
        return Search(
            *(goal.metric, goal.mode, self.samples),
            extends=self.extends,
            besides=besides,
            shape=shape,
            time_budget_s=self.time_budget_s,
            keeps_best=self.keeps_best,
            seed=None if self.space is None else self.seed,  # A searcher has its own.
        )

    def score(self, value: float) -> float:
        """What trials are compared by: a value of the first metric, less is better, ``inf`` for NaN."""
        score = value if self.goals[0].less else -value
        return math.inf if math.isnan(score) else score


@dataclass(eq=False, slots=True, kw_only=True)
class SweepTrial:
    """A trial of a sweep, from its start until it is over.

    Attributes:
        number: its number, from 0.
        trial_id: its id in the session.
        suggestion: what it was started with, or last extended with.
        config: its hyperparameters.
        budget: iterations after which it waits for a decision.
        granted: iterations that the engine lets it run; less than ``budget`` only where a session goes on.
        iteration: iterations done.
        latest: of each metric, the last number that it has reported; ``None`` before; empty before its first result.
        is_open: whether it runs, or waits for a device.
        stop: the outcome with which a rule stops it; ``None`` if none does.
        state: how it ended; ``"UNFINISHED"`` until then, also where it waits for a decision.
        failure: why it failed; ``None`` if it has not.
        is_told: whether the searcher knows, or is about to know, what came of the suggestion.
        results: its iterations.
        start: the state of another trial from which it starts; ``None`` if it begins afresh.
        runs_whole: whether it runs to the sweep's budget, whatever others do, as it starts behind the first rung.
    """

    number: int
    trial_id: str
    suggestion: Suggestion
    config: Mapping[str, Any]
    budget: int
    granted: int
    iteration: int = 0
    latest: tuple[float | None, ...] = ()
    is_open: bool = True
    stop: str | None = None
    state: str = UNFINISHED
    failure: Failure | None = None
    is_told: bool = False
    results: list[Result] = field(default_factory=list)
    start: StartFrom | None = None
    runs_whole: bool = False

    @property
    def values(self) -> tuple[float, ...] | None:
        """The last value of each metric; ``None`` until it has reported all of them."""
        return cast("tuple[float, ...]", self.latest) if self.latest and None not in self.latest else None

    def is_limited_below(self, budget: int) -> bool:
        """Whether the searcher named a budget below another one, so that it may let the trial continue."""
        return self.suggestion.budget is not None and self.suggestion.budget < budget

    def outcome(
        self, state: str, values: tuple[float, ...] | None, *, with_metrics: bool
    ) -> Callable[[], SearchOutcome]:
        """Returns what makes what the searcher is told, of the trial as it is now.

        Args:
            state: how the trial ended, or ``"PAUSED"``.
            values: of the metrics; ``None`` if there are none.
            with_metrics: whether all that the trial reported last is told, too.
        """
        last = self.results[-1].copy() if with_metrics and self.results else None
        facts: dict[str, Any] = {
            "token": self.suggestion.token,
            "config": self.suggestion.config,
            "values": None if values is None or any(map(math.isnan, values)) else values,
            "state": state,
            "iteration": self.iteration,
            "budget": self.budget,
            "seconds": sum(result.seconds for result in self.results),
            "failure": None if self.failure is None else (self.failure.kind, self.failure.message),
        }
        return lambda: SearchOutcome(**facts, metrics={} if last is None else last.metrics)

    def result(self, group: str, run_dir: Path, seeds: Seeds | None) -> TrialResult:
        """Returns what the user gets of it.

        Args:
            group: name of its group.
            run_dir: the run folder.
            seeds: of its random number generators; ``None`` if unknown.
        """
        waits = self.state == UNFINISHED and not self.is_open
        return TrialResult(
            trial_id=self.trial_id,
            group=group,
            config=cast(Any, Shared(self.config)),  # The executor's handles show the same trial.
            state=TrialState.PAUSED.value if waits else self.state,
            iteration=self.iteration,
            metrics=self.results[-1].metrics if self.results else {},
            results=tuple(self.results),
            failure=self.failure,
            seeds=seeds,
            files=TrialFiles(run_dir, ((self.trial_id, 0),)),
            start=known_start(self.start, ((result.iteration, result.source) for result in self.results)),
        )


def require_own_budgets(plan: SweepPlan, budget: int) -> None:
    """Checks a budget that a searcher has suggested.

    Raises:
        InvalidFieldError: it is above the sweep's, or the algorithm decides how far trials run.
    """
    if plan.algorithm != "full":
        reason = "decides how far trials run, and so does the searcher: use algorithm='full'"
        raise InvalidFieldError("algorithm", plan.algorithm, reason)
    if not 1 <= budget <= plan.budget:
        raise InvalidFieldError("budget", plan.budget, f"does not fit the searcher, which asks for {budget} iterations")


def with_starts(points: Any) -> tuple[Any, dict[int, StartFrom]]:
    """Parts points that are trials of earlier sweeps into their configs, and the states from which they are to start.

    Raises:
        InvalidFieldError: one has no checkpoint.
    """
    if isinstance(points, Mapping | str) or not isinstance(points, Sequence):
        return points, {}  # Refused where the configs are drawn.
    configs, starts = list(points), dict[int, StartFrom]()
    for place, point in enumerate(points):
        if not isinstance(point, Mapping):
            try:
                start = start_from_of(point, None)
            except InvalidFieldError as error:
                raise InvalidFieldError(f"points[{place}]", error.value, error.reason) from error
            config = getattr(point, "config", None)
            if start is None or not isinstance(config, Mapping):
                reason = "must be a dict of hyperparameters, or a trial with a checkpoint, as result.best"
                raise InvalidFieldError(f"points[{place}]", point, reason)
            configs[place], starts[place] = config, start
    return configs, starts


def require_budgets_beyond(starts: Mapping[int, StartFrom], budget: int, ready: int | None = None) -> None:
    """Refuses points whose trials would have nothing to do, or that begin behind where a population is first ready.

    Args:
        starts: from where trials of points start, by number.
        budget: most iterations of a trial.
        ready: iterations after which members of a population are first ready; ``None`` if there is none.

    Raises:
        InvalidFieldError: there is one.
    """
    for place, start in starts.items():
        if start.at is not None and start.at >= (budget if ready is None else min(ready, budget)):
            why = f"budget={budget} counts those, too: give a larger budget"
            if start.at < budget:
                why = f"algorithm='pbt' looks at trials after {ready}: give PBT(ready=) more"
            raise InvalidFieldError(f"points[{place}]", start.parent, f"starts after {start.at} iterations, and {why}")


class SweepFailedError(FluidError):
    """All trials of a sweep have failed, or so that no other can succeed. Its cause is the failure of the first one.

    Example:
        >>> import fluid
        >>> def train(config):
        ...     yield {"loss": 1 / config["batch_size"]}
        >>> with fluid.FluidExecutor(backend="local", devices=1, max_failures=0, verbose=0):
        ...     try:
        ...         fluid.run(train, {"batch_size": 0}, metric="loss", samples=2)
        ...     except fluid.SweepFailedError as error:
        ...         print(str(error).splitlines()[0])
        all 2 trials failed; the first one: ZeroDivisionError: division by zero

    Attributes:
        result: the sweep's result.
    """

    def __init__(self, text: str, result: Any = None) -> None:
        super().__init__(text)
        self.result = result


def raise_if_all_failed(result: SweepResult, failed_before: Collection[str] = ()) -> None:
    """Raises :class:`SweepFailedError` if all trials of a sweep have failed.

    Args:
        result: of the sweep.
        failed_before: ids of trials that had failed in an earlier session, and were not tried again.
    """
    failures = result.failures
    if failures and len(failures) == len(result.trials):
        trial_id, failure = next(iter(failures.items()))
        before = said_of_earlier(failures, failed_before)
        text = f"all {len(failures)} trials failed; the first one: {failure.message}" + (before and f"; {before}")
        raise SweepFailedError(text, result) from TrialFailedError(trial_id, failure)


def said_of_earlier(failures: Mapping[str, Any], failed_before: Collection[str]) -> str:
    """What is said of failures of an earlier session; empty if there are none."""
    before = len(failures.keys() & set(failed_before))
    which = "these are failures" if before == len(failures) else f"{before} of these are failures"
    how = "resume=True, retry_failed=True tries failed trials again"
    return f"{which} of an earlier session: {how}" if before else ""


class UnreportedMetricError(InvalidFieldError):
    """No trial of a sweep has reported the metric that it compares them by.

    Attributes:
        result: the sweep's result.
    """

    def __init__(self, metric: str, reason: str, result: Any = None) -> None:
        super().__init__("metric", metric, reason)
        self.result = result

    def __reduce__(self) -> tuple[type[UnreportedMetricError], tuple[Any, ...]]:
        return type(self), (self.value, self.reason, self.result)


class WorstValues:
    """The worst value of each metric so far; NaN is replaced by any number.

    Args:
        goals: the metrics.
    """

    def __init__(self, goals: tuple[Goal, ...]) -> None:
        self._goals = goals
        #: The values; ``None`` before the first ones.
        self.values: tuple[float, ...] | None = None

    def add(self, values: tuple[float, ...]) -> None:
        """Takes the values of an iteration."""
        if self.values is None:
            self.values = values
            return
        triples = zip(self.values, values, self._goals, strict=True)
        self.values = tuple(new if old != old or goal.is_better(old, new) else old for old, new, goal in triples)
