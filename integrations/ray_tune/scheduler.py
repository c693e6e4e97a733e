"""FluidScheduler: a scheduler of Ray Tune that makes Tune's controller run its trials on Fluid.

A scheduler is the one part of a sweep that the user passes and that is given the controller. This one delegates every
decision to the user's scheduler and, before the first trial is added, replaces the controller's actor manager. Nothing
in Ray is patched, but for the dates by which sweeps are told apart (``private_api.SweepDates``).
"""

from __future__ import annotations

import os
from typing import Any

from ray.tune.schedulers import (
    FIFOScheduler,
    HyperBandScheduler,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    TrialScheduler,
)

from fluid.errors import InvalidFieldError, require_integer
from fluid.executor import FluidExecutor, executor_in_force
from fluid.integrations.ray_tune import private_api
from fluid.integrations.ray_tune.controller.decisions import Budgets, Concurrency, all_known_at_once
from fluid.integrations.ray_tune.manager import FluidActorManager
from fluid.integrations.ray_tune.private_api import Trial
from fluid.integrations.ray_tune.resources.offer import ResourceRequests
from fluid.integrations.ray_tune.schedulers.successive_halving import SuccessiveHalvingScheduler
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING

#: Schedulers that decide about all trials at the same iteration, or never: all trials may be under way at once.
_IN_ROUNDS = (
    HyperBandScheduler,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    SuccessiveHalvingScheduler,
)
#: Most trials that wait for devices at a time. A longer search, such as an endless one, hands out as many as Tune's
#: limit allows, and further ones as those end.
_MOST_PENDING = 100_000
#: Trials under way per device, without a scheduler where trials must wait for Tune after each iteration: as many as may
#: share a device.
_WAITING_PER_DEVICE = DEFAULT_MAX_PACKING


class FluidScheduler(TrialScheduler):  # type: ignore[misc]
    """Runs the trials of a sweep on Fluid; all decisions stay with the scheduler it wraps.

    It can be given to ``tune.run`` or ``tune.TuneConfig`` wherever a scheduler can; :mod:`fluid.tune` does so for the
    user.

    Args:
        base: the scheduler that decides; ``None`` for Tune's default, first in, first out.
        executor: runs the trials; ``None`` for the one in force, or else one made for this sweep.
        concurrency: most trials under way at once; ``None`` for all known trials if the scheduler decides in rounds or
            never, and two per device if it decides as results come. Without a scheduler it is four per device if trials
            must wait for Tune after each iteration.

    Raises:
        InvalidFieldError: an argument cannot be used.

    Example:
        >>> from ray.tune.schedulers import ASHAScheduler
        >>> from fluid.integrations.ray_tune import FluidScheduler
        >>> scheduler = FluidScheduler(ASHAScheduler(metric="loss", mode="min"), concurrency=4)
        >>> scheduler.metric, type(scheduler.base).__name__
        ('loss', 'AsyncHyperBandScheduler')

        ``ray.tune.run(trainable, config=space, scheduler=scheduler)`` then runs the trials on Fluid.
    """

    def __init__(
        self,
        base: TrialScheduler | None = None,
        executor: FluidExecutor | None = None,
        *,
        concurrency: int | None = None,
    ) -> None:
        if isinstance(base, FluidScheduler):
            raise InvalidFieldError("base", base, "is a FluidScheduler already")
        if base is not None and not isinstance(base, TrialScheduler):
            raise InvalidFieldError("base", base, "must be a scheduler of Ray Tune")
        if executor is not None and not isinstance(executor, FluidExecutor):
            raise InvalidFieldError("executor", executor, "must be a FluidExecutor")
        if concurrency is not None:
            require_integer("concurrency", concurrency, at_least=1)
        private_api.SweepDates.put_in_place()
        self._base: TrialScheduler = FIFOScheduler() if base is None else base
        self._executor = executor
        self._owns_executor = False
        self._concurrency = concurrency
        #: ``"min"`` or ``"max"`` of the sweep's metric, where Tune was told.
        self._mode: str | None = None
        self._manager: FluidActorManager | None = None

    @property
    def base(self) -> TrialScheduler:
        """The scheduler that decides."""
        return self._base

    def use(self, executor: FluidExecutor) -> None:
        """Sets the executor before the sweep begins; a restored scheduler has none."""
        private_api.SweepDates.put_in_place()
        self._executor = executor

    def close(self) -> None:
        """Closes the executor if it was made for this sweep."""
        if self._owns_executor and self._executor is not None:
            self._executor.close()
            self._executor, self._owns_executor = None, False

    # -- the interface of a scheduler ----------------------------------------------------------------------

    @property
    def metric(self) -> Any:
        return self._base.metric

    @property
    def supports_buffered_results(self) -> bool:
        # Lanes run ahead up to the next decision; Tune's own buffering does not know where that is.
        return False

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        self._mode = mode
        return bool(self._base.set_search_properties(metric, mode, **spec))

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        if self._manager is None or self._manager is not private_api.controller_of(tune_controller)._actor_manager:
            self._take_over(private_api.controller_of(tune_controller), trial)
        assert self._manager is not None
        self._manager.register(trial)
        self._base.on_trial_add(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self._base.on_trial_error(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        return str(self._base.on_trial_result(tune_controller, trial, result))

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        self._base.on_trial_complete(tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self._base.on_trial_remove(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        return self._base.choose_trial_to_run(tune_controller)

    def debug_string(self) -> str:
        return f"Under Fluid: {self._base.debug_string()}"

    def save(self, checkpoint_path: str) -> None:
        self._base.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        self._base.restore(checkpoint_path)

    def __getattr__(self, name: str) -> Any:
        # Attributes that only some schedulers have, such as HyperBand's state; never the hooks of copy and pickle.
        if name.startswith("__") or "_base" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._base, name)

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles the scheduler into its files; an executor belongs to this process.
        return {**self.__dict__, "_executor": None, "_owns_executor": False, "_manager": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # -- taking over ---------------------------------------------------------------------------------------

    def _take_over(self, controller: Any, trial: Trial) -> None:
        """Takes a controller over that is about to add its first trial."""
        private_api.check(controller, self._base)
        if self._executor is None:
            self._executor = executor_in_force()
        if self._executor is None:
            self._executor, self._owns_executor = FluidExecutor(), True
        isolation = self._executor.isolating.of_sharing_sweep if controller._reuse_actors else None
        controller._reuse_actors = False  # Whether lanes are reused is for Fluid, and no trainable need be reset.
        known = all_known_at_once(controller) or isinstance(self._base, SuccessiveHalvingScheduler)
        is_set = os.environ.get("TUNE_MAX_PENDING_TRIALS_PG", "auto") != "auto"  # By the user, who is obeyed.
        if known and not is_set and controller.search_alg.total_samples <= _MOST_PENDING:
            controller.update_max_pending_trials(
                max(controller._max_pending_trials, controller.search_alg.total_samples)
            )
        self._manager = FluidActorManager(
            controller._actor_manager._resource_manager,
            controller,
            executor=self._executor,
            scheduler=self._base,
            concurrency=Concurrency(
                self._concurrency_on(self._executor, controller, trial), is_given=self._concurrency is not None
            ),
            mode=self._mode,
            isolation=isolation,
        )
        controller._actor_manager = self._manager

    def _concurrency_on(self, executor: FluidExecutor, controller: Any, trial: Trial) -> int | None:
        """Returns the most trials under way at once, if all request what the first one does."""
        if self._concurrency is not None:
            return self._concurrency
        if isinstance(self._base, _IN_ROUNDS) or (executor.in_rounds and all_known_at_once(controller)):
            return None
        devices, at_once = executor.max_devices, ResourceRequests(executor).trials_at_once(trial)
        if type(self._base) is FIFOScheduler:
            waits = Budgets(controller, self._base).awaits_each_result(trial)
            return max(_WAITING_PER_DEVICE * devices, at_once) if waits else None
        return at_once + min(at_once, devices)
