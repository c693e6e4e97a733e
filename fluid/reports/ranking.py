"""The order of a run's trials by a metric, and the best of them.

The best value is that of any iteration of a trial, not only of its last one. A failed trial is best only if all trials
with a value failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluid.errors import InvalidFieldError, require_one_of
from fluid.reports.run import RecordedRun, TrialRun
from fluid.results.iterations import FinishedIteration
from fluid.results.metrics import Goal, is_bookkeeping, is_number
from fluid.trialgroup import TrialState


@dataclass(frozen=True)
class RankedTrial:
    """The best trial of a run.

    Attributes:
        row: the trial's place in :attr:`RecordedRun.trials <fluid.reports.run.RecordedRun.trials>`.
        trial: the trial.
        iteration: the first one with its best value.
        value: that value.
    """

    row: int
    trial: TrialRun
    iteration: FinishedIteration
    value: float


def goal_of(run: RecordedRun, metric: str | None = None, mode: str | None = None) -> Goal | None:
    """What a run is judged by: the given metric, else the first one of the run that is not bookkeeping.

    Args:
        run: the run.
        metric: the name of a metric; ``None`` for the one that the run's search optimises, else the first reported.
            Without any, the result is ``None``.
        mode: ``"min"`` or ``"max"``; ``None`` for the search's, else by the metric's name.

    Raises:
        InvalidFieldError: no trial reported a number under that name, or the mode is neither.
    """
    if mode is not None:
        require_one_of("mode", mode, ("min", "max"))
    if metric is None:
        goals = {goal.metric for goal in run.goals}
        metric = next((name for name in run.metrics if name in goals or not is_bookkeeping(name)), None)
        if metric is None:
            return None
    elif metric not in run.metrics:
        known = ", ".join(run.metrics) or "none"
        raise InvalidFieldError("metric", metric, f"is not a metric of {run.path}; its numeric metrics: {known}")
    return Goal(metric, run.less_is_better(metric) if mode is None else mode == "min")


def value_of(trial: TrialRun, goal: Goal) -> float | None:
    """The best value of a trial; ``None`` if it never reported a number."""
    return trial.best(goal.metric, less=goal.less)


def ranked(trials: Sequence[TrialRun], goal: Goal | None) -> list[int]:
    """The rows of trials, best first; those without a value after them, failed ones last; equal ones in their order."""

    def rank(row: int) -> tuple[bool, bool, float]:
        value = None if goal is None else value_of(trials[row], goal)
        if goal is None or value is None:
            return trials[row].state == TrialState.FAILED, True, 0.0
        return trials[row].state == TrialState.FAILED, False, value if goal.less else -value

    return sorted(range(len(trials)), key=rank)


def best_of(run: RecordedRun, goal: Goal | None) -> RankedTrial | None:
    """The best trial of a run; ``None`` if none has a value."""
    if goal is None:
        return None
    for row in ranked(run.trials, goal):
        trial = run.trials[row]
        value = value_of(trial, goal)
        if value is not None:
            reported = (each for each in trial.finished if is_number(each.metrics.get(goal.metric)))
            return RankedTrial(row, trial, next(each for each in reported if each.metrics[goal.metric] == value), value)
    return None
