"""The trials of packing.py: small models on synthetic tensors, and one that mostly waits for its input.

An iteration is a few training steps, ended by a value that comes back from the device. PyTorch is imported when a trial
is set up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

#: Name to description.
WORKLOADS = {
    "cnn": "three convolutions on 32 x 32 images",
    "lstm": "language model, one LSTM layer on 35 words",
    "dcgan": "generator and discriminator of 32 x 32 images",
    "mlp": "a perceptron of one layer, whose steps are mostly launches of kernels",
    "wide": "matrices that fill a GPU",
    "input": "the cnn on 4 images, after a wait of 30 ms for them",
}
#: Seconds that the last of them waits for its input in each iteration.
INPUT_WAIT_S = 0.03


class Workload:
    """A trial, for Fluid and without it.

    The config: ``name``, one of :data:`WORKLOADS`; ``scale``, a factor of the widths of layers; ``steps``, training
    steps an iteration; ``seed``.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Makes the model and its input."""
        import torch

        self._wait = INPUT_WAIT_S if config["name"] == "input" else 0.0
        self._steps = 1 if config["name"] == "input" else int(config["steps"])
        if not torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            torch.set_num_threads(1)  # A device is one core.
            device = torch.device("cpu")
        else:
            device = torch.device("cuda")
        torch.manual_seed(int(config["seed"]))
        make = {"cnn": _cnn, "lstm": _lstm, "dcgan": _dcgan, "mlp": _mlp, "wide": _wide, "input": _few_images}[
            config["name"]
        ]
        self._train: Callable[[], Any] = make(torch, device, int(config["scale"]))

    def step(self) -> dict[str, float]:
        """Runs an iteration."""
        if self._wait:
            time.sleep(self._wait)
        for _ in range(self._steps):
            loss = self._train()
        return {"loss": float(loss)}  # Waits for the device.


def _cnn(torch: Any, device: Any, scale: int, batch: int = 32) -> Callable[[], Any]:
    nn, width = torch.nn, 8 * scale
    layers: list[Any] = []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 16, 10)).to(device)
    images = torch.randn(batch, 3, 32, 32).to(device)
    labels = torch.randint(0, 10, (batch,)).to(device)
    return _supervised(torch, model, lambda: nn.functional.cross_entropy(model(images), labels))


def _few_images(torch: Any, device: Any, scale: int) -> Callable[[], Any]:
    return _cnn(torch, device, scale, batch=4)


def _perceptron(torch: Any, device: Any, batch: int, features: int, width: int) -> Callable[[], Any]:
    nn = torch.nn
    model = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 10)).to(device)
    x, y = torch.randn(batch, features).to(device), torch.randint(0, 10, (batch,)).to(device)
    return _supervised(torch, model, lambda: nn.functional.cross_entropy(model(x), y))


def _mlp(torch: Any, device: Any, scale: int) -> Callable[[], Any]:
    return _perceptron(torch, device, 32, 64, 32 * scale)


def _wide(torch: Any, device: Any, scale: int) -> Callable[[], Any]:
    return _perceptron(torch, device, 64 * scale**2, 64 * scale**2, 64 * scale**2)


def _lstm(torch: Any, device: Any, scale: int) -> Callable[[], Any]:
    nn, width, words, batch, length = torch.nn, 32 * scale, 1000, 16, 35
    embedding, lstm, head = nn.Embedding(words, width), nn.LSTM(width, width, batch_first=True), nn.Linear(width, words)
    model = nn.ModuleList([embedding, lstm, head]).to(device)
    text = torch.randint(0, words, (batch, length + 1)).to(device)

    def loss() -> Any:
        hidden, _ = lstm(embedding(text[:, :-1]))
        return nn.functional.cross_entropy(head(hidden).flatten(0, 1), text[:, 1:].flatten())

    return _supervised(torch, model, loss)


def _supervised(torch: Any, model: Any, loss: Callable[[], Any]) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train() -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return train


def _dcgan(torch: Any, device: Any, scale: int) -> Callable[[], Any]:
    nn, width, noise, batch = torch.nn, 8 * scale, 64, 16
    generator = nn.Sequential(
        nn.ConvTranspose2d(noise, 4 * width, 4),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
        nn.Tanh(),
    ).to(device)
    discriminator = nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
        nn.BatchNorm2d(4 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4 * width, 1, 4),
        nn.Flatten(0),
    ).to(device)
    models = (generator, discriminator)
    makes, judges = (torch.optim.Adam(model.parameters(), 2e-4, (0.5, 0.999)) for model in models)
    real = torch.randn(batch, 3, 32, 32).tanh().to(device)
    ones, zeros = torch.ones(batch, device=device), torch.zeros(batch, device=device)
    judge_loss = nn.functional.binary_cross_entropy_with_logits

    def train() -> Any:
        fake = generator(torch.randn(batch, noise, 1, 1, device=device))
        judges.zero_grad(set_to_none=True)
        loss = judge_loss(discriminator(real), ones) + judge_loss(discriminator(fake.detach()), zeros)
        loss.backward()
        judges.step()
        makes.zero_grad(set_to_none=True)
        judge_loss(discriminator(fake), ones).backward()
        makes.step()
        return loss.detach()

    return train
