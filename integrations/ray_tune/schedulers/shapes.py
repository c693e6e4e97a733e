"""The shapes of Tune's schedulers, for forecasts: read from their private state, as their horizons are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    PopulationBasedTraining,
)

from fluid.integrations.ray_tune.schedulers.horizons import deciding_method, reader_of
from fluid.integrations.ray_tune.schedulers.successive_halving import SuccessiveHalvingScheduler
from fluid.search_shape import SearchShape


def shape_of(controller: Any, scheduler: Any, *, trials: int | None, under_way: int | None) -> SearchShape | None:
    """Returns the shape of a sweep; ``None`` if its scheduler is unknown, or does not count iterations.

    Args:
        controller: Tune's.
        scheduler: the user's.
        trials: number of trials that the sweep has left; ``None`` if unknown.
        under_way: most trials under way at once; ``None`` for no limit.
    """
    if reader_of(scheduler) is None:
        return None
    most = _most_iterations(controller)
    method = deciding_method(scheduler)
    if method is AsyncHyperBandScheduler.on_trial_result:
        return _asha(scheduler, most, under_way)
    if method in (HyperBandScheduler.on_trial_result, HyperBandForBOHB.on_trial_result):
        return _hyperband(scheduler, trials, under_way)
    if method is SuccessiveHalvingScheduler.on_trial_result:
        return _halving(scheduler, trials, under_way)
    if method is PopulationBasedTraining.on_trial_result and math.isfinite(most):
        return _population(scheduler, int(most), trials, under_way)
    if method is FIFOScheduler.on_trial_result and math.isfinite(most):
        return SearchShape(algorithm="full", rungs=(int(most),), concurrency=under_way)
    return None


def _most_iterations(controller: Any) -> float:
    """Iterations after which Tune stops each trial; infinite if it does not, or differs between trials."""
    limits = {trial.stopping_criterion.get("training_iteration", math.inf) for trial in controller.get_trials()}
    most = limits.pop() if len(limits) == 1 else math.inf
    return float(most) if isinstance(most, (int, float)) and most >= 1 else math.inf


def _whole(rungs: Iterable[float], most: float) -> tuple[int, ...]:
    """Rungs as iterations, ascending; the last one is the most that a trial runs."""
    whole = {max(1, math.ceil(rung)) for rung in rungs}
    if not math.isfinite(most):
        return tuple(sorted(whole))
    return (*sorted(rung for rung in whole if rung < most), int(most))


def _asha(scheduler: Any, most: float, under_way: int | None) -> SearchShape | None:
    limit = min(most, scheduler._max_t if scheduler._stop_last_trials else math.inf)
    brackets = scheduler._brackets
    eta = max(2, round(scheduler._reduction_factor))
    if len(brackets) != 1 or not math.isfinite(limit):
        return None
    rungs = _whole((milestone for milestone, _ in brackets[0]._rungs), limit)
    # A trial continues if it is no worse than a percentile of those before it, the first one in any case.
    return SearchShape(algorithm="stopping", rungs=rungs, eta=eta, slack=1.0 - 2.0 / eta, concurrency=under_way)


def _hyperband(scheduler: Any, trials: int | None, under_way: int | None) -> SearchShape | None:
    if not trials or not scheduler._stop_last_trials:
        return None
    most, eta = int(scheduler._max_t_attr), max(2, round(scheduler._eta))
    rounds = []
    for halvings in range(scheduler._s_max_1):
        if first := scheduler._get_r0(halvings):
            size, rung = scheduler._get_n0(halvings), int(first)
            sizes, rungs = [size], [rung]
            for _ in range(halvings):
                size, rung = math.ceil(size / scheduler._eta), int(min(rung * scheduler._eta, most))
                sizes.append(size)
                rungs.append(rung)
            rounds.append((sizes, rungs))
    rungs = max((rungs for _, rungs in rounds), key=len)
    if not rungs or any(later <= earlier for earlier, later in itertools.pairwise(rungs)):
        return None
    brackets, left = [], trials
    for sizes, _ in itertools.cycle(rounds):
        # The last bracket may stay short of trials: those that it has are halved as often.
        brackets.append(tuple(min(size, left) for size in sizes))
        left -= sizes[0]
        if left <= 0:
            break
    return SearchShape(
        algorithm="halving", rungs=tuple(rungs), eta=eta, brackets=tuple(brackets), concurrency=under_way
    )


def _halving(scheduler: Any, trials: int | None, under_way: int | None) -> SearchShape | None:
    if not trials:
        return None
    factor, left, number = scheduler._factor, trials, 0
    brackets: list[tuple[int, ...]] = []
    longest: tuple[int, ...] = ()
    while left > 0:
        rungs, size = scheduler.bracket_schedule(number)
        here = min(left, size or left)
        brackets.append(tuple(max(1, int(here / factor**step)) for step in range(len(rungs))))
        longest = max(longest, tuple(math.ceil(rung) for rung in rungs), key=len)
        left -= here
        number += 1
    if any(later <= earlier for earlier, later in itertools.pairwise(longest)):
        return None
    return SearchShape(
        algorithm="halving",
        rungs=longest,
        eta=max(2, round(factor)),
        brackets=tuple(brackets),
        concurrency=under_way,
        one_by_one=scheduler.brackets_at_once == 1,
    )


def _population(scheduler: Any, most: int, trials: int | None, under_way: int | None) -> SearchShape:
    interval = max(1, math.ceil(scheduler._perturbation_interval))
    if not scheduler._synch or not trials or interval >= most:
        return SearchShape(algorithm="full", rungs=(most,), concurrency=under_way)
    rungs = (*range(interval, most, interval), most)
    # At each interval all of them wait for each other, and all go on.
    return SearchShape(algorithm="halving", rungs=rungs, brackets=((trials,) * len(rungs),), concurrency=under_way)
