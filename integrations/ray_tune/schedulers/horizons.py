"""Horizons of Tune's own schedulers, read from their private state.

A scheduler is recognized by its deciding method, ``on_trial_result``: a user's subclass with a method of its own counts
as unknown. Nothing is changed, and nothing is read that changes when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ray.tune import stopper as stoppers
from ray.tune.result import TRAINING_ITERATION
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    async_hyperband,
    hyperband,
)

from fluid.integrations.ray_tune.schedulers.successive_halving import SuccessiveHalvingScheduler

# -- horizon -------------------------------------------------------------------------------------
#
# Horizons: how far one party of a sweep lets a trial run before it may decide about it.


@dataclass(frozen=True)
class Horizon:
    """What one party that decides over a trial says about its next decision.

    Attributes:
        at: the iteration whose result it decides about; ``None`` if it never does.
        stops: whether it is sure to stop the trial at ``at``.
        save: whether Tune asks for a checkpoint at ``at``.
        likely_save: whether Tune may ask for one at ``at``.
        last: last iteration to which it promotes this trial or trials that wait for it; 0 if that is unknown.
    """

    at: int | None
    _: KW_ONLY
    stops: bool = False
    save: bool = False
    likely_save: bool = False
    last: float = 0


def first_at_least(bound: float, iteration: int) -> int | None:
    """Returns the first iteration after ``iteration`` that is at least ``bound``; ``None`` if there is none."""
    if math.isinf(bound) and bound > 0:
        return None
    # A NaN bound, which parties compare in either direction, gives the next iteration.
    return math.ceil(bound) if bound > iteration + 1 else iteration + 1


def earliest(horizons: Iterable[Horizon]) -> int | None:
    """Returns the earliest iteration at which one of the parties decides; ``None`` if none does."""
    return min((horizon.at for horizon in horizons if horizon.at is not None), default=None)


# -- scheduler horizons --------------------------------------------------------------------------


@dataclass(frozen=True)
class SchedulerReader:
    """How a known scheduler is read.

    Attributes:
        horizon: of the controller, the scheduler, the trial and its iteration.
        lock_step: of the scheduler: whether it decides for a whole group at the same iteration, or never.
        timed: whether the scheduler has a time attribute, and can be read only if that is iterations.
        is_last: of the scheduler, the trial and its iteration: whether it lets no trial run beyond that.
    """

    horizon: Callable[[Any, Any, Any, int], Horizon]
    _: KW_ONLY
    lock_step: Callable[[Any], bool]
    timed: bool = True
    is_last: Callable[[Any, Any, int], bool] = lambda *_: False


def reader_of(scheduler: Any) -> SchedulerReader | None:
    """Returns how to read a scheduler; ``None`` if it is unknown, or does not count iterations."""
    reader = _READERS.get(deciding_method(scheduler))
    return reader if reader is None or not reader.timed or scheduler._time_attr == TRAINING_ITERATION else None


def deciding_method(scheduler: Any) -> Any:
    """The method by which a scheduler is recognized."""
    # Through the object and not its class: the method may have been replaced on the object alone.
    return getattr(scheduler.on_trial_result, "__func__", None)


def _fifo(controller: Any, scheduler: Any, trial: Any, iteration: int) -> Horizon:
    return Horizon(None)


def _asha(controller: Any, scheduler: Any, trial: Any, iteration: int) -> Horizon:
    bracket = scheduler._trial_info.get(trial.trial_id)
    if type(bracket) is not async_hyperband._Bracket:
        return Horizon(iteration + 1)
    passed = [milestone for milestone, recorded in bracket._rungs if trial.trial_id in recorded]
    horizons = []
    for milestone, recorded in bracket._rungs:
        at = first_at_least(milestone, iteration)
        if trial.trial_id in recorded or at is None:
            continue
        # Each result enters the highest rung that it reaches and that the trial is not in yet, so several rungs
        # within one iteration take several results. If trials continue after the last rung, the search ends instead
        # at the highest rung that the trial is in.
        if bracket._stop_last_trials or not any(milestone < other <= at for other in passed):
            horizons.append(Horizon(at))
    if scheduler._stop_last_trials:
        horizons.append(Horizon(first_at_least(scheduler._max_t, iteration), stops=True))
    at = earliest(horizons)
    return Horizon(at, stops=any(horizon.stops for horizon in horizons if horizon.at == at))


def _asha_is_last(scheduler: Any, trial: Any, iteration: int) -> bool:
    return bool(scheduler._stop_last_trials and iteration >= scheduler._max_t)


def _hyperband(controller: Any, scheduler: Any, trial: Any, iteration: int) -> Horizon:
    bracket, _ = scheduler._trial_info.get(trial, (None, None))
    if type(bracket) is not hyperband._Bracket or trial not in bracket._live_trials:
        return Horizon(iteration + 1)
    if bracket._halves == 0 and not bracket.stop_last_trials:
        return Horizon(None)
    # The rung moves up only when all trials have reached it, so not before this one has, even if the bracket is
    # nearly empty or trials are added to it.
    at = first_at_least(bracket._cumul_r, iteration)
    behind = any(
        result is None or result[TRAINING_ITERATION] < bracket._cumul_r
        for other, result in bracket._live_trials.items()
        if other is not trial
    )
    # A trial that arrives before others is paused, which saves it. Under HyperBandForBOHB so is every trial of a
    # bracket that is not full; under HyperBand others may join such a bracket before the trial gets there.
    filled = bracket.filled()
    waits = behind or (not filled and deciding_method(scheduler) is HyperBandForBOHB.on_trial_result)
    final = not waits and filled
    last = bracket._max_t_attr if bracket._halves else 0
    return Horizon(at, stops=final and bracket._halves == 0, save=waits, likely_save=not final, last=last)


def _hyperband_is_last(scheduler: Any, trial: Any, iteration: int) -> bool:
    # A trial that was cut is below the last rung, to which its bracket has moved on.
    bracket, _ = scheduler._trial_info.get(trial, (None, None))
    return type(bracket) is hyperband._Bracket and bracket._halves == 0 and iteration >= bracket._cumul_r


def _population(controller: Any, scheduler: Any, trial: Any, iteration: int) -> Horizon:
    state = scheduler._trial_state.get(trial)
    if state is None:
        return Horizon(iteration + 1)
    due = state.last_perturbation_time + scheduler._perturbation_interval
    at = first_at_least(max(due, scheduler._burn_in_period), iteration)
    # A trial of the upper quantile is saved, and so is one that is paused for others; one that is replaced by another's
    # checkpoint is not. A synchronous population also saves a trial that has to wait for others.
    waits = scheduler._synch and any(
        other is not trial
        and other in scheduler._trial_state
        and scheduler._trial_state[other].last_train_time < scheduler._next_perturbation_sync
        for other in controller.get_live_trials()
    )
    return Horizon(at, save=waits, likely_save=True, last=math.inf)


def _replay(controller: Any, scheduler: Any, trial: Any, iteration: int) -> Horizon:
    if not scheduler._next_policy:
        return Horizon(None)
    return Horizon(first_at_least(scheduler._next_policy[0], iteration), save=True)


def _median(controller: Any, scheduler: Any, trial: Any, iteration: int) -> Horizon:
    if trial in scheduler._stopped_trials:
        return Horizon(None)  # It was paused instead of stopped, and may now finish.
    return Horizon(first_at_least(scheduler._grace_period, iteration))


def _successive_halving(controller: Any, scheduler: Any, trial: Any, iteration: int) -> Horizon:
    rung = scheduler.next_rung(trial)
    if rung is None:
        return Horizon(iteration + 1)
    at, stops = rung
    return Horizon(first_at_least(at, iteration), stops=stops, save=not stops, last=scheduler.last_rung(trial))


def _successive_halving_is_last(scheduler: Any, trial: Any, iteration: int) -> bool:
    return bool(scheduler.is_over(trial, iteration))


#: How each known scheduler is read, by its deciding method.
_READERS: dict[Any, SchedulerReader] = {
    FIFOScheduler.on_trial_result: SchedulerReader(_fifo, lock_step=lambda _: True, timed=False),
    AsyncHyperBandScheduler.on_trial_result: SchedulerReader(_asha, lock_step=lambda _: False, is_last=_asha_is_last),
    HyperBandScheduler.on_trial_result: SchedulerReader(
        _hyperband, lock_step=lambda _: True, is_last=_hyperband_is_last
    ),
    HyperBandForBOHB.on_trial_result: SchedulerReader(_hyperband, lock_step=lambda _: True, is_last=_hyperband_is_last),
    PopulationBasedTraining.on_trial_result: SchedulerReader(_population, lock_step=lambda pbt: bool(pbt._synch)),
    PopulationBasedTrainingReplay.on_trial_result: SchedulerReader(_replay, lock_step=lambda _: False, timed=False),
    MedianStoppingRule.on_trial_result: SchedulerReader(_median, lock_step=lambda _: False),
    SuccessiveHalvingScheduler.on_trial_result: SchedulerReader(
        _successive_halving, lock_step=lambda _: True, is_last=_successive_halving_is_last
    ),
}


# -- stop horizons -------------------------------------------------------------------------------
#
# Horizons of what Tune asks before the scheduler: the ``stop`` dictionary and the stopper of a sweep.


def stop_horizons(stopper: Any, trial: Any, iteration: int) -> list[Horizon]:
    """Returns the horizons of the trial's stop criteria and of the sweep's stopper."""
    return [*_criteria(trial, iteration), _stopper(stopper, trial, iteration)]


def lets_no_trial_run_longer(stopper: Any, trial: Any) -> bool:
    """Whether a trial has run as long as its stopper lets any trial run."""
    if _decides_like(stopper, stoppers.MaximumIterationStopper):
        return bool(stopper._iter.get(trial.trial_id, 0) >= stopper._max_iter)
    return _decides_like(stopper, stoppers.CombinedStopper) and any(
        lets_no_trial_run_longer(member, trial) for member in stopper._stoppers
    )


def _criteria(trial: Any, iteration: int) -> Iterator[Horizon]:
    """The user's ``stop`` dictionary: a trial stops as soon as one of its values is reached."""
    for name, bound in trial.stopping_criterion.items():
        if name == TRAINING_ITERATION:
            yield Horizon(first_at_least(bound, iteration), stops=True)
        else:  # A time or a metric may reach its bound with the next result.
            yield Horizon(iteration + 1)


def _stopper(stopper: Any, trial: Any, iteration: int) -> Horizon:
    if _decides_like(stopper, stoppers.NoopStopper):
        return Horizon(None)
    if _decides_like(stopper, stoppers.TimeoutStopper):
        return Horizon(None)  # Ends the whole experiment at some time, whatever the results.
    if _decides_like(stopper, stoppers.MaximumIterationStopper):
        # It counts results, not iterations. Reading its table with [] would add entries.
        left = stopper._max_iter - stopper._iter.get(trial.trial_id, 0)
        return Horizon(first_at_least(iteration + left, iteration), stops=True)
    if _decides_like(stopper, stoppers.CombinedStopper):
        members = [_stopper(member, trial, iteration) for member in stopper._stoppers]
        at = earliest(members)
        return Horizon(at, stops=any(member.stops for member in members if member.at == at))
    return Horizon(iteration + 1)


def _decides_like(stopper: Any, known: Any) -> bool:
    mine = type(stopper)
    return isinstance(stopper, known) and mine.__call__ is known.__call__ and mine.stop_all is known.stop_all
