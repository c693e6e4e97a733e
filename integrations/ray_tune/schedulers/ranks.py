"""How trials rank in Tune's schedulers: the rung that one has come to, and its score there; read from private state.

Nothing is changed, and nothing is read that changes when it is read. Brackets are told apart by their identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    PopulationBasedTraining,
)

from fluid.integrations.ray_tune.schedulers.horizons import deciding_method, reader_of
from fluid.integrations.ray_tune.schedulers.successive_halving import SuccessiveHalvingScheduler
from fluid.search_shape import Rung


class RungScore(NamedTuple):
    """A rung that a trial has come to, and its score there: less is better."""

    rung: Rung
    score: float


def rung_score_of(controller: Any, scheduler: Any, trial: Any) -> RungScore | None:
    """Returns where a trial ranks; ``None`` if its scheduler is unknown, or compares it with no other now."""
    if reader_of(scheduler) is None:
        return None
    read = _READERS.get(deciding_method(scheduler))
    return None if read is None else read(controller, scheduler, trial)


def _hyperband(controller: Any, scheduler: Any, trial: Any) -> RungScore | None:
    bracket, _ = scheduler._trial_info.get(trial, (None, None))
    result = None if bracket is None else bracket._live_trials.get(trial)
    if result is None or bracket._get_result_time(result) < bracket._cumul_r:
        return None  # The bracket has been halved since.
    may_come = not bracket.filled() and not controller.search_alg.is_finished()
    size = bracket._n if may_come else len(bracket._live_trials)
    places = math.ceil(bracket._n / bracket._eta) if bracket._halves > 0 else 0
    rung = Rung(int(bracket._cumul_r), size, places, bracket=id(bracket))
    return RungScore(rung, -scheduler._metric_op * float(result[scheduler._metric]))


def _halving(controller: Any, scheduler: SuccessiveHalvingScheduler, trial: Any) -> RungScore | None:
    bracket = scheduler._bracket_of.get(trial)
    if bracket is None or not bracket.has_reached(trial):
        return None
    rung = Rung(math.ceil(bracket.rung), len(bracket.live), bracket.places(scheduler._factor), bracket=id(bracket))
    return RungScore(rung, -bracket.scores[trial].score)


def _asha(controller: Any, scheduler: Any, trial: Any) -> RungScore | None:
    bracket = scheduler._trial_info.get(trial.trial_id)
    if bracket is None:
        return None
    # From the highest rung down.
    for milestone, recorded in bracket._rungs:
        if trial.trial_id in recorded:
            eta = max(2, round(scheduler._reduction_factor))
            rung = Rung(int(milestone), None, eta, promotes_at_once=True, bracket=id(bracket))
            return RungScore(rung, -float(recorded[trial.trial_id]))
    return None


def _population(controller: Any, scheduler: Any, trial: Any) -> RungScore | None:
    state = scheduler._trial_state.get(trial)
    if state is None or state.last_score is None:
        return None
    size = sum(not other.is_finished() for other in scheduler._trial_state)
    quantile = min(math.ceil(size * scheduler._quantile_fraction), size // 2)
    # Without synchronization each is compared with the latest score of the others, whenever they reported it.
    interval = int(state.last_train_time) if scheduler._synch else 0
    return RungScore(Rung(interval, size, size - quantile, parents=quantile), -float(state.last_score))


_READERS: dict[Any, Callable[[Any, Any, Any], RungScore | None]] = {
    HyperBandScheduler.on_trial_result: _hyperband,
    HyperBandForBOHB.on_trial_result: _hyperband,
    SuccessiveHalvingScheduler.on_trial_result: _halving,
    AsyncHyperBandScheduler.on_trial_result: _asha,
    PopulationBasedTraining.on_trial_result: _population,
}
