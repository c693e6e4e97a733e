"""A generative adversarial network for handwritten digits, and a classifier that scores the generated images."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from models.data import cache_folder, load_mnist
from models.trial import FIXED, generator_for, now, shrunk
from torch import nn
from torch.func import functional_call

import fluid
from fluid.fused import Adam, FusedTrainable, TensorData

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
    with torch.random.fork_rng(devices=[]):  # A trial's random numbers must not depend on whether it is kept already.
        model = classifier()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval().requires_grad_(False).to(device)


def load_digits(folder: str) -> torch.Tensor:
    """Returns the digits as bytes ``(n, 1, 28, 28)``; see :func:`models.data.load_mnist`."""
    return _images(load_mnist(folder).images)


def _images(digits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(digits.copy())


def _enlarged(digits: torch.Tensor) -> torch.Tensor:
    """Converts digits of 28 x 28 bytes into images of 32 x 32 numbers from -1 to 1."""
    return F.interpolate(digits.float() / 127.5 - 1.0, size=_SIZE, mode="bilinear", align_corners=False)


# -- the trial ------------------------------------------------------------------------------------------------


class WithNoise(TensorData):
    """Digits; a batch has as many images of 32 x 32, and random numbers to generate others from."""

    def train_batches(self, epoch: int, start: int) -> Iterator[tuple[torch.Tensor, ...]]:
        for number, (digits,) in enumerate(super().train_batches(epoch, start), start):
            random = generator_for(digits.device, self.seed, epoch, number)
            noise = torch.randn(len(digits), _LATENT, 1, 1, generator=random, device=digits.device)
            yield _enlarged(digits), noise


class Dcgan(FusedTrainable):
    """Trains :func:`generator` and :func:`discriminator` by Adam; reports ``loss``, the sum of their losses, and
    ``inception``, the inception score of generated images.

    Its config has ``netG_lr``, ``netD_lr`` and ``seed``, none of which keeps trials from being fused; under ``fixed``
    ``data``, ``classifier``, ``shrink``, ``batch``, images of a batch, ``batches`` of an iteration (``None`` for all
    images) and ``scored``, how many generated images are scored.
    """

    def build(self, config: dict[str, Any]) -> nn.Module:
        torch.set_num_threads(1)  # A trial has one core; more threads would compete for it.
        fixed = config[FIXED]
        self.iteration_batches = fixed["batches"]
        self.classifier = fixed["classifier"]
        load_classifier(self.classifier, str(self.device))  # Now: to make a network is not pure, as evaluate() is.
        maps = shrunk(_FEATURES, fixed)
        return self.sync_batch_norm(nn.ModuleDict({"D": discriminator(maps), "G": generator(maps)}))

    def optimizer(self, config: dict[str, Any]) -> Adam:
        return Adam(lr={"D": float(config["netD_lr"]), "G": float(config["netG_lr"])}, betas=_BETAS)

    def data(self, config: dict[str, Any], seed: int) -> WithNoise:
        fixed = config[FIXED]
        digits = fluid.shared(load_digits, fixed["data"])
        # All trials score images of the same random numbers, at every iteration.
        scored = torch.randn(fixed["scored"], _LATENT, 1, 1, generator=generator_for(digits.device, 0))
        return WithNoise(
            [digits], [scored], batch_size=fixed["batch"], evaluation_batch_size=_AT_ONCE, seed=seed, drop_last=True
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Each network learns from its own loss: the other one is a constant in it."""
        images, noise = batch
        draw, judge = model["G"], model["D"]
        drawn = draw(noise)
        loss_d = _loss(judge(images), 1.0) + _loss(judge(drawn.detach()), 0.0)
        constants = {name: parameter.detach() for name, parameter in judge.named_parameters()}
        loss_g = _loss(functional_call(judge, constants, (drawn,)), 1.0)
        return loss_d + loss_g

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Returns what the score is made of: how sure the classifier is, and the share of each digit."""
        classifier = load_classifier(self.classifier, str(self.device))
        odds = F.log_softmax(classifier(model["G"](batch[0])).double(), dim=1)
        shares = odds.exp().mean(0)
        return {"sure": (odds.exp() * odds).sum(1).mean(), **{f"{digit}": shares[digit] for digit in range(10)}}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Returns the inception score: the classifier is sure of each image, and unsure of all of them together.

        It is ``exp(mean KL(p(y|x) || p(y)))``, which needs only means over the images (Salimans et al., 2016).
        """
        shares = [means[f"{digit}"] for digit in range(10)]
        together = sum(share * math.log(share) for share in shares if share > 0.0)
        return {"loss": means["loss"], "inception": math.exp(means["sure"] - together), **now()}


def _loss(logits: torch.Tensor, real: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))
