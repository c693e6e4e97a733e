"""Random numbers of a trial's own, drawn from its seed; the global generators stay as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from fluid.errors import require_integer
from fluid.trainables.driver_link import in_trial


class Purpose(IntEnum):
    """What random numbers are for: those of one purpose do not depend on how many others were drawn."""

    MODEL = 0
    ORDER = 1
    DROPOUT = 2


def seed_of(config: Mapping[str, Any]) -> int:
    """Returns the seed of a trial that is about to be made: its config's, else its own in a session, else 0."""
    if "seed" in config:
        return require_integer("seed", config["seed"], at_least=0)
    return torch.initial_seed() if in_trial() else 0  # The lane has seeded PyTorch's generator.


def own_seed(seed: int, purpose: Purpose, *numbers: int) -> int:
    """Returns a seed of 63 bits for a generator, made of a trial's seed, the purpose and, say, the epoch."""
    # Not their sum: the numbers of one trial would be those of the next, shifted by one.
    (word,) = np.random.SeedSequence([seed, int(purpose), *numbers]).generate_state(1, np.uint64)
    return int(word) % 2**63


def own_generator(device: torch.device | str, seed: int, purpose: Purpose, *numbers: int) -> torch.Generator:
    """Makes a generator on a device, seeded by :func:`own_seed`."""
    generator = torch.Generator(device=device)
    generator.manual_seed(own_seed(seed, purpose, *numbers))
    return generator


@contextmanager
def global_random_state_kept() -> Iterator[None]:
    """Restores the global generators of Python, NumPy and PyTorch at the end of the block."""
    python = sys.modules["random"]  # PyTorch has loaded it.
    of_python, of_numpy, of_torch = python.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        python.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
