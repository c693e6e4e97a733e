"""The order of a run's trials by a metric, and the best of them.

Which trial is better than another one is said by :class:`fluid.results.best.Merit`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fluid.directions import mode_word, require_mode
from fluid.errors import InvalidFieldError
from fluid.reports.run.run import RecordedRun, TrialRun
from fluid.results import best
from fluid.results.best import Merit
from fluid.results.iterations import StoredIteration
from fluid.results.metrics import Goal, is_bookkeeping


def goal_of(run: RecordedRun, metric: str | None = None, mode: str | None = None) -> Goal | None:
    """What a run is judged by: the given metric, else the first one of the run that is not bookkeeping.

    Args:
        run: the run.
        metric: the name of a metric; ``None`` for the one that the run's search optimises, else the first reported.
            Without any, the result is ``None``.
        mode: ``"min"`` or ``"max"``; ``None`` for the search's, else for what the metric's name says. If that leaves it
            open, the result is ``None`` unless the metric is given.

    Raises:
        InvalidFieldError: no trial reported a number under that name, the mode is neither, or the given metric has none
            and may mean either.
    """
    if mode is not None:
        mode = mode_word("mode", mode)
    if metric is None:
        metric = _first_metric(run)
        said = None if metric is None else mode or run.mode_of(metric)
        return None if metric is None or said is None else Goal(metric, said == "min")
    if metric not in run.metrics:
        known = ", ".join(run.metrics) or "none"
        raise InvalidFieldError("metric", metric, f"is not a metric of {run.path}; its numeric metrics: {known}")
    return Goal(metric, require_mode(metric, mode or run.mode_of(metric)) == "min")


def open_metric(run: RecordedRun) -> str | None:
    """The metric by which a run would be judged if its mode were known; ``None`` if that is known."""
    metric = _first_metric(run)
    return metric if metric is not None and run.mode_of(metric) is None else None


def _first_metric(run: RecordedRun) -> str | None:
    return next((name for name in run.metrics if name in run.searched or not is_bookkeeping(name)), None)


def value_of(trial: TrialRun, goal: Goal) -> float | None:
    """The best value of a trial; ``None`` if it never reported a number."""
    return trial.best(goal.metric, less=goal.less)


def merit_of(trial: TrialRun, goal: Goal | None) -> Merit:
    """How good a trial is; without a goal, only whether it has failed counts."""
    value = None if goal is None else value_of(trial, goal)
    return Merit.of(value, trial.state, less=goal is None or goal.less)


def has_failed(trial: TrialRun) -> bool:
    """Whether a trial has failed, or is infeasible."""
    return trial.state in best.NOT_BEST


def ranked(trials: Sequence[TrialRun], goal: Goal | None) -> list[int]:
    """The rows of trials, best first; those without a value after them, failed ones last; equal ones in their order."""
    return best.ranked(range(len(trials)), lambda row: merit_of(trials[row], goal))


def best_of(run: RecordedRun, goal: Goal | None) -> TrialRun | None:
    """The best trial of a run; ``None`` if no trial that may be the best has a value."""
    return None if goal is None else best.best_among(run.trials, lambda trial: merit_of(trial, goal))


def best_iteration(trial: TrialRun, goal: Goal) -> tuple[float, StoredIteration]:
    """The best value of a trial that has one, and the first iteration with it."""
    value = trial.best(goal.metric, less=goal.less)
    assert value is not None
    return value, next(each for each in trial.finished if goal.value_in(each.metrics) == value)
