"""A network like AlexNet that classifies the images of CIFAR-10."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from models.data import Split, load_cifar10
from models.trial import FIXED, generator_for, now, plain, shrunk
from torch import nn

import fluid
from fluid.fused import SGD, Dropout, FusedTrainable, TensorData

BATCH_SIZE = 64
#: Most pixels by which an image is shifted, each way.
_MOVED = 4
#: Images per forward pass of a validation.
_AT_ONCE = 1000
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Standardized(nn.Module):
    """Scales images of bytes to about mean 0 and deviation 1 in each colour."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(_MEAN).view(3, 1, 1))
        self.register_buffer("deviation", 255 * torch.tensor(_DEVIATION).view(3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images - self.mean) / self.deviation


class Dropout2d(Dropout):
    """``nn.Dropout2d``, which drops whole maps, with masks of each trial's own."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return maps * super().forward(torch.ones_like(maps[:, :, :1, :1]))


def alexnet(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> nn.Sequential:
    """Six convolutions in three blocks, each of which halves the image of bytes, and three linear layers.

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
        Standardized(),
        *block(3, first, one),
        *block(one, two, three),
        Dropout2d(config["dropout_1"]),
        *block(three, last, last),
        nn.Flatten(),
        Dropout(config["dropout_2"]),
        nn.Linear(16 * last, dense),
        nn.ReLU(),
        nn.Linear(dense, penultimate),
        nn.ReLU(),
        Dropout(config["dropout_2"]),
        nn.Linear(penultimate, 10),
    )


def cropped_and_flipped(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shifts each of the images ``(n, channels, size, size)`` a little, and mirrors half of them, at random."""
    count, channels, size, _ = images.shape
    device = images.device
    padded = F.pad(images, (_MOVED,) * 4)
    corners = torch.randint(0, 2 * _MOVED + 1, (count, 2), generator=generator, device=device)
    along = torch.arange(size, device=device)
    rows, columns = corners[:, :1] + along, corners[:, 1:] + along
    is_mirrored = torch.rand(count, 1, generator=generator, device=device) < 0.5
    columns = torch.where(is_mirrored, columns.flip(1), columns)
    which = torch.arange(count, device=device)[:, None, None, None]
    colour = torch.arange(channels, device=device)[None, :, None, None]
    return padded[which, colour, rows[:, None, :, None], columns[:, None, None, :]]


class Augmented(TensorData):
    """Images and labels; the images of each batch are moved at random, which follows from the seed."""

    def train_batches(self, epoch: int, start: int) -> Iterator[tuple[torch.Tensor, ...]]:
        for number, (images, labels) in enumerate(super().train_batches(epoch, start), start):
            yield cropped_and_flipped(images, generator_for(images.device, self.seed, epoch, number)), labels


class Cifar10(FusedTrainable):
    """Trains :func:`alexnet` by SGD; reports ``loss`` and, on held-out images, ``accuracy``.

    Its config also has ``lr``, ``momentum`` and ``seed``, and under ``fixed`` ``data``, and ``images``, how many to
    train on. Trials that differ in ``lr``, ``momentum``, dropout and seed only can be fused.
    """

    def build(self, config: dict[str, Any]) -> nn.Module:
        torch.set_num_threads(1)  # A trial has one core; more threads would compete for it.
        return self.sync_batch_norm(alexnet(plain(config), config[FIXED]))

    def optimizer(self, config: dict[str, Any]) -> SGD:
        return SGD(lr=float(config["lr"]), momentum=float(config["momentum"]))

    def data(self, config: dict[str, Any], seed: int) -> Augmented:
        train, validation = fluid.shared(load_tensors, config[FIXED]["data"], config[FIXED]["images"])
        return Augmented(train, validation, batch_size=BATCH_SIZE, evaluation_batch_size=_AT_ONCE, seed=seed)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        return {"accuracy": (model(images).argmax(1) == labels).double().mean()}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, **now()}


def load_tensors(folder: str, count: int | None) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Returns images and labels for training, and held-out ones; see :func:`models.data.load_cifar10`."""
    images = load_cifar10(folder, count)
    return _tensors(images.train), _tensors(images.validation)


def _tensors(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(split.images.copy())  # As bytes: a quarter of the memory.
    return images, torch.from_numpy(split.labels.astype("int64"))
