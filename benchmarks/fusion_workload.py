"""The trainings of benchmarks/fusion.py: small models on scikit-learn's digits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fluid.fused import SGD, Adam, AdamW, FusedTrainable, OptimizerSpec, TensorData

#: Of images to train on; the others are for evaluation.
TRAINED = 1437
#: Optimizers by name, with values that differ a little from trial to trial.
OPTIMIZERS: dict[str, Callable[[float], OptimizerSpec]] = {
    "SGD": lambda factor: SGD(lr=0.01 * factor, momentum=0.9),
    "SGD, Nesterov": lambda factor: SGD(lr=0.01 * factor, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "Adam": lambda factor: Adam(lr=0.001 * factor),
    "AdamW": lambda factor: AdamW(lr=0.001 * factor, clip_norm=1.0),
}


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


class Block(nn.Module):
    """A transformer block over the 8 rows of an image, and the classes."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.classes = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images.unflatten(-1, (8, 8))) + self.place
        parts = self.attend(self.first(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.second(x))
        return self.classes(x.mean(1))


def perceptron(*widths: int) -> nn.Module:
    sizes = (64, *widths)
    layers = [part for ends in itertools.pairwise(sizes) for part in (nn.Linear(*ends), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP, width 32": lambda: perceptron(32),
    "MLP, width 64": lambda: perceptron(64),
    "MLP, width 256": lambda: perceptron(256),
    "MLP, two layers of width 256": lambda: perceptron(256, 256),
    "CNN, 8 and 16 channels": convolutions,
    "transformer block, width 32": lambda: Block(32),
}


class Digits(FusedTrainable):
    """One of the models on the digits."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return MODELS[config["model"]]()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def optimizer(self, config: dict[str, Any]) -> OptimizerSpec:
        return OPTIMIZERS[config["optimizer"]](config["factor"])

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        images, labels = digits()
        train, evaluation = (images[:TRAINED], labels[:TRAINED]), (images[TRAINED:], labels[TRAINED:])
        return TensorData(train, evaluation, batch_size=32, seed=seed)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        return {"accuracy": (model(images).argmax(-1) == labels).float().mean()}


def configs(model: str, trials: int, optimizer: str = "SGD") -> list[dict[str, Any]]:
    return [
        {"model": model, "optimizer": optimizer, "factor": 1.03**number, "seed": number} for number in range(trials)
    ]
