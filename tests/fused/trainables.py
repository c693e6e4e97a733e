"""Trainables of the tests of fused trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fluid.fused import SGD, Adam, AdamW, Dropout, FusedTrainable, TensorData
from fluid.fused.optimizers import OptimizerSpec

OPTIMIZERS: dict[str, type[OptimizerSpec]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def images(samples: int = 50, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images ``(samples, 1, 6, 6)``, and labels that follow from them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 6, 6, generator=generator)
    return x, (x.flatten(1) @ torch.randn(36, 5, generator=generator)).argmax(-1)


class Classifier(FusedTrainable):
    """A perceptron; its config has the optimizer's values under ``optimizer``, and ``kind``."""

    dtype = torch.float64

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, config.get("width", 7)), nn.Tanh(), nn.Linear(7, 5)).to(
            self.dtype
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def optimizer(self, config: dict[str, Any]) -> OptimizerSpec:
        return OPTIMIZERS[config.get("kind", "sgd")](**config.get("optimizer", {"lr": 0.1}))

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x, y = images()
        return TensorData([x.to(self.dtype), y], [x.to(self.dtype), y], batch_size=16, seed=seed)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        scores = model(x)
        return {
            "accuracy": (scores.argmax(-1) == y).double().mean(),
            "val_loss": nn.functional.cross_entropy(scores, y),
        }


class Single(Classifier):
    """In float32."""

    dtype = torch.float32


class Convolutions(Classifier):
    """Convolutions, batch normalization and dropout, whose p is in the config."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            Dropout(config.get("p", 0.2)),
            nn.Flatten(),
            nn.Linear(48, 6),
            Dropout(config.get("q", 0.4)),
            nn.Linear(6, 5),
        ).to(self.dtype)


class SingleConvolutions(Convolutions):
    """In float32."""

    dtype = torch.float32


class Steps(Convolutions):
    """Iterations of three batches, which are no whole number of epochs."""

    iteration_batches = 3

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x, y = images()
        return TensorData([x.double(), y], [x.double(), y], batch_size=8, seed=seed, drop_last=True)


class OwnData:
    """Batches that are made as they are needed, as dicts; no TensorData."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 4

    def train_batches(self, epoch: int, start: int) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(start, 4):
            x, y = images(8, seed=1000 * self.seed + 10 * epoch + number)
            yield {"x": x.double(), "y": y}

    def evaluation_batches(self) -> list[dict[str, torch.Tensor]]:
        x, y = images(20, seed=self.seed)
        return [{"x": x[:12].double(), "y": y[:12]}, {"x": x[12:].double(), "y": y[12:]}]


class Streamed(Convolutions):
    """Trains on :class:`OwnData`."""

    def data(self, config: dict[str, Any], seed: int) -> Any:
        return OwnData(seed)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, (batch["x"], batch["y"]))

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return super().evaluate(model, (batch["x"], batch["y"]))


class OwnTensors(Classifier):
    """Each seed has samples of its own, which rows cannot share."""

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x, y = images(seed=seed)
        return TensorData([x.double(), y], [x.double(), y], batch_size=16, seed=seed)


class Tied(Classifier):
    """Tied weights, a part that is not trained, parameters of two types, and a weight of the loss in a buffer."""

    class Net(nn.Module):
        def __init__(self, weight: float) -> None:
            super().__init__()
            self.fixed = nn.Linear(36, 6).double().requires_grad_(False)
            self.one, self.two = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
            self.two.weight = self.one.weight
            self.out = nn.Linear(6, 5)
            self.register_buffer("weight", torch.tensor(weight))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.two(torch.tanh(self.one(self.fixed(x.flatten(1)))))
            return self.out(x.float()).double()

    def build(self, config: dict[str, Any]) -> nn.Module:
        return self.Net(config.get("weight", 1.0))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * model.weight


def made(cls: type[FusedTrainable], config: Mapping[str, Any]) -> Any:
    """A trial that is set up."""
    trial = cls()
    trial.setup(dict(config))
    return trial


def values(trial: FusedTrainable) -> dict[str, torch.Tensor]:
    """The tensors of a trial's model and of its optimizer's states, as copies in float64."""
    found = {name: tensor.double().clone() for name, tensor in trial.model.state_dict().items()}
    for number, state in trial.torch_optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": torch.as_tensor(value).double().clone() for name, value in state.items()}
    return found


def difference(one: FusedTrainable, two: FusedTrainable) -> float:
    """The largest difference of any tensor of two trials, relative to its norm.

    Norms below 0.001 count as 0.001: gradients that should be 0 are noise, as that of a bias before batch norm.
    """
    ours, theirs = values(one), values(two)
    assert ours.keys() == theirs.keys()
    relative = [
        (torch.linalg.vector_norm(ours[name] - theirs[name]) / torch.linalg.vector_norm(ours[name]).clamp(min=1e-3))
        for name in ours
    ]
    return float(torch.stack(relative).max())


class Tunable(Classifier):
    """For sweeps: its hyperparameters are numbers in its config."""

    def optimizer(self, config: dict[str, Any]) -> OptimizerSpec:
        return SGD(lr=config["lr"], momentum=config.get("momentum", 0.0), clip_norm=1.0)


class Light(Classifier):
    """Batch normalization and dropout with few operations, and iterations of two batches."""

    iteration_batches = 2
    evaluate = FusedTrainable.evaluate

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), Dropout(config["p"]), nn.Linear(4, 5)
        ).double()

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x, y = images(20)
        return TensorData([x.double(), y], batch_size=6, seed=seed, drop_last=True)
