"""A network like AlexNet that classifies the images of CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from models.data import Split, load_cifar10
from models.trial import SweptTrial, shrunk
from torch import nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 64
#: Most pixels by which an image is shifted, each way.
_MOVED = 4
#: Images per forward pass of a validation.
_AT_ONCE = 1000
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def alexnet(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> nn.Sequential:
    """Six convolutions in three blocks, each of which halves the image, and three linear layers.

    Args:
        config: ``conv_1``, ``conv_2`` and ``dense_1``, widths of layers; ``dropout_1`` and ``dropout_2``.
        fixed: ``shrink``, the divisor of all widths.
    """
    first, one, two, three, last = (
        shrunk(width, fixed) for width in (32, config["conv_1"], config["conv_2"], 128, 256)
    )
    dense, penultimate = (shrunk(width, fixed) for width in (config["dense_1"], 512))

    def block(inputs: int, middle: int, outputs: int) -> list[nn.Module]:
        into, out_of = nn.Conv2d(inputs, middle, 3, padding=1), nn.Conv2d(middle, outputs, 3, padding=1)
        return [into, nn.BatchNorm2d(middle), nn.ReLU(), out_of, nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *block(3, first, one),
        *block(one, two, three),
        nn.Dropout2d(config["dropout_1"]),
        *block(three, last, last),
        nn.Flatten(),
        nn.Dropout(config["dropout_2"]),
        nn.Linear(16 * last, dense),
        nn.ReLU(),
        nn.Linear(dense, penultimate),
        nn.ReLU(),
        nn.Dropout(config["dropout_2"]),
        nn.Linear(penultimate, 10),
    )


def cropped_and_flipped(images: torch.Tensor) -> torch.Tensor:
    """Shifts each of the images ``(n, channels, size, size)`` a little, and mirrors half of them, at random."""
    count, channels, size, _ = images.shape
    device = images.device
    padded = F.pad(images, (_MOVED,) * 4)
    corners = torch.randint(0, 2 * _MOVED + 1, (count, 2), device=device)
    along = torch.arange(size, device=device)
    rows, columns = corners[:, :1] + along, corners[:, 1:] + along
    columns = torch.where(torch.rand(count, 1, device=device) < 0.5, columns.flip(1), columns)
    which = torch.arange(count, device=device)[:, None, None, None]
    colour = torch.arange(channels, device=device)[None, :, None, None]
    return padded[which, colour, rows[:, None, :, None], columns[:, None, None, :]]


class Cifar10(SweptTrial):
    """Trains :func:`alexnet` by SGD; reports ``loss`` and, on held-out images, ``accuracy``.

    Its config also has ``lr`` and ``momentum``, and under ``fixed`` ``data``, ``seed`` and ``images``, how many to
    train on.
    """

    def build_model(self, config: dict[str, Any], fixed: dict[str, Any]) -> None:
        data = load_cifar10(fixed["data"], fixed["images"])
        (images, labels), self.validation = self._tensors(data.train), self._tensors(data.validation)
        self.shift, self.stretch = (
            torch.tensor(value, device=self.device).view(3, 1, 1) for value in (_MEAN, _DEVIATION)
        )
        self.model = self.sync_batch_norm(alexnet(config, fixed).to(self.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"], momentum=config["momentum"])
        self.loader = self.make_loader(TensorDataset(images, labels), batch_size=BATCH_SIZE, seed=self.seed)

    def set_rates(self) -> None:
        for group in self.optimizer.param_groups:
            group.update(lr=self.config["lr"], momentum=self.config["momentum"])

    def train_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self._scaled(cropped_and_flipped(images))), labels)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}

    @torch.no_grad()
    def end_iteration(self, metrics: dict[str, float]) -> dict[str, float]:
        self.model.eval()
        means = self.means()
        for images, labels in zip(*(part.split(_AT_ONCE) for part in self.validation), strict=True):
            scores = self.model(self._scaled(self.shard(images)))
            means.add({"accuracy": (scores.argmax(1) == self.shard(labels)).double().mean()}, self.count)
        self.model.train()
        return {**metrics, **means.result()}

    def _tensors(self, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.from_numpy(split.images.copy()).to(self.device)  # As bytes: a quarter of the memory.
        return images, torch.from_numpy(split.labels.astype("int64")).to(self.device)

    def _scaled(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() / 255 - self.shift) / self.stretch
