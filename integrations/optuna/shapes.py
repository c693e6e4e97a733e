"""The shapes of studies, for forecasts: how far their pruner lets trials run."""

from __future__ import annotations

from typing import Any

from fluid._imports import try_import
from fluid.search_shape import SearchShape

with try_import("Optuna", extra="optuna"):
    from optuna.pruners import NopPruner, SuccessiveHalvingPruner


def shape_of(pruner: Any, budget: int, under_way: int, *, is_asked: bool) -> SearchShape | None:
    """Returns the shape of a study; ``None`` if that is unknown, as of pruners that compare trials step by step.

    Args:
        pruner: the study's; ``None`` if none is asked.
        budget: iterations of a trial that is not pruned.
        under_way: most trials under way at once.
        is_asked: whether the pruner is asked after each iteration, rather than by the objective.
    """
    if not is_asked:
        return None
    if pruner is None or type(pruner) is NopPruner or budget == 1:
        return SearchShape(algorithm="full", rungs=(budget,), concurrency=under_way)
    if type(pruner) is not SuccessiveHalvingPruner:
        return None
    eta, rungs = int(pruner._reduction_factor), []
    # Without a number of its own, it takes a hundredth of the longest trial.
    least = pruner._min_resource or max(1, (budget - 1) // 100)
    step = least * eta**pruner._min_early_stopping_rate
    while step + 1 < budget:  # Steps count from 0.
        rungs.append(step + 1)
        step *= eta
    slack = -0.5 * (eta - 1) / eta  # The share is rounded down.
    return SearchShape(algorithm="stopping", rungs=(*rungs, budget), eta=eta, slack=slack, concurrency=under_way)
