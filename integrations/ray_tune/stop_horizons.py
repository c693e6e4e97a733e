"""Horizons of what Tune asks before the scheduler: the ``stop`` dictionary and the stopper of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ray.tune import stopper as stoppers
from ray.tune.result import TRAINING_ITERATION

from fluid.integrations.ray_tune.horizon import Horizon, earliest, first_at_least


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
