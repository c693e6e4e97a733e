"""Runs a sweep with Ray Tune, on Fluid or on Tune's own actors."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # The new one says something even with verbose=0.

import numpy as np
import ray
from models.trial import BEGUN, FIXED, SECONDS, WORK, tuned
from tuning.algorithms import Wanted, method
from tuning.outcome import Iteration, Outcome
from tuning.scales import Scale
from tuning.workload import Workload

from fluid import FluidExecutor, tune
from fluid.elastic import as_tune_trainable
from fluid.errors import FluidError


@dataclass(frozen=True)
class Sweep:
    """A sweep to run.

    Attributes:
        workload: what is tuned.
        algorithm: a name in ``tuning.algorithms.ALGORITHMS``.
        scale: how large it is.
        folder: with the data, as ``workload.data.locate`` returned it.
        samples: how many configurations to try; ``None`` for what the algorithm needs at this scale.
        seed: of the configurations, and of what is random in the trials.
        devices: how many GPUs or CPU cores to use; ``None`` for all.
        reuse_actors: whether Tune, without Fluid, gives actors to one trial after another.
        storage: where Tune keeps its files; ``None`` for its default.
    """

    workload: Workload
    algorithm: str
    scale: Scale
    folder: str
    samples: int | None = None
    seed: int = 0
    devices: int | None = None
    reuse_actors: bool = False
    storage: Path | None = None

    def run(self, executor: Callable[[], FluidExecutor] | None = None, callbacks: Sequence[Any] = ()) -> Outcome:
        """Runs it.

        Args:
            executor: makes what runs the trials, which is closed at the end unless it is in a ``with`` block;
                ``None`` for Ray Tune as it is.
            callbacks: further callbacks of Tune's.

        Raises:
            FluidError: a trial failed.
        """
        if not ray.is_initialized():
            # On this machine, also if a cluster runs on it: whose devices are used is to be the same with Fluid.
            options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            ray.init("local", num_cpus=self.devices, **options)
        gpus, cores = (int(ray.cluster_resources().get(name, 0)) for name in ("GPU", "CPU"))
        devices = self.devices or gpus or cores
        search = method(self.algorithm, Wanted(self.workload, self.scale, self.samples, self.seed, devices))
        fixed = {"data": self.folder, "seed": self.seed, **self.scale.fixed, **self.workload.prepare(self.folder)}
        trainable = as_tune_trainable(self.workload.trainable)
        if executor is None and gpus:
            trainable = tune.with_resources(trainable, {"cpu": 1, "gpu": 1})
        # Population based training and BOHB draw from these.
        random.seed(self.seed)
        np.random.seed(self.seed)
        recorder = Recorder(self.workload.metric)
        begun = time.time()
        tuner = tune.Tuner(
            trainable,
            param_space={**search.space, FIXED: fixed},
            tune_config=tune.TuneConfig(
                metric=self.workload.metric,
                mode=self.workload.mode,
                num_samples=search.samples,
                search_alg=search.search,
                scheduler=search.scheduler,
                reuse_actors=self.reuse_actors,
            ),
            run_config=tune.RunConfig(
                name=f"{self.workload.name}_{self.algorithm}_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}",
                storage_path=None if self.storage is None else str(self.storage),
                stop=None if search.stop is None else dict(search.stop),
                callbacks=[recorder, *callbacks],
                verbose=0,
            ),
            executor=None if executor is None else executor(),
        )
        errors = tuner.fit().errors
        seconds = time.time() - begun
        if errors:
            raise FluidError(f"{len(errors)} trials failed; the first one: {errors[0]}") from errors[0]
        return Outcome(recorder.iterations(begun), seconds, devices, self.workload.mode, self.scale.target)


class Recorder(tune.Callback):  # type: ignore[misc]
    """Keeps what is to be known of each iteration."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        #: The number of each trial that Tune counts in its tag, which may change later.
        self._made: dict[str, int] = {}
        self._rows: list[tuple[str, dict[str, Any], dict[str, Any], float]] = []

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        self._made.setdefault(trial.trial_id, int(str(trial.experiment_tag).partition("_")[0]))
        self._rows.append((trial.trial_id, tuned(trial.config), result, time.time()))

    def iterations(self, begun: float) -> list[Iteration]:
        """The iterations, given when the sweep began, in seconds since the epoch."""
        # From 0, and as they were made, not as their first results came.
        numbers = {trial_id: number for number, trial_id in enumerate(sorted(self._made, key=self._made.__getitem__))}
        return [
            Iteration(
                numbers[trial_id],
                result["training_iteration"],
                result[self._metric],
                config,
                result[BEGUN] - begun,
                result[SECONDS],
                result[WORK],
                result["pid"],
                told - begun,
            )
            for trial_id, config, result, told in self._rows
        ]
