"""Seeds of what libraries draw without a seed of their own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fluid.rehearsal.seeding import seed_draws, seeded_draws


def drawn() -> tuple[float, float]:
    return random.random(), float(np.random.random())


def test_seeded_draws_leave_the_generators_as_they_were() -> None:
    seed_draws(5)
    drawn()
    expected = drawn()
    seed_draws(5)
    drawn()
    with seeded_draws(0):
        first = drawn()
    with pytest.raises(ValueError, match="within"), seeded_draws(1):
        assert drawn() != first
        raise ValueError("within")
    with seeded_draws(0):
        assert drawn() == first
    assert drawn() == expected
