"""Seeds the generators of random numbers that libraries of a script use without a seed of their own."""

from __future__ import annotations

import sys

import numpy as np


def seed_draws(seed: int) -> None:
    """Seeds numpy's global generator, Python's, and torch's if torch is loaded.

    Args:
        seed: at least 0.
    """
    np.random.seed(seed)
    sys.modules["random"].seed(seed)  # Numpy has loaded it.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
