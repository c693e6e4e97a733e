"""FluidScheduler: puts Fluid between Ray Tune's controller and the trials, by way of the scheduler.

A scheduler is the one part of a sweep that the user gives and that is handed the controller. This one passes every
question on to the user's and, before the first trial is added, exchanges the controller's actor manager. Tune itself
stays as it is.
"""

from __future__ import annotations

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
from fluid.integrations.ray_tune import private_api as seam
from fluid.integrations.ray_tune.decisions import all_known_at_once
from fluid.integrations.ray_tune.manager import FluidActorManager
from fluid.integrations.ray_tune.private_api import Trial
from fluid.integrations.ray_tune.synchronous import SuccessiveHalvingScheduler

#: Schedulers that decide over trials at the same point of each, or never: all may be under way at once.
_TAKES_ALL = (HyperBandScheduler, PopulationBasedTraining, PopulationBasedTrainingReplay, SuccessiveHalvingScheduler)
#: Trials under way per device, for schedulers that decide as results come.
_PER_DEVICE = 2


class FluidScheduler(TrialScheduler):  # type: ignore[misc]
    """Runs the trials of a sweep on Fluid; all decisions stay with the scheduler it wraps.

    It can be given to ``tune.run`` or ``tune.TuneConfig`` wherever a scheduler can; :mod:`fluid.tune` does so for you.

    Args:
        base: the scheduler to ask; ``None`` for Tune's default, first in, first out.
        executor: runs the trials; ``None`` for the one in force, or else one made for this sweep.
        concurrency: most trials under way at once; ``None`` for all that are known where the scheduler decides in
            rounds, and two per device where it decides as results come.

    Raises:
        InvalidFieldError: an argument cannot be used.
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
        self._base: TrialScheduler = FIFOScheduler() if base is None else base
        self._executor = executor
        self._owns_executor = False
        self._concurrency = concurrency
        #: Which way the sweep's metric is to go, as Tune was told.
        self._mode_asked: str | None = None
        self._manager: FluidActorManager | None = None

    @property
    def base(self) -> TrialScheduler:
        """The scheduler that decides."""
        return self._base

    def use(self, executor: FluidExecutor) -> None:
        """Sets what runs the trials, before the sweep begins; one that was restored has none."""
        self._executor = executor

    def close(self) -> None:
        """Closes the executor if it was made for this sweep."""
        if self._owns_executor and self._executor is not None:
            self._executor.close()
            self._executor, self._owns_executor = None, False

    # -- what is asked of a scheduler ----------------------------------------------------------------------

    @property
    def metric(self) -> Any:
        return self._base.metric

    @property
    def supports_buffered_results(self) -> bool:
        # Lanes run ahead as far as is right; Tune's own buffering does not know how far that is.
        return False

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        self._mode_asked = mode
        return bool(self._base.set_search_properties(metric, mode, **spec))

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        if self._manager is None or self._manager is not seam.controller_of(tune_controller)._actor_manager:
            self._take_over(seam.controller_of(tune_controller))
        assert self._manager is not None
        self._manager.announce(trial)
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
        # What only some schedulers have, such as HyperBand's state; never what makes an object copy or pickle itself.
        if name.startswith("__") or "_base" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._base, name)

    def __getstate__(self) -> dict[str, Any]:
        # It travels in Tune's files; an executor is of this process.
        return {**self.__dict__, "_executor": None, "_owns_executor": False, "_manager": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # -- taking over ---------------------------------------------------------------------------------------

    def _take_over(self, controller: Any) -> None:
        seam.check(controller, self._base)
        if self._executor is None:
            self._executor = executor_in_force()
        if self._executor is None:
            self._executor, self._owns_executor = FluidExecutor(), True
        controller._reuse_actors = False  # lanes are reused whether trainables can be reset or not
        if all_known_at_once(controller) or isinstance(self._base, SuccessiveHalvingScheduler):
            controller.update_max_pending_trials(
                max(controller._max_pending_trials, controller.search_alg.total_samples)
            )
        self._manager = FluidActorManager(
            controller._actor_manager._resource_manager,
            controller,
            executor=self._executor,
            scheduler=self._base,
            concurrency=self._most_at_once(len(self._executor.devices)),
            mode=self._mode_asked,
        )
        controller._actor_manager = self._manager

    def _most_at_once(self, devices: int) -> int | None:
        if self._concurrency is not None:
            return self._concurrency
        if isinstance(self._base, _TAKES_ALL) or type(self._base) is FIFOScheduler:
            return None
        return _PER_DEVICE * devices
