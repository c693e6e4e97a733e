"""The trials of predict.py: perceptrons and small convolutional networks on MNIST, whose batch and width vary.

PyTorch is imported when a trial is set up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from fluid import MemoryNeed
from fluid.lane.device.device import ProcessMemoryMeter

BATCHES = (16, 32, 64, 128, 256, 512)
OPTIMIZERS = ("sgd", "adam")
#: Widths of each network.
WIDTHS = {"mlp": (32, 64, 128, 256, 512, 1024), "cnn": (32, 64, 128, 256, 512)}
#: Images in an iteration of each network.
SAMPLES = {"mlp": 4096, "cnn": 1024}
#: The images of this process, by folder: trials that follow one another in a lane share them.
_IMAGES: dict[str | None, tuple[Any, Any]] = {}


def configs(net: str) -> list[dict[str, Any]]:
    """Returns the grid of a network."""
    return [
        {"net": net, "batch_size": batch, "width": width, "optimizer": optimizer}
        for batch in BATCHES
        for width in WIDTHS[net]
        for optimizer in OPTIMIZERS
    ]


def images(data: str | None) -> tuple[Any, Any]:
    """Returns images of 28 x 28 and their labels: MNIST's of a folder with ``mnist-10k.npz``, else random ones."""
    import torch

    if data not in _IMAGES:
        most = max(SAMPLES.values())
        if data:
            with np.load(os.path.join(data, "mnist-10k.npz")) as file:
                pixels, labels = file["images"][:most], file["labels"][:most]
        else:
            rng = np.random.default_rng(0)
            pixels, labels = rng.integers(0, 256, (most, 28, 28)), rng.integers(0, 10, most)
        # Copies: tensors that share memory with NumPy's arrays would keep those alive.
        _IMAGES[data] = torch.tensor(pixels, dtype=torch.float32).div_(255.0), torch.tensor(labels, dtype=torch.long)
    return _IMAGES[data]


class Net:
    """A trial, for Fluid and without it.

    The config: ``net``, "mlp" or "cnn"; ``batch_size``; ``width``, units of each of three hidden layers, or eight times
    the channels of two convolutions; ``optimizer``, "sgd" or "adam". May have ``lr``; ``dropout``; ``seed``; ``data``,
    a folder with ``mnist-10k.npz``; ``samples``, images an iteration.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Makes the model and loads the images."""
        import torch

        torch.set_num_threads(1)  # A device is one core.
        torch.manual_seed(int(config.get("seed", 0)))
        self.images, self.labels = images(config.get("data"))
        net, width, dropout = str(config["net"]), int(config["width"]), float(config.get("dropout", 0.0))
        self.model = _perceptron(width, dropout) if net == "mlp" else _convolutions(width // 8, dropout)
        rate = float(config.get("lr", 1e-3))
        if config["optimizer"] == "adam":
            self.optimizer: Any = torch.optim.Adam(self.model.parameters(), rate)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), rate)
        self._batch, self._samples = int(config["batch_size"]), int(config.get("samples", SAMPLES[net]))

    def step(self) -> dict[str, float]:
        """Trains on the images once."""
        for loss in self.losses():
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        return {"loss": float(loss.detach())}

    def losses(self) -> Iterator[Any]:
        """Yields the loss of each batch."""
        import torch

        for begin in range(0, self._samples, self._batch):
            batch = slice(begin, begin + self._batch)
            yield torch.nn.functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])

    def save_checkpoint(self, folder: str) -> dict[str, Any]:
        """Saves the model and the optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Loads both."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _perceptron(width: int, dropout: float) -> Any:
    from torch import nn

    layers: list[Any] = [nn.Flatten()]
    for before, after in ((784, width), (width, width), (width, width)):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _convolutions(channels: int, dropout: float) -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * channels * 14 * 14, 10),
    )


def measure(config: dict[str, Any], iterations: int) -> dict[str, Any]:
    """Runs a trial in this process; returns the seconds of its iterations and its memory, in bytes.

    ``seconds`` are those of CPU time: what an iteration takes on a core of its own, though the machine is shared;
    ``wall_seconds`` passed meanwhile. Memory is measured as a lane does on a CPU: ``persistent_bytes`` and
    ``ephemeral_bytes``, the parts of a ``MemoryNeed``. ``counted_bytes`` are those of PyTorch's
    tensors: parameters, gradients, the optimizer's state and what the backward pass keeps.

    Args:
        config: of the trial.
        iterations: how many count; the first is left out of the seconds.
    """
    import time

    meter, trial = ProcessMemoryMeter(), Net()
    images(config.get("data"))
    meter.begin()
    trial.setup(config)
    measured = meter.end()
    held, most = measured[0] if measured else math.nan, MemoryNeed()
    seconds, wall = [], []
    for _ in range(1 + iterations):
        meter.begin()
        begun, used = time.perf_counter(), time.process_time()
        trial.step()
        seconds.append(time.process_time() - used)
        wall.append(time.perf_counter() - begun)
        measured = meter.end()
        if measured:
            held += measured[0]
            persistent, ephemeral = max(0.0, held), max(0.0, measured[1])
            most = MemoryNeed(max(most.persistent_bytes, persistent), max(most.ephemeral_bytes, ephemeral))
    return {
        "config": config,
        "seconds": seconds[1:],
        "wall_seconds": wall[1:],
        "persistent_bytes": most.persistent_bytes,
        "ephemeral_bytes": most.ephemeral_bytes,
        "counted_bytes": counted_bytes(trial),
    }


def counted_bytes(trial: Net) -> int:
    """Bytes of a trial's tensors once it has trained: see :func:`measure`."""
    import torch

    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def count(tensor: Any) -> int:
        return int(tensor.numel() * tensor.element_size())

    parameters = list(trial.model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        next(trial.losses())
    for tensor in (*parameters, trial.images, trial.labels):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    states = [value for state in trial.optimizer.state.values() for value in state.values()]
    return (
        sum(kept.values())
        + 2 * sum(count(parameter) for parameter in parameters)
        + sum(count(state) for state in states if isinstance(state, torch.Tensor))
    )
