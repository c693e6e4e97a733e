"""Seeds the generators of random numbers that libraries of a script use without a seed of their own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

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


@contextlib.contextmanager
def seeded_draws(seed: int) -> Iterator[None]:
    """Seeds numpy's global generator and Python's; at the end, both go on from where they were.

    Args:
        seed: at least 0.
    """
    python = sys.modules["random"]
    before = np.random.get_state(), python.getstate()
    np.random.seed(seed)
    python.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before[0])
        python.setstate(before[1])
