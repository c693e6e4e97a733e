"""Perceptrons and convolutions on scikit-learn's digits, as FusedTrainables, for sweeps that are measured."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fluid.fused import SGD, FusedTrainable, TensorData


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


class Perceptron(FusedTrainable):
    """One hidden layer of width 32; an iteration is an epoch of 1,437 images in batches of 32."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def optimizer(self, config: dict[str, Any]) -> SGD:
        return SGD(lr=config["lr"], momentum=config["momentum"], weight_decay=config["decay"])

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        images, labels = digits()
        train, evaluation = (images[:1437], labels[:1437]), (images[1437:], labels[1437:])
        return TensorData(train, evaluation, batch_size=32, seed=seed)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        return {"accuracy": (model(images).argmax(-1) == labels).float().mean()}


class Convolutions(Perceptron):
    """So many channels that operations of several trials gain nothing from being one."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )
