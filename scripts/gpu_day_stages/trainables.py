"""The trials of the stages of sweeps and of fusing. Their metrics say in which process they ran, and how."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fluid.fused import SGD, AdamW, Dropout, FusedTrainable, TensorData

BATCHES, BATCH = 40, 32


def where() -> dict[str, int]:
    """Facts of this process, as metrics."""
    return {
        "pid": os.getpid(),
        "mps": int(bool(os.environ.get("CUDA_MPS_PIPE_DIRECTORY"))),
        "cuda": int(torch.cuda.is_available() and torch.cuda.is_initialized()),
    }


class Net(FusedTrainable):
    """A perceptron on synthetic data: fused where packing allows it, else an ordinary trial."""

    iteration_batches = BATCHES

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def optimizer(self, config: dict[str, Any]) -> SGD:
        return SGD(lr=config["lr"], momentum=0.9)

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x = torch.randn(BATCHES * BATCH, 64, generator=torch.Generator().manual_seed(0))
        return TensorData([x, x[:, :10].argmax(-1)], batch_size=BATCH, seed=seed)

    def summarize(self, means: dict[str, float]) -> dict[str, Any]:
        return {**means, **where()}


class Dropping(Net):
    """The same with a Dropout, whose masks are each row's own."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), Dropout(0.1), nn.Linear(128, 10))


def configs(count: int) -> list[dict[str, Any]]:
    return [{"lr": 0.01 * 1.03**number, "seed": number} for number in range(count)]


def regression(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The shortest kind of trainable: a generator of metrics, with a model on the device of the trial."""
    torch.manual_seed(config["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Linear(64, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).to(device)
    y = x[:, :1] - x[:, 1:2]
    while True:
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        yield {"loss": float(loss), **where()}


# --- Kinds of nets: on a GPU other kernels are dispatched than on a CPU, so other nets may not fuse there.


class Attention(nn.Module):
    """Attention by PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(8, 32), nn.Linear(32, 96), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.unflatten(-1, (8, 8)))
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(-2, -3) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head((x + mixed.transpose(-2, -3).flatten(-2)).mean(-2))


class Multihead(nn.Module):
    """Attention by PyTorch's module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.unflatten(-1, (8, 8)))
        return self.head((x + self.attend(x, x, x, need_weights=False)[0]).mean(-2))


class Text(nn.Module):
    """An embedding of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed((x.abs() * 10).long().clamp(max=49)).mean(-2))


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.unflatten(-1, (8, 8)))[0][:, -1])


def images(norm: Callable[[int], nn.Module], groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, groups=groups),
        norm(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)),
    "CNN, BatchNorm": lambda: images(nn.BatchNorm2d),
    "CNN, GroupNorm": lambda: images(lambda width: nn.GroupNorm(4, width)),
    "CNN, depthwise": lambda: images(nn.BatchNorm2d, groups=8),
    "attention, SDPA": Attention,
    "MultiheadAttention": Multihead,
    "Embedding": Text,
    "LSTM": Recurrent,
    "MLP in bfloat16": lambda: NETS["MLP"]().bfloat16(),
}


class OfNet(Net):
    """One of the nets."""

    iteration_batches = 4

    def build(self, config: dict[str, Any]) -> nn.Module:
        return NETS[config["net"]]()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)

    def optimizer(self, config: dict[str, Any]) -> AdamW:
        return AdamW(lr=0.001)


class Autocast(OfNet):
    """One of the nets, computed in bfloat16."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return nn.functional.cross_entropy(model(x), y)
