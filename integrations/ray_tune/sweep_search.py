"""What reports, forecasts, the live view and the stores of checkpoints are told of a sweep of Tune."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fluid.integrations.ray_tune.private_api import search_of, seconds_left_of
from fluid.integrations.ray_tune.scheduler_ranks import rung_score_of
from fluid.integrations.ray_tune.scheduler_shapes import shape_of
from fluid.integrations.ray_tune.tune_trial import TuneTrial
from fluid.trialgroup import Search


def sweep_search(controller: Any, scheduler: Any, mode: str | None, under_way: int | None) -> Search:
    """Returns what a sweep optimizes, and its shape.

    Args:
        controller: Tune's.
        scheduler: the user's.
        mode: the mode that Tune passed to the scheduler; ``None`` if the scheduler was made with one, or has none.
        under_way: most trials under way at once; ``None`` for no limit.
    """
    search = search_of(controller, scheduler, mode)
    shape = shape_of(controller, scheduler, trials=search.trials, under_way=under_way)
    return replace(search, shape=shape, time_budget_s=seconds_left_of(controller))


def tell_rank(controller: Any, scheduler: Any, tune_trial: TuneTrial) -> None:
    """Tells the engine how a trial ranks at the rung that it has come to, if its scheduler compares it with others."""
    found = rung_score_of(controller, scheduler, tune_trial.trial)
    if found is not None and found != tune_trial.ranked:
        tune_trial.ranked = found
        tune_trial.handle.rank(tune_trial.trial_id, *found)
