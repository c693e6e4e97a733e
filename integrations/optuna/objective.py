"""A plain objective as a trainable: what a lane runs for one trial of a study.

A trial is one iteration, whose metrics say how the objective ended. How often an objective reports is not known before,
and it stays in the lane's main thread until it returns.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fluid._imports import try_import
from fluid.trainables.driver_link import driver_link

with try_import("Optuna", extra="optuna"):
    from optuna import TrialPruned

#: Metrics of a trial that returned: one value, or a list of them.
VALUE, VALUES = "value", "values"
#: Metric of a trial that was pruned: what its exception says.
PRUNED = "pruned"


def as_trainable(objective: Callable[[Any], Any], *, gc_after_trial: bool) -> Any:
    """Returns a generator function of a config, which runs the objective once.

    Args:
        objective: the user's.
        gc_after_trial: whether to collect garbage in the lane after it.
    """

    # Of the objective's module: Fluid looks there for what lanes need to have imported.
    @functools.wraps(objective, updated=())
    def run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from _run(objective, gc_after_trial, config)

    return run


def _run(objective: Callable[[Any], Any], gc_after_trial: bool, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from fluid.integrations.optuna.objective_trial import ObjectiveTrial

    trial = ObjectiveTrial(driver_link(), config["number"], config["storage_id"])
    try:
        metrics = _metrics_of(objective(trial))
    except TrialPruned as pruned:
        metrics = {PRUNED: str(pruned)}
    finally:
        if gc_after_trial:
            gc.collect()
    yield metrics


def _metrics_of(returned: Any) -> dict[str, Any]:
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return {VALUES: [_sendable(value) for value in returned]}
    return {VALUE: _sendable(returned)}


def _sendable(value: Any) -> Any:
    """Returns a value as Optuna would store it; of one that is no number, what its error message shows."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value if value is None or isinstance(value, str) else NotANumber(repr(value))


class NotANumber:
    """Stands for what an objective returned and Optuna refuses.

    Args:
        shown: how it is shown.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown
