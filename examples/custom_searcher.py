"""A custom search algorithm on Fluid: evolution in generations, each of which is one TrialGroup.

python examples/custom_searcher.py
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tuning.interruption import exit_status

from fluid import FluidExecutor, Trial, TrialGroup

#: Iterations of a trial, and the iteration after which it may be stopped.
BUDGET, CHECK = 40, 10


class Network:
    """A two-layer classifier of points inside and outside a ring; one iteration is a pass over the points."""

    def setup(self, config: dict[str, Any]) -> None:
        generator = np.random.default_rng(0)
        self.points = generator.normal(size=(1_000, 2))
        self.inside = (np.abs(np.linalg.norm(self.points, axis=1) - 1.0) < 0.4).astype(float)
        self.lr, self.momentum = config["lr"], config["momentum"]
        self.weights = [generator.normal(size=(3, 16)), generator.normal(size=17) * 0.1]
        self.speed = [np.zeros_like(weights) for weights in self.weights]

    def step(self) -> dict[str, float]:
        losses = []
        for batch in np.split(np.arange(1_000), 20):
            x = np.column_stack([self.points[batch], np.ones(len(batch))])
            hidden = np.column_stack([np.tanh(x @ self.weights[0]), np.ones(len(batch))])
            guess = 0.5 + 0.5 * np.tanh(hidden @ self.weights[1])  # A sigmoid that cannot overflow.
            losses.append(-np.mean(np.log(np.where(self.inside[batch] == 1.0, guess, 1.0 - guess) + 1e-9)))
            wrong = (guess - self.inside[batch]) / len(batch)
            slope = np.outer(wrong, self.weights[1][:-1]) * (1.0 - hidden[:, :-1] ** 2)
            for speed, weights, gradient in zip(self.speed, self.weights, (x.T @ slope, wrong @ hidden), strict=True):
                speed *= self.momentum
                speed -= self.lr * gradient
                weights += speed
        return {"loss": float(np.mean(losses))}

    def save_checkpoint(self, folder: str) -> None:
        np.savez(Path(folder) / "state.npz", *self.weights, *self.speed)

    def load_checkpoint(self, folder: str) -> None:
        with np.load(Path(folder) / "state.npz") as state:
            self.weights = [state["arr_0"], state["arr_1"]]
            self.speed = [state["arr_2"], state["arr_3"]]


class Evolution:
    """Children are mixtures of the best configurations so far, slightly changed. It does not depend on Fluid."""

    def __init__(self, parents: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.most = parents
        #: Loss and configuration of the best trials so far.
        self.parents: list[tuple[float, dict[str, float]]] = []

    def ask(self) -> dict[str, float]:
        if not self.parents:
            return {"lr": 10.0 ** self.random.uniform(-4.0, 1.0), "momentum": self.random.uniform(0.0, 0.99)}
        mother, father = (self.parents[i][1] for i in self.random.integers(len(self.parents), size=2))
        lr = np.sqrt(mother["lr"] * father["lr"]) * 10.0 ** self.random.normal(scale=0.3)
        momentum = (mother["momentum"] + father["momentum"]) / 2 + self.random.normal(scale=0.1)
        return {"lr": float(lr), "momentum": float(np.clip(momentum, 0.0, 0.99))}

    def tell(self, config: dict[str, float], loss: float) -> None:
        self.parents = sorted([*self.parents, (loss, config)], key=lambda pair: pair[0])[: self.most]


def main(generations: int = 4, size: int = 12) -> None:
    """Evolves learning rate and momentum, then trains the best configuration for longer."""
    search = Evolution(parents=4, seed=1)
    bar = float("inf")
    best = None
    with FluidExecutor() as executor:
        for generation in range(generations):
            trials = [Trial(Network, search.ask(), budget=BUDGET) for _ in range(size)]
            handle = executor.submit_trialgroup(TrialGroup(trials, name=f"generation {generation}", owner="evolution"))
            at_check: list[float] = []
            losses: dict[str, float] = {}
            for result in handle.results():  # As they come, from all trials of the generation.
                losses[result.trial_id] = loss = result.metrics["loss"]
                if result.iteration == CHECK:
                    at_check.append(loss)
                    if loss > bar:
                        handle.stop(result.trial_id)
            handle.raise_failures()
            bar = median(at_check)  # Trials of the next generation that are above it at the check are stopped.
            for trial in trials:
                loss = losses[trial.id]
                search.tell(dict(trial.config), loss)
                if handle.states[trial.id] == "DONE" and (best is None or loss < best[0]):
                    best = loss, trial, handle
            stopped = list(handle.states.values()).count("STOPPED")
            print(f"generation {generation}: best loss {min(losses.values()):.4f}, {stopped} of {size} stopped early")
        assert best is not None
        _, trial, handle = best
        handle.extend(trial.id, BUDGET)  # It continues where it was, whichever generation it belongs to.
        handle.wait()
        last = [result for result in handle.results() if result.trial_id == trial.id][-1]
        print(f"after {last.iteration} iterations: loss {last.metrics['loss']:.4f} with {dict(trial.config)}")


if __name__ == "__main__":
    with exit_status():
        main()
