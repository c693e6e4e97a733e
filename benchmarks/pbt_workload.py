"""What benchmarks/pbt.py tunes: a network on real digits whose learning rate and momentum may change as it trains."""

from __future__ import annotations

import functools
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np

#: Seconds of an iteration at least: what it does not need it sleeps, so that all systems have equal iterations.
ITERATION_S = 0.02
_HIDDEN, _BATCH, _CLASSES = 24, 64, 10


def write_digits(path: Path) -> None:
    """Writes scikit-learn's digits to a file, so that trials need not load it: images, labels, and those held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images / 16.0
    held_out = np.arange(len(images)) % 4 == 0
    np.savez(path, images[~held_out], labels[~held_out], images[held_out], labels[held_out])


@functools.cache
def read_digits(path: str) -> tuple[Any, Any, Any, Any]:
    """Images and labels for training, and those held out."""
    with np.load(path) as found:
        return found["arr_0"], found["arr_1"], found["arr_2"], found["arr_3"]


class Network:
    """A network with a hidden layer, of numpy; one pass over a part of the data at a time."""

    def __init__(self, data: str, seed: int) -> None:
        self.data = data
        rng = np.random.default_rng(seed)
        pixels = read_digits(data)[0].shape[1]
        self.weights = [rng.normal(0.0, 0.1, (pixels, _HIDDEN)), rng.normal(0.0, 0.1, (_HIDDEN, _CLASSES))]
        self.speeds = [np.zeros_like(one) for one in self.weights]
        self.passes = 0

    def train(self, rate: float, momentum: float) -> None:
        """Trains on the next part of the data."""
        images, labels, _, _ = read_digits(self.data)
        first = self.passes * _BATCH * 4 % len(images)
        for begin in range(first, first + _BATCH * 4, _BATCH):
            rows = np.arange(begin, begin + _BATCH) % len(images)
            hidden, odds = self._forward(images[rows])
            odds[np.arange(_BATCH), labels[rows]] -= 1.0
            back = (odds @ self.weights[1].T) * (hidden > 0.0)
            for place, slope in enumerate((images[rows].T @ back, hidden.T @ odds)):
                self.speeds[place] = momentum * self.speeds[place] - rate / _BATCH * slope
                self.weights[place] = self.weights[place] + self.speeds[place]
        self.passes += 1

    def loss(self) -> float:
        """The mean loss on held-out images."""
        _, _, images, labels = read_digits(self.data)
        odds = self._forward(images)[1]
        return float(-np.log(np.maximum(odds[np.arange(len(labels)), labels], 1e-12)).mean())

    def _forward(self, images: Any) -> tuple[Any, Any]:
        hidden = np.maximum(images @ self.weights[0], 0.0)
        scores = hidden @ self.weights[1]
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, odds / odds.sum(axis=1, keepdims=True)


class Member:
    """A member of a population, as Fluid and Ray Tune run it."""

    def setup(self, config: dict[str, Any]) -> None:
        self.settings, self.network = config, Network(config["data"], config["seed"])

    def step(self) -> dict[str, Any]:
        begun = time.perf_counter()
        with np.errstate(all="ignore"):
            self.network.train(self.settings["rate"], self.settings["momentum"])
            loss = self.network.loss()
        time.sleep(max(0.0, ITERATION_S - (time.perf_counter() - begun)))
        return {"loss": loss}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "network").write_bytes(pickle.dumps(self.network))

    def load_checkpoint(self, folder: str) -> None:
        self.network = pickle.loads((Path(folder) / "network").read_bytes())

    def reset_config(self, config: dict[str, Any]) -> bool:
        """Takes another config in the same process."""
        self.settings, self.network = config, Network(config["data"], config["seed"])
        return True
