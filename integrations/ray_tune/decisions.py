"""How far a Ray Tune trial may run ahead of Tune.

Between two decisions of Tune a trial only has to train: its lane goes on by itself and hands the results over later,
one by one. What Tune then decides must be what it would have decided without this, so a trial may never run past an
iteration at which Tune could do anything else than let it go on. :func:`next_decision` says which iteration that is.
It is never too late; where the future cannot be told it is the next iteration.

Most of what is needed is private to Tune's schedulers and stoppers. Only they are read whose deciding methods are
those of the class known here: a user's subclass that decides for itself is treated like any unknown scheduler. Nothing
is changed, and nothing is read that reading would change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from ray.tune.search import BasicVariantGenerator
from ray.tune.utils import flatten_dict

from fluid.errors import InvalidFieldError
from fluid.integrations.ray_tune.synchronous import SuccessiveHalvingScheduler


@dataclass(frozen=True)
class Saves:
    """The iterations after which Tune asks a trial for a checkpoint.

    Attributes:
        every: Tune saves at the multiples of this many iterations; 0 for none.
        also: single iterations at which it saves besides.
    """

    every: int = 0
    also: frozenset[int] = frozenset()

    def __contains__(self, iteration: int) -> bool:
        return iteration in self.also or (self.every > 0 and iteration % self.every == 0)

    def between(self, after: int, upto: int) -> list[int]:
        """The iterations to save at in ``after + 1 .. upto``, in ascending order."""
        return [iteration for iteration in range(after + 1, upto + 1) if iteration in self]


@dataclass(frozen=True)
class Decision:
    """The next time Tune may do anything else with a trial than let it go on.

    Attributes:
        at: the iteration, counted from the trial's first, whose result must be processed before the trial goes on;
            always after the iteration asked about. None if the trial runs until it says it is done.
        saves: where Tune asks for a checkpoint, up to ``at``. With schedulers that stop the whole group at a rung,
            ``at`` is in it although the last trial to get there may go on without one.
        likely_save: whether Tune may well ask for a checkpoint at ``at``, which is not in ``saves``.
        stops: whether Tune is sure to stop the trial at ``at``.
        lock_step: whether the scheduler decides for a whole group at the same iteration, or never. If so, all the
            group can be asked for at once; if not, the order in which results come in matters.
        follow_up_iterations: iterations that later rungs may add after ``at``, to this trial or to one that waits for
            it; 0 where that cannot be told.
    """

    at: int | None
    saves: Saves
    likely_save: bool = False
    stops: bool = False
    lock_step: bool = False
    follow_up_iterations: int = 0


@dataclass(frozen=True)
class _Horizon:
    """What one of the parties that decide over a trial says about it; the fields are those of Decision."""

    at: int | None
    stops: bool = False
    #: Whether a checkpoint is asked for at ``at``.
    save: bool = False
    likely_save: bool = False
    #: Iteration up to which it lets trials go on that wait for this one; 0 where that cannot be told.
    upto: float = 0


_Foresee = Callable[[Any, Any, Any, int], _Horizon]


@dataclass(frozen=True)
class _Reader:
    """How a known scheduler is read.

    Attributes:
        foresee: of the controller, the scheduler, the trial and its iteration.
        lock_step: of the scheduler.
        timed: whether the scheduler has a time attribute, and can be foreseen only if that is iterations.
        is_last: of the scheduler, the trial and its iteration: whether it lets no trial go on from there.
    """

    foresee: _Foresee
    lock_step: Callable[[Any], bool]
    timed: bool = True
    is_last: Callable[[Any, Any, int], bool] = lambda *_: False


def next_decision(controller: Any, scheduler: Any, trial: Any, iteration: int) -> Decision:
    """Says when Tune will next have to decide about ``trial``.

    The answer holds until a result of the trial at that iteration is processed, or the trial is stopped, or goes on
    from another checkpoint; results of other trials do not bring it forward.

    Args:
        controller: Tune's ``TuneController``.
        scheduler: the user's scheduler, without any wrapper of Fluid's around it.
        trial: Tune's ``Trial``; the scheduler must have been told about it.
        iteration: the iteration after which the trial goes on: that of its last processed result, 0 before the
            first. If the trial goes on from a checkpoint, be it an older one of its own or another trial's as with
            population based training, that of the checkpoint.

    Raises:
        InvalidFieldError: ``iteration`` is negative.
    """
    if iteration < 0:
        raise InvalidFieldError("iteration", iteration, "must be at least 0")
    reader = _readable(scheduler)
    # Tune asks the criteria and the stopper first; if one of them stops the trial, the scheduler is not asked.
    ends = [*_criteria(trial, iteration), _stopper(controller._stopper, trial, iteration)]
    verdict, lock_step = _Horizon(iteration + 1), False
    if reader is not None:
        verdict = reader.foresee(controller, scheduler, trial, iteration)
        lock_step = reader.lock_step(scheduler)
    at = _earliest([*ends, verdict])
    if at is None:
        return Decision(None, Saves(_frequency(trial)), lock_step=lock_step)

    ended = any(end.stops for end in ends if end.at == at)
    may_end = any(end.at == at for end in ends)
    asked = verdict.at == at and not ended
    stops = ended or (asked and verdict.stops)
    save = (stops and bool(trial.checkpoint_at_end)) or (asked and verdict.save and not may_end)
    likely = asked and not save and (verdict.save or verdict.likely_save)
    saves = Saves(_frequency(trial), frozenset([at] if save else []))
    upto = min([verdict.upto, *(end.at for end in ends if end.at is not None)])
    follow_up_iterations = max(0, math.ceil(upto) - at) if math.isfinite(upto) else 0
    return Decision(at, saves, likely and at not in saves, stops, lock_step, follow_up_iterations)


def had_run_its_course(controller: Any, scheduler: Any, trial: Any, iteration: int) -> bool:
    """Whether a trial that ended after an iteration had got as far as any could; else it was stopped early.

    Args:
        controller, scheduler, trial: as for :func:`next_decision`.
        iteration: that of its last processed result.
    """
    last = flatten_dict(trial.last_result or {})
    # Not Trial.should_stop: Tune marks the last result of every trial as done.
    if any(name in last and last[name] >= bound for name, bound in trial.stopping_criterion.items()):
        return True
    reader = _readable(scheduler)
    return _is_met(controller._stopper, trial) or (reader is not None and reader.is_last(scheduler, trial, iteration))


def all_known_at_once(controller: Any) -> bool:
    """Whether Tune can hand out the configurations of all trials before any result.

    So it is with grid and random search, unless the user limits how many trials there may be at a time. Then
    ``controller.update_max_pending_trials`` may be raised to see them all.
    """
    search = controller.search_alg
    if not isinstance(search, BasicVariantGenerator) or search.max_concurrent > 0:
        return False
    return bool(type(search).next_trial is BasicVariantGenerator.next_trial)


# --- What is asked before the scheduler


def _criteria(trial: Any, iteration: int) -> Iterable[_Horizon]:
    """The user's ``stop`` dictionary: a trial stops as soon as one of its values is reached."""
    for name, bound in trial.stopping_criterion.items():
        counted = name == TRAINING_ITERATION
        # A time or a metric may get there with the next result.
        yield _Horizon(_reached(bound, iteration) if counted else iteration + 1, stops=counted)


def _stopper(stopper: Any, trial: Any, iteration: int) -> _Horizon:
    if _decides_like(stopper, stoppers.NoopStopper):
        return _Horizon(None)
    if _decides_like(stopper, stoppers.TimeoutStopper):
        return _Horizon(None)  # Ends everything at some time, whatever the results.
    if _decides_like(stopper, stoppers.MaximumIterationStopper):
        # Counts results, not iterations. Its table makes entries when read with [].
        left = stopper._max_iter - stopper._iter.get(trial.trial_id, 0)
        return _Horizon(_reached(iteration + left, iteration), stops=True)
    if _decides_like(stopper, stoppers.CombinedStopper):
        members = [_stopper(member, trial, iteration) for member in stopper._stoppers]
        at = _earliest(members)
        return _Horizon(at, stops=any(member.stops for member in members if member.at == at))
    return _Horizon(iteration + 1)


def _is_met(stopper: Any, trial: Any) -> bool:
    """Whether a stopper had the trial run as long as it lets any."""
    if _decides_like(stopper, stoppers.MaximumIterationStopper):
        return bool(stopper._iter.get(trial.trial_id, 0) >= stopper._max_iter)
    return _decides_like(stopper, stoppers.CombinedStopper) and any(
        _is_met(member, trial) for member in stopper._stoppers
    )


def _decides_like(stopper: Any, known: Any) -> bool:
    mine = type(stopper)
    return isinstance(stopper, known) and mine.__call__ is known.__call__ and mine.stop_all is known.stop_all


# --- The schedulers


def _asha(controller: Any, scheduler: Any, trial: Any, iteration: int) -> _Horizon:
    bracket = scheduler._trial_info.get(trial.trial_id)
    if type(bracket) is not async_hyperband._Bracket:
        return _Horizon(iteration + 1)
    passed = [milestone for milestone, recorded in bracket._rungs if trial.trial_id in recorded]
    horizons = []
    for milestone, recorded in bracket._rungs:
        at = _reached(milestone, iteration)
        if trial.trial_id in recorded or at is None:
            continue
        # Each result enters the highest rung that it reaches and that the trial is not in yet, so several rungs
        # within one iteration take several results. If trials go on after the last rung, the search ends instead at
        # the highest rung that the trial is in.
        if bracket._stop_last_trials or not any(milestone < other <= at for other in passed):
            horizons.append(_Horizon(at))
    if scheduler._stop_last_trials:
        horizons.append(_Horizon(_reached(scheduler._max_t, iteration), stops=True))
    at = _earliest(horizons)
    return _Horizon(at, stops=any(horizon.stops for horizon in horizons if horizon.at == at))


def _hyperband(controller: Any, scheduler: Any, trial: Any, iteration: int) -> _Horizon:
    bracket, _ = scheduler._trial_info.get(trial, (None, None))
    if type(bracket) is not hyperband._Bracket or trial not in bracket._live_trials:
        return _Horizon(iteration + 1)
    if bracket._halves == 0 and not bracket.stop_last_trials:
        return _Horizon(None)
    # The rung moves up only when all have reached it, so not before this trial has: however empty the bracket is,
    # and whoever is added to it.
    at = _reached(bracket._cumul_r, iteration)
    behind = any(
        result is None or result[TRAINING_ITERATION] < bracket._cumul_r
        for other, result in bracket._live_trials.items()
        if other is not trial
    )
    # A trial that does not find all others there is paused, which saves it. So is every trial of a bracket that is
    # not full under HyperBandForBOHB; under HyperBand it is one that others may join before it gets there.
    filled = bracket.filled()
    waits = behind or (not filled and _deciding_method(scheduler) is HyperBandForBOHB.on_trial_result)
    last = not waits and filled
    upto = bracket._max_t_attr if bracket._halves else 0
    return _Horizon(at, stops=last and bracket._halves == 0, save=waits, likely_save=not last, upto=upto)


def _asha_is_last(scheduler: Any, trial: Any, iteration: int) -> bool:
    return bool(scheduler._stop_last_trials and iteration >= scheduler._max_t)


def _hyperband_is_last(scheduler: Any, trial: Any, iteration: int) -> bool:
    # One that was cut is below the last rung, which its bracket has moved on to.
    bracket, _ = scheduler._trial_info.get(trial, (None, None))
    return type(bracket) is hyperband._Bracket and bracket._halves == 0 and iteration >= bracket._cumul_r


def _population(controller: Any, scheduler: Any, trial: Any, iteration: int) -> _Horizon:
    state = scheduler._trial_state.get(trial)
    if state is None:
        return _Horizon(iteration + 1)
    due = state.last_perturbation_time + scheduler._perturbation_interval
    at = _reached(max(due, scheduler._burn_in_period), iteration)
    # A trial of the upper quantile is saved, and one that makes room for others; one that takes another's place is
    # not. In lock step a trial is also saved if it has to wait for others.
    waits = scheduler._synch and any(
        other is not trial
        and other in scheduler._trial_state
        and scheduler._trial_state[other].last_train_time < scheduler._next_perturbation_sync
        for other in controller.get_live_trials()
    )
    return _Horizon(at, save=waits, likely_save=True, upto=math.inf)


def _replay(controller: Any, scheduler: Any, trial: Any, iteration: int) -> _Horizon:
    if not scheduler._next_policy:
        return _Horizon(None)
    return _Horizon(_reached(scheduler._next_policy[0], iteration), save=True)


def _median(controller: Any, scheduler: Any, trial: Any, iteration: int) -> _Horizon:
    if trial in scheduler._stopped_trials:
        return _Horizon(None)  # Was paused rather than stopped, and may now finish.
    return _Horizon(_reached(scheduler._grace_period, iteration))


def _synchronous(controller: Any, scheduler: Any, trial: Any, iteration: int) -> _Horizon:
    rung = scheduler.next_rung(trial)
    if rung is None:
        return _Horizon(iteration + 1)
    at, stops = rung
    return _Horizon(_reached(at, iteration), stops=stops, save=not stops, upto=scheduler.last_rung(trial))


def _synchronous_is_last(scheduler: Any, trial: Any, iteration: int) -> bool:
    return bool(scheduler.is_over(trial, iteration))


#: How each known scheduler is read, by its deciding method.
_READERS: dict[Any, _Reader] = {
    FIFOScheduler.on_trial_result: _Reader(lambda *_: _Horizon(None), lambda _: True, timed=False),
    AsyncHyperBandScheduler.on_trial_result: _Reader(_asha, lambda _: False, is_last=_asha_is_last),
    HyperBandScheduler.on_trial_result: _Reader(_hyperband, lambda _: True, is_last=_hyperband_is_last),
    HyperBandForBOHB.on_trial_result: _Reader(_hyperband, lambda _: True, is_last=_hyperband_is_last),
    PopulationBasedTraining.on_trial_result: _Reader(_population, lambda pbt: bool(pbt._synch)),
    PopulationBasedTrainingReplay.on_trial_result: _Reader(_replay, lambda _: False, timed=False),
    MedianStoppingRule.on_trial_result: _Reader(_median, lambda _: False),
    SuccessiveHalvingScheduler.on_trial_result: _Reader(_synchronous, lambda _: True, is_last=_synchronous_is_last),
}


def _readable(scheduler: Any) -> _Reader | None:
    """How to read a scheduler; ``None`` if it is not known, or does not go by iterations."""
    reader = _READERS.get(_deciding_method(scheduler))
    return reader if reader is None or not reader.timed or scheduler._time_attr == TRAINING_ITERATION else None


def _deciding_method(scheduler: Any) -> Any:
    # Through the object and not its class: the method may have been replaced on the object alone.
    return getattr(scheduler.on_trial_result, "__func__", None)


# --- Small things


def _reached(bound: float, iteration: int) -> int | None:
    """The first iteration after ``iteration`` that is at least ``bound``; None if there is none."""
    if math.isinf(bound) and bound > 0:
        return None
    # Written so that a NaN, which some compare one way and some the other, is the next iteration.
    return math.ceil(bound) if bound > iteration + 1 else iteration + 1


def _earliest(horizons: Iterable[_Horizon]) -> int | None:
    return min((horizon.at for horizon in horizons if horizon.at is not None), default=None)


def _frequency(trial: Any) -> int:
    return int(trial.checkpoint_freq or 0)
