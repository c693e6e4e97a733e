"""The names of :mod:`fluid.tune`: those of ``ray.tune``, with ``run`` and ``Tuner`` taking an ``executor``.

Two schedulers are added that Tune does not have: :class:`SuccessiveHalvingScheduler` and :class:`SyncBOHB`.
"""

from __future__ import annotations

import copy
from typing import Any

import ray
import ray.tune
from ray.tune.schedulers import create_scheduler

from fluid._given_executor import closes_executor
from fluid.display.notebook import NotebookView
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor, executor_scope
from fluid.integrations.ray_tune.controller.interruption import Interruption
from fluid.integrations.ray_tune.lane import elastic_lane_trial
from fluid.integrations.ray_tune.logs.loggers import loggers_apart
from fluid.integrations.ray_tune.scheduler import FluidScheduler
from fluid.integrations.ray_tune.schedulers.successive_halving import SuccessiveHalvingScheduler
from fluid.integrations.ray_tune.schedulers.sync_bohb import SyncBOHB
from fluid.integrations.ray_tune.side_by_side import alone_until_begun, in_use, start_ray
from fluid.integrations.ray_tune.virtual_time import tune_time
from fluid.session.listeners import SweepInterrupted

# -- tune output ---------------------------------------------------------------------------------
#
# Tune's own output beside Fluid's live view, which shows the same: it is left out unless the user asks for it.


class SilentReporter(ray.tune.ProgressReporter):  # type: ignore[misc]
    """Reports nothing. Tune's own reporter for notebooks clears the output of the cell, with the live view in it."""

    def should_report(self, trials: Any, done: bool = False) -> bool:
        """Whether there is something to report: never."""
        return False

    def report(self, trials: Any, done: bool, *sys_info: Any) -> None:
        """Does nothing."""


def output_options(executor: FluidExecutor, verbose: Any, reporter: Any) -> dict[str, Any]:
    """What to pass to Tune as ``verbose`` and ``progress_reporter``; empty where its output stays as it is.

    Args:
        executor: runs the sweep.
        verbose, reporter: what the user has passed; ``None`` if nothing.
    """
    if verbose is not None or reporter is not None or not executor.is_live:
        return {}
    # Elsewhere Tune warns of a reporter.
    return {"verbose": 0, **({"progress_reporter": SilentReporter()} if NotebookView.wanted() else {})}


# -- drop in -------------------------------------------------------------------------------------


#: What every lane of a sweep imports.
_LANE_MODULES = (elastic_lane_trial.__name__,)

__all__ = [
    *(name for name in ray.tune.__all__ if name not in ("run", "Tuner")),
    "SuccessiveHalvingScheduler",
    "SweepInterrupted",
    "SyncBOHB",
    "Tuner",
    "run",
]


def __getattr__(name: str) -> Any:
    return getattr(ray.tune, name)


def __dir__() -> list[str]:
    return __all__


@closes_executor
def run(run_or_experiment: Any, *, executor: FluidExecutor | None = None, **options: Any) -> Any:
    """Runs a sweep as ``ray.tune.run`` does, with the trials on Fluid.

    Args:
        run_or_experiment: as for ``ray.tune.run``.
        executor: runs the trials; ``None`` for plain Ray Tune.
        options: as for ``ray.tune.run``.

    Returns:
        The ``ExperimentAnalysis`` of ``ray.tune.run``.

    Raises:
        InvalidFieldError: ``executor`` is not a FluidExecutor, this process uses Ray Client, or another thread runs a
            sweep of a different trainable of the same name.
        SweepInterrupted: Ctrl-C or a notice of preemption has ended the sweep; its ``result`` is the analysis.

    Example:
        >>> from fluid import FluidExecutor, tune
        >>> def train(config):
        ...     for iteration in range(3):
        ...         tune.report({"loss": (config["x"] - 2.0) ** 2 / (iteration + 1)})
        >>> def sweep(executor):
        ...     return tune.run(train, config={"x": tune.grid_search([1.0, 2.0])}, executor=executor)

        ``sweep(FluidExecutor())`` runs both trials on this machine's devices. Anything but an executor is refused:

        >>> sweep("local")
        Traceback (most recent call last):
        fluid.errors.InvalidFieldError: executor='local': must be a FluidExecutor
    """
    if executor is None:
        return ray.tune.run(run_or_experiment, **options)
    options["scheduler"] = _wrapped(options.get("scheduler"), executor)
    callbacks = options.pop("callbacks", None)
    options |= output_options(executor, options.get("verbose"), options.get("progress_reporter"))
    scope = executor_scope(executor)
    with in_use(run_or_experiment), scope, Interruption(executor) as interruption, alone_until_begun():
        _prepare(executor, run_or_experiment)
        with loggers_apart(executor, callbacks) as options["callbacks"], tune_time(executor):
            return interruption.finish(ray.tune.run(run_or_experiment, **options))


class Tuner(ray.tune.Tuner):  # type: ignore[misc]
    """``ray.tune.Tuner`` with the trials on Fluid.

    Args:
        trainable: as for ``ray.tune.Tuner``.
        executor: runs the trials; ``None`` for plain Ray Tune.
        options: as for ``ray.tune.Tuner``.

    Raises:
        InvalidFieldError: ``executor`` is not a FluidExecutor, or this process uses Ray Client.

    Example:
        >>> from fluid import FluidExecutor, tune
        >>> def train(config):
        ...     for iteration in range(3):
        ...         tune.report({"loss": (config["x"] - 2.0) ** 2 / (iteration + 1)})
        >>> config = tune.TuneConfig(metric="loss", mode="min", num_samples=8)
        >>> with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        ...     space = {"x": tune.uniform(0.0, 4.0)}
        ...     tuner = tune.Tuner(train, param_space=space, tune_config=config, executor=executor)
        >>> config.scheduler is None  # The configuration given is not changed.
        True

        ``tuner.fit()``, within the ``with`` block, then returns the ``ResultGrid`` of ``ray.tune``.
    """

    @closes_executor
    def __init__(self, trainable: Any = None, *, executor: FluidExecutor | None = None, **options: Any) -> None:
        if executor is not None and "_tuner_internal" not in options:
            config = copy.copy(options.get("tune_config")) or ray.tune.TuneConfig()
            config.scheduler = _wrapped(config.scheduler, executor)
            options["tune_config"] = config
        super().__init__(trainable, **options)
        self._executor = executor

    @classmethod
    @closes_executor
    def restore(cls, path: str, trainable: Any, *, executor: FluidExecutor | None = None, **options: Any) -> Tuner:
        """``ray.tune.Tuner.restore`` with the trials on Fluid.

        A sweep that was begun under Fluid can be restored without an executor, and one begun without can be restored
        with one.
        """
        restored = ray.tune.Tuner.restore(path, trainable, **options)
        internal = restored._local_tuner
        config = internal._tune_config
        if executor is not None:
            config.scheduler = _wrapped(config.scheduler, executor)
        elif isinstance(config.scheduler, FluidScheduler):
            config.scheduler = config.scheduler.base
        return cls(_tuner_internal=internal, executor=executor)

    def fit(self) -> Any:
        """Runs the sweep as ``ray.tune.Tuner.fit`` does.

        Raises:
            SweepInterrupted: Ctrl-C or a notice of preemption has ended the sweep; its ``result`` is the ResultGrid.
        """
        return super().fit() if self._executor is None else self._fit_on(executor=self._executor)

    @closes_executor
    def _fit_on(self, *, executor: FluidExecutor) -> Any:
        config = self._local_tuner._run_config
        before = {name: getattr(config, name) for name in ("callbacks", "verbose", "progress_reporter")}
        # Ray keeps what the user passed under this name, and puts the default in its place.
        verbose = getattr(config, "_verbose", config.verbose)
        for name, value in output_options(executor, verbose, config.progress_reporter).items():
            setattr(config, name, value)
        trainable = self._local_tuner.trainable
        scope = executor_scope(executor)
        with in_use(trainable), scope, Interruption(executor) as interruption, alone_until_begun():
            _prepare(executor, trainable)
            with loggers_apart(executor, config.callbacks) as config.callbacks, tune_time(executor):
                try:
                    return interruption.finish(super().fit())
                finally:
                    for name, value in before.items():
                        setattr(config, name, value)


def _prepare(executor: FluidExecutor, trainable: Any) -> None:
    """Begins to load what lanes need, while Tune sets up and, it may be, starts Ray."""
    executor.announce("Ray Tune is starting")
    executor.session.preload(trainable, _LANE_MODULES)
    start_ray()


def _wrapped(scheduler: Any, executor: FluidExecutor) -> Any:
    """Returns the user's scheduler in a FluidScheduler."""
    if not isinstance(executor, FluidExecutor):
        raise InvalidFieldError("executor", executor, "must be a FluidExecutor")
    if ray.util.client.ray.is_connected():
        raise InvalidFieldError("executor", executor, "is not supported through Ray Client: run this on the cluster")
    if isinstance(scheduler, str):
        scheduler = create_scheduler(scheduler)
    if isinstance(scheduler, FluidScheduler):
        scheduler.use(executor)
        return scheduler
    return FluidScheduler(scheduler, executor)
