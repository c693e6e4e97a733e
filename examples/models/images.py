"""Small images, and a convolutional network that classifies them, as a Ray Tune class trainable."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from models.data import read_cifar10
from ray import tune
from torch import nn

import fluid

#: One training image in so many is held out for comparing configurations.
_HELD_OUT = 6
#: Images per forward pass of a validation.
_AT_ONCE = 1000


class Split(NamedTuple):
    """Images of shape ``(n, channels, size, size)``, as floats around 0, and their labels from 0 to 9."""

    images: torch.Tensor
    labels: torch.Tensor


class Images(NamedTuple):
    """Images for training, for comparing configurations, and for testing the chosen one."""

    train: Split
    validation: Split
    test: Split


def load_images(folder: str | None) -> Images:
    """Loads a data set.

    Args:
        folder: a folder with CIFAR-10, as ``cifar10-10k.npz`` or in ``cifar-10-batches-py``; ``None`` for the
            handwritten digits that come with scikit-learn.

    Raises:
        FileNotFoundError: there is no CIFAR-10 in the folder.
    """
    x_train, y_train, x_test, y_test = _digits() if folder is None else read_cifar10(Path(folder))
    mean, deviation = x_train.mean(), x_train.std()

    def split(images: np.ndarray, labels: np.ndarray) -> Split:
        scaled = (images.astype(np.float32) - mean) / deviation
        return Split(torch.from_numpy(scaled.astype(np.float32)), torch.from_numpy(labels.astype(np.int64)))

    held_out = np.arange(len(x_train)) % _HELD_OUT == 0
    return Images(
        split(x_train[~held_out], y_train[~held_out]),
        split(x_train[held_out], y_train[held_out]),
        split(x_test, y_test),
    )


def _digits() -> tuple[np.ndarray, ...]:
    """Returns 1,797 handwritten digits of 8 x 8 pixels, one in five of them for the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    images, labels = digits.images[order][:, None], digits.target[order]
    tested = len(order) // 5
    return images[tested:], labels[tested:], images[:tested], labels[:tested]


def network(colours: int, size: int, channels: int, dropout: float) -> nn.Sequential:
    """Returns convolutions from ``channels`` maps on that halve the image down to 2 x 2, and one linear layer."""
    layers: list[nn.Module] = []
    inputs, outputs = colours, channels
    while size > 2:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        inputs, outputs, size = outputs, 2 * outputs, size // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(inputs * size * size, 10))


class ImageTrial(tune.Trainable):  # type: ignore[misc]
    """Trains one network; one iteration is a pass over the training images.

    Its config has ``lr``, ``momentum``, ``weight_decay``, ``batch_size``, ``channels``, ``dropout``, ``seed`` and
    ``data``, the folder for :func:`load_images`.
    """

    def setup(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)  # A trial has one core; more threads would compete for it.
        torch.manual_seed(config["seed"])
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        images = fluid.shared(load_images, config["data"])  # Loaded once per machine; all trials map it.
        self.images = Images(*(Split(*(t.to(self.device) for t in split)) for split in images))
        colours, size = self.images.train.images.shape[1:3]
        self.model = network(colours, size, config["channels"], config["dropout"]).to(self.device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=config["lr"],
            momentum=config["momentum"],
            weight_decay=config["weight_decay"],
        )
        self.order = torch.Generator().manual_seed(config["seed"])

    def step(self) -> dict[str, float]:
        images, labels = self.images.train
        self.model.train()
        total = 0.0
        for chosen in torch.randperm(len(labels), generator=self.order).split(self.config["batch_size"]):
            picked = chosen.to(self.device)
            loss = nn.functional.cross_entropy(self.model(images[picked]), labels[picked])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(chosen)
        return {
            "loss": total / len(labels),
            "accuracy": self._accuracy(self.images.validation),
            "test_accuracy": self._accuracy(self.images.test),
        }

    @torch.inference_mode()
    def _accuracy(self, split: Split) -> float:
        self.model.eval()
        right = 0
        for images, labels in zip(split.images.split(_AT_ONCE), split.labels.split(_AT_ONCE), strict=True):
            right += int((self.model(images).argmax(1) == labels).sum())
        return right / len(split.labels)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.get_state(),
            "dropout": torch.get_rng_state(),
        }
        torch.save(state, Path(checkpoint_dir) / "state.pt")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        state = torch.load(Path(checkpoint_dir) / "state.pt", map_location="cpu")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"])
        torch.set_rng_state(state["dropout"])
