"""What benchmarks/native_sweep.py tunes: nothing, for the cost of a sweep itself, and a classifier of real digits."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np


def empty(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Iterations that take no time."""
    for step in range(1, 1000):
        yield {"loss": config["x"] + 1.0 / step}


def busy(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Iterations of 5 ms of work."""
    for step in range(1, 1000):
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            pass
        yield {"loss": config["x"] + 1.0 / step}


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns scikit-learn's handwritten digits: images and labels for training, and for comparing configurations."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images / 16.0
    held_out = np.arange(len(images)) % 4 == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


class Classifier:
    """A perceptron with one hidden layer; one pass over the training data at a time."""

    def __init__(self, config: dict[str, Any]) -> None:
        from sklearn.neural_network import MLPClassifier

        self.model = MLPClassifier(
            (config["hidden"],), learning_rate_init=config["lr"], alpha=config["alpha"], random_state=0
        )

    def epoch(self) -> float:
        """Trains; returns the accuracy on held-out images."""
        images, labels, x_test, y_test = digits()
        self.model.partial_fit(images, labels, classes=np.arange(10))
        return float(self.model.score(x_test, y_test))


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """The classifier as a generator."""
    classifier = Classifier(config)
    while True:
        yield {"accuracy": classifier.epoch()}
