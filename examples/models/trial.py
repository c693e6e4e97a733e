"""What the trials of the three sweeps have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

#: The entry of a config with everything that is neither tuned nor the seed: ``data``, and the sizes of a scale.
FIXED = "fixed"
#: Reported with every result: when the iteration ended, seconds since the epoch.
ENDED = "ended_s"


def tuned(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a config."""
    return {name: value for name, value in config.items() if name not in (FIXED, "seed")}


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without NumPy numbers: PyTorch does not accept them as the size of a layer."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in config.items()}


def shrunk(width: int, fixed: Mapping[str, Any]) -> int:
    """Returns the width of a layer at the scale of the sweep."""
    return max(1, width // fixed["shrink"])


def now() -> dict[str, float]:
    """Returns the time as a metric."""
    return {ENDED: time.time()}


def generator_for(device: torch.device, *numbers: int) -> torch.Generator:
    """Makes a generator of random numbers that follow from these numbers, such as seed, epoch and batch."""
    (word,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(word))
