"""A generative adversarial network for handwritten digits, and a classifier that scores the generated images."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from models.data import cache_folder, load_mnist
from models.trial import FIXED, SweptTrial, shrunk
from torch import nn
from torch.utils.data import TensorDataset

#: Random numbers per generated image, and maps of the layer next to them.
_LATENT, _FEATURES = 100, 32
_BETAS = (0.5, 0.999)
_SIZE = 32
#: Images per forward pass of the scoring.
_AT_ONCE = 250
_CLASSIFIER_EPOCHS = 3


def generator(maps: int) -> nn.Sequential:
    """A network from random numbers ``(n, 100, 1, 1)`` to images ``(n, 1, 32, 32)``."""

    def doubled(inputs: int, outputs: int, stride: int, padding: int) -> list[nn.Module]:
        layer = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)
        return [layer, nn.BatchNorm2d(outputs), nn.ReLU(True)]

    return nn.Sequential(
        *doubled(_LATENT, 4 * maps, 1, 0),
        *doubled(4 * maps, 2 * maps, 2, 1),
        *doubled(2 * maps, maps, 2, 1),
        nn.ConvTranspose2d(maps, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator(maps: int) -> nn.Sequential:
    """A network from images ``(n, 1, 32, 32)`` to the logits of the probability that each is real."""

    def halved(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, True)]

    first = [nn.Conv2d(1, maps, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
    last = [nn.Conv2d(4 * maps, 1, 4, 1, 0, bias=False), nn.Flatten(0)]
    return nn.Sequential(*first, *halved(maps, 2 * maps), *halved(2 * maps, 4 * maps), *last)


# -- the score ------------------------------------------------------------------------------------------------


def classifier() -> nn.Sequential:
    """A network that classifies digits ``(n, 1, 32, 32)``."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_classifier(folder: str) -> str:
    """Trains the classifier that scores generated images, unless its file exists; returns that file.

    The name of the file is a hash of the data and of this module, so a change of either makes another classifier.
    """
    digits = load_mnist(folder)
    digest = hashlib.blake2b(Path(__file__).read_bytes() + digits.images.tobytes() + digits.labels.tobytes())
    path = cache_folder() / f"mnist-classifier-{digest.hexdigest()[:16]}.pt"
    if path.is_file():
        return str(path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # More threads make so small a network slower, and different on each machine.
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _trained(_images(digits.images), torch.from_numpy(digits.labels.astype("int64")))
    finally:
        torch.set_num_threads(threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Moved into place atomically: another sweep may be looking for it.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        torch.save(model.state_dict(), file)
    os.replace(file.name, path)
    return str(path)


def _trained(images: torch.Tensor, labels: torch.Tensor) -> nn.Sequential:
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(_CLASSIFIER_EPOCHS):
        for chosen in torch.randperm(len(labels)).split(100):
            loss = F.cross_entropy(model(_enlarged(images[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@functools.cache
def load_classifier(path: str, device: str) -> nn.Module:
    """Loads the classifier of :func:`train_classifier`; trials of one process share it."""
    model = classifier()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval().requires_grad_(False).to(device)


def _images(digits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(digits.copy())


def _enlarged(digits: torch.Tensor) -> torch.Tensor:
    """Converts digits of 28 x 28 bytes into images of 32 x 32 numbers from -1 to 1."""
    return F.interpolate(digits.float() / 127.5 - 1.0, size=_SIZE, mode="bilinear", align_corners=False)


# -- the trial ------------------------------------------------------------------------------------------------


class Dcgan(SweptTrial):
    """Trains :func:`generator` and :func:`discriminator`, each with its own Adam; reports their losses and
    ``inception``, the inception score of generated images.

    Its config has ``netG_lr`` and ``netD_lr``; under ``fixed`` ``data``, ``classifier``, ``seed``, ``shrink``,
    ``batch``, images of a batch, ``batches`` of an iteration (``None`` for all images) and ``scored``, how many
    generated images are scored.
    """

    def build_model(self, config: dict[str, Any], fixed: dict[str, Any]) -> None:
        maps = shrunk(_FEATURES, fixed)
        self.models = {"G": generator(maps), "D": discriminator(maps)}
        for name, model in self.models.items():
            self.models[name] = self.sync_batch_norm(model.to(self.device))
        self.optimizers = {
            name: torch.optim.Adam(model.parameters(), lr=config[f"net{name}_lr"], betas=_BETAS)
            for name, model in self.models.items()
        }
        digits = _images(load_mnist(fixed["data"]).images).to(self.device)
        self.loader = self.make_loader(TensorDataset(digits), batch_size=fixed["batch"], seed=self.seed, drop_last=True)
        # All trials score images of the same random numbers at every iteration.
        fixed_numbers = torch.Generator().manual_seed(fixed["seed"])
        self.scored = torch.randn(fixed["scored"], _LATENT, 1, 1, generator=fixed_numbers).to(self.device)

    def set_rates(self) -> None:
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self.config[f"net{name}_lr"]

    def train_iteration(self) -> Mapping[str, Any]:
        means = self.means()
        for (digits,) in self.loader.take(self.config[FIXED]["batches"] or len(self.loader)):
            means.add(self.train_batch(_enlarged(digits)), self.count)
        self.replicate_buffers()
        return {**means.result(), "inception": self._score()}

    def train_batch(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        draw, judge = self.models["G"], self.models["D"]
        drawn = draw(torch.randn(len(batch), _LATENT, 1, 1, device=self.device))
        self.optimizers["D"].zero_grad()
        loss_d = _loss(judge(batch), 1.0) + _loss(judge(drawn.detach()), 0.0)
        loss_d.backward()
        self.optimizers["D"].step()
        self.optimizers["G"].zero_grad()
        loss_g = _loss(judge(drawn), 1.0)
        loss_g.backward()
        self.optimizers["G"].step()
        return {"loss_d": loss_d, "loss_g": loss_g}

    @torch.no_grad()
    def _score(self) -> float:
        """Returns the inception score: the classifier is sure of each image, and unsure of all of them together.

        It is ``exp(mean KL(p(y|x) || p(y)))``, which needs only means over the images (Salimans et al., 2016).
        """
        draw = self.models["G"].eval()
        classifier = load_classifier(self.config[FIXED]["classifier"], str(self.device))
        means = self.means()
        for numbers in self.scored.split(_AT_ONCE):
            odds = F.log_softmax(classifier(draw(self.shard(numbers))).double(), dim=1)
            shares = {f"{digit}": share for digit, share in enumerate(odds.exp().mean(0))}
            means.add({"sure": (odds.exp() * odds).sum(1).mean(), **shares}, self.count)
        draw.train()
        found = means.result()
        sure = found.pop("sure")
        together = sum(share * np.log(share) for share in found.values() if share > 0.0)
        return float(np.exp(sure - together))


def _loss(logits: torch.Tensor, real: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))
