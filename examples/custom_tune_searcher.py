"""A custom searcher for Ray Tune, with the trials on Fluid: local search around the best configuration.

python examples/custom_tune_searcher.py
"""

from __future__ import annotations

import os
import pickle
from typing import Any

os.environ.setdefault("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")

import numpy as np
import ray
from custom_searcher import Network
from ray.tune.search import ConcurrencyLimiter, Searcher
from tuning.interruption import exit_status

from fluid import FluidExecutor, tune


class LocalSearch(Searcher):  # type: ignore[misc]
    """Random at first, then a step away from the best so far; the step shrinks whenever a trial is no better."""

    def __init__(self, metric: str, mode: str, *, begin: int = 8, seed: int = 0) -> None:
        super().__init__(metric=metric, mode=mode)
        self.random = np.random.default_rng(seed)
        self.begin = begin
        self.asked: dict[str, np.ndarray] = {}
        self.best: tuple[float, np.ndarray] | None = None
        self.completed = 0
        self.step = 0.2

    def suggest(self, trial_id: str) -> dict[str, Any]:
        # The search runs in the unit square.
        if self.best is None or self.completed < self.begin:
            at = self.random.uniform(size=2)
        else:
            at = np.clip(self.best[1] + self.random.normal(scale=self.step, size=2), 0.0, 1.0)
        self.asked[trial_id] = at
        return {"lr": 10.0 ** float(5.0 * at[0] - 4.0), "momentum": float(0.99 * at[1])}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        at = self.asked.pop(trial_id)
        if error or result is None:
            return
        self.completed += 1
        loss = result[self.metric] if self.mode == "min" else -result[self.metric]
        if self.best is None or loss < self.best[0]:
            self.best = loss, at
        elif self.completed > self.begin:
            self.step = max(0.02, 0.9 * self.step)

    def save(self, checkpoint_path: str) -> None:
        with open(checkpoint_path, "wb") as file:
            pickle.dump(self.__dict__, file)

    def restore(self, checkpoint_path: str) -> None:
        with open(checkpoint_path, "rb") as file:
            self.__dict__.update(pickle.load(file))


class NetworkTrial(tune.Trainable):  # type: ignore[misc]
    """The network of custom_searcher.py as a class trainable of Ray Tune."""

    def setup(self, config: dict[str, Any]) -> None:
        self.network = Network()
        self.network.setup(config)

    def step(self) -> dict[str, float]:
        return self.network.step()

    def save_checkpoint(self, folder: str) -> None:
        self.network.save_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> None:
        self.network.load_checkpoint(folder)


def main(samples: int = 24) -> None:
    """Searches for the best learning rate and momentum."""
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tuner = tune.Tuner(
        NetworkTrial,
        tune_config=tune.TuneConfig(
            search_alg=ConcurrencyLimiter(LocalSearch("loss", "min"), max_concurrent=4),
            metric="loss",
            mode="min",
            num_samples=samples,
        ),
        run_config=tune.RunConfig(stop={"training_iteration": 40}, verbose=0),
        executor=FluidExecutor(),
    )
    try:
        print_best(tuner.fit())
    except tune.SweepInterrupted as interruption:
        print_best(interruption.result, cut_off=len(interruption.cut_off))
        raise


def print_best(results: Any, *, cut_off: int = 0) -> None:
    """Prints the best trial of those that have reported a loss."""
    said = f"{len(results)} trials, {results.num_errors} failed"
    if cut_off:
        said += f", {cut_off} cut off by a signal"
    losses = [one for one in results if one.metrics and "loss" in one.metrics]
    if losses:
        best = min(losses, key=lambda one: float(one.metrics["loss"]))
        said += f"; best loss {best.metrics['loss']:.4f}: {best.config}"
    print(said)


if __name__ == "__main__":
    with exit_status():
        main()
