"""Small networks for tables that come with scikit-learn: handwritten digits, breast cancer and wine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from sklearn import datasets
from sklearn.model_selection import train_test_split
from torch import nn

from fluid.fused import SGD, AdamW, Dropout, FusedTrainable, TensorData

TABLES = {"digits": datasets.load_digits, "breast_cancer": datasets.load_breast_cancer, "wine": datasets.load_wine}


@functools.cache
def load(name: str) -> list[torch.Tensor]:
    """Returns a table's rows and classes for training, then a quarter held out; trials of one process share them."""
    x, y = TABLES[name](return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, stratify=y, random_state=0)
    mean, deviation = x_train.mean(0), x_train.std(0).clip(min=1e-6)
    rows = [torch.tensor((part - mean) / deviation, dtype=torch.float32) for part in (x_train, x_test)]
    return [rows[0], torch.tensor(y_train), rows[1], torch.tensor(y_test)]


class Tabular(FusedTrainable):
    """A network with two hidden layers; reports ``loss`` and, of the rows held out, ``accuracy``.

    Its config has ``data``, the table's name, ``width``, ``optimizer``, ``lr``, ``weight_decay``, ``dropout`` and
    ``seed``. Trials that differ in the last four only can be fused.
    """

    def build(self, config: dict[str, Any]) -> nn.Module:
        x, y, *_ = load(config["data"])
        width, dropout = config["width"], config["dropout"]
        return nn.Sequential(
            *(nn.Linear(x.shape[1], width), nn.ReLU(), Dropout(dropout)),
            *(nn.Linear(width, width), nn.ReLU(), Dropout(dropout)),
            nn.Linear(width, int(y.max()) + 1),
        )

    def optimizer(self, config: dict[str, Any]) -> SGD | AdamW:
        if config["optimizer"] == "sgd":
            return SGD(lr=config["lr"], momentum=0.9, weight_decay=config["weight_decay"])
        return AdamW(lr=0.1 * config["lr"], weight_decay=config["weight_decay"])

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x_train, y_train, x_test, y_test = load(config["data"])
        return TensorData([x_train, y_train], [x_test, y_test], batch_size=32, seed=seed)

    def loss(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(-1) == y).double().mean()}
