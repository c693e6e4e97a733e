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
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # Ray's new output prints even with verbose=0.

import numpy as np
import ray
from models.trial import ENDED, FIXED, tuned
from ray.tune.logger import LoggerCallback
from tuning.algorithms import SearchRequest, method
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
        scale: the size of the sweep.
        folder: the data's, as ``workload.data.locate`` returned it.
        samples: number of configurations; ``None`` for the number that the algorithm needs at this scale.
        seed: of the configurations, and of the trials' random numbers.
        devices: how many GPUs or CPU cores to use; ``None`` for all.
        reuse_actors: whether Tune, without Fluid, reuses actors for other trials.
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
        """Runs the sweep.

        Args:
            executor: makes the executor that runs the trials, which is closed at the end unless it is in a ``with``
                block; ``None`` for Ray Tune alone.
            callbacks: further callbacks for Tune.

        Raises:
            FluidError: a trial failed.
            SweepInterrupted: a signal has ended the sweep; its ``result`` is the Outcome so far.
        """
        if not ray.is_initialized():
            # A cluster of its own, even if one runs here, so that Tune uses the same devices as Fluid.
            options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            ray.init("local", num_cpus=self.devices, **options)
        gpus, cores = (int(ray.cluster_resources().get(name, 0)) for name in ("GPU", "CPU"))
        devices = self.devices or gpus or cores
        search = method(
            self.algorithm,
            SearchRequest(
                workload=self.workload, scale=self.scale, samples=self.samples, seed=self.seed, devices=devices
            ),
        )
        fixed = {"data": self.folder, **self.scale.fixed, **self.workload.prepare(self.folder)}
        trainable = as_tune_trainable(self.workload.trainable)
        if executor is None and gpus:
            trainable = tune.with_resources(trainable, {"cpu": 1, "gpu": 1})
        # Population based training and BOHB draw from these generators.
        random.seed(self.seed)
        np.random.seed(self.seed)
        recorder = Recorder(self.workload.metric)
        begun = time.time()
        tuner = tune.Tuner(
            trainable,
            param_space={**search.space, "seed": self.seed, FIXED: fixed},
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

        def outcome(cut_off: int = 0) -> Outcome:
            seconds, mode, target = time.time() - begun, self.workload.mode, self.scale.target
            return Outcome(recorder.iterations(begun), seconds, devices, mode, target, cut_off=cut_off)

        try:
            errors = tuner.fit().errors
        except tune.SweepInterrupted as cut:
            raise tune.SweepInterrupted(cut.code, outcome(len(cut.cut_off)), cut.cut_off) from None
        found = outcome()
        if errors:
            raise FluidError(f"{len(errors)} trials failed; the first one: {errors[0]}") from errors[0]
        return found


class Recorder(LoggerCallback):  # type: ignore[misc]
    """Records each iteration. As a logger it only reads results, so that trials need not wait for it."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        #: The number of each trial in the tag that Tune gave it first; the tag may change later.
        self._made: dict[str, int] = {}
        self._rows: list[tuple[str, dict[str, Any], dict[str, Any], float]] = []

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        self._made.setdefault(trial.trial_id, int(str(trial.experiment_tag).partition("_")[0]))
        self._rows.append((trial.trial_id, tuned(trial.config), result, time.time()))

    def iterations(self, begun: float) -> list[Iteration]:
        """Returns the iterations.

        Args:
            begun: when the sweep began, in seconds since the epoch.
        """
        # From 0, in the order in which trials were made, not in that of their first results.
        numbers = {trial_id: number for number, trial_id in enumerate(sorted(self._made, key=self._made.__getitem__))}
        return [
            Iteration(
                trial=numbers[trial_id],
                trial_id=trial_id,
                iteration=result["training_iteration"],
                value=result[self._metric],
                config=config,
                begun=result[ENDED] - result["time_this_iter_s"] - begun,
                seconds=result["time_this_iter_s"],
                process=result["pid"],
                reported=reported - begun,
            )
            for trial_id, config, result, reported in self._rows
        ]
