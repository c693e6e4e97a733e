"""Tables of trials, as pandas DataFrames. Importing pandas takes most of a second, so that functions do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fluid._imports import try_import
from fluid.errors import require_one_of
from fluid.results.best import best_result
from fluid.results.iterations import flat
from fluid.results.metrics import Goal
from fluid.results.records import Result, TrialResult

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame


def dataframe(
    trials: Iterable[TrialResult], every: str, goal: Goal | None = None, price: float | None = None
) -> DataFrame:
    """Makes the table: see :meth:`fluid.SweepResult.dataframe`.

    Args:
        trials: the trials.
        every: ``"trial"`` or ``"iteration"``.
        goal: what the trials' best values are of; ``None`` for none.
        price: US dollars for a device-hour; ``None`` if unknown: there is no ``cost_usd`` then.
    """
    require_one_of("every", every, ("trial", "iteration"))
    with try_import("pandas", extra="pandas") as imports:
        import pandas
    imports.check()
    listed = list(trials)
    rows = list(_trial_rows(listed, goal) if every == "trial" else _iteration_rows(listed))
    names = list(dict.fromkeys(name for row in rows for name in row))
    for row in rows if price is not None else ():
        row["cost_usd"] = price * row["device_seconds"] / 3600.0
    own = ["trial", "group", "state", "iteration", "seconds", "device_seconds", *(["cost_usd"] * (price is not None))]
    last = ["checkpoint", "error"] if every == "trial" else []
    best = [f"best/{goal.metric}", "best/iteration"] if every == "trial" and goal is not None else []
    if len({trial.group for trial in listed}) <= 1:
        own.remove("group")
    config = [name for name in names if name.startswith("config/")]
    metrics = [name for name in names if name.startswith("metrics/")]
    return pandas.DataFrame(rows, columns=[*own, *config, *metrics, *best, *last])


def _trial_rows(trials: Iterable[TrialResult], goal: Goal | None) -> Iterator[dict[str, Any]]:
    for trial in trials:
        checkpoint = trial.checkpoint
        yield {
            **_own(trial, trial.iteration, trial),
            **_prefixed("config", trial.config),
            **_prefixed("metrics", trial.metrics),
            **_best(trial, goal),
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "error": None if trial.failure is None else trial.failure.message,
        }


def _best(trial: TrialResult, goal: Goal | None) -> dict[str, Any]:
    best = None if goal is None else best_result(trial, goal)
    if best is None or goal is None:
        return {}
    return {f"best/{goal.metric}": best[0], "best/iteration": best[1].iteration}


def _iteration_rows(trials: Iterable[TrialResult]) -> Iterator[dict[str, Any]]:
    for trial in trials:
        config = _prefixed("config", trial.config)
        for result in trial.results:
            metrics = _prefixed("metrics", result.metrics)
            yield {**_own(trial, result.iteration, result), **config, **metrics}


def _own(trial: TrialResult, iteration: int, took: TrialResult | Result) -> dict[str, Any]:
    return {
        "trial": trial.trial_id,
        "group": trial.group,
        "state": trial.state,
        "iteration": iteration,
        "seconds": took.seconds,
        "device_seconds": took.device_seconds,
    }


def _prefixed(prefix: str, content: object) -> dict[str, Any]:
    return {f"{prefix}/{name}": value for name, value in flat(content).items()}
