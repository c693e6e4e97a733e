"""The trials of stragglers.py: a perceptron on images, which may train on several devices."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fluid.elastic import ElasticTrainable, as_tune_trainable


class Task(NamedTuple):
    """A learning task.

    Attributes:
        name: for people.
        hidden: width of the hidden layers, of which there are two.
        batch: samples of a global batch.
        first: iterations of a trial in the first stage; an iteration is an epoch.
    """

    name: str
    hidden: int
    batch: int
    first: int


#: MNIST's test set, 10,000 images; scikit-learn's, 1,797 of 8 x 8; random ones of that shape.
TASKS = {"mnist": Task("mnist", 512, 500, 2), "digits": Task("digits", 1024, 256, 4)}


@functools.cache
def dataset(data: str | None) -> TensorDataset:
    """Loads MNIST's images from a folder with ``mnist-10k.npz``; else scikit-learn's digits, or random numbers."""
    if data is not None:
        with np.load(Path(data) / "mnist-10k.npz") as file:
            images, labels = file["images"], file["labels"]
        x = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32) / 255.0)
        return TensorDataset(x, torch.from_numpy(labels.astype(np.int64)))
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1797, 64, generator=generator)
        return TensorDataset(x, torch.randint(10, (1797,), generator=generator))
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y))


class Perceptron(ElasticTrainable):
    """A perceptron of two hidden layers, trained by AdamW; one iteration is an epoch.

    The config: ``lr``; ``data``, the folder or ``None``; ``task``, a name in :data:`TASKS`.
    """

    def build(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)  # A device is a core.
        torch.manual_seed(0)
        data, task = dataset(config["data"]), TASKS[config["task"]]
        points = data.tensors[0].shape[1]
        self.model = nn.Sequential(
            nn.Linear(points, task.hidden), nn.ReLU(), nn.Linear(task.hidden, task.hidden), nn.ReLU(),
            nn.Linear(task.hidden, 10),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config["lr"])
        self.loader = self.make_loader(data, task.batch)

    def train_batch(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}

    def end_iteration(self, metrics: dict[str, float]) -> dict[str, float]:
        return {**metrics, "width": self.size}


def tune_trainable() -> type:
    """Returns the trainable for Ray Tune."""
    return as_tune_trainable(Perceptron)
