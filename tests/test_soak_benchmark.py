"""Short runs of the soak benchmark: what the driver keeps per trial, and how many descriptors are open."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

from soak import CONCURRENT, GOAL, measure_apart

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).resolve().parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))


def assert_nothing_grows(figures: dict[str, Any], spare: int = 2) -> None:
    """Descriptors may differ by ``spare``: a lane may be starting at one sample."""
    assert figures["own_bytes_per_trial"] <= GOAL, figures["own_bytes_per_trial_by_line"]
    for kind in ("descriptors", "most_descriptors_below", "processes_below"):
        before, after = figures[kind]
        assert after <= before + spare, kind


def test_a_driver_keeps_nothing_of_trials_that_are_forgotten() -> None:
    figures = measure_apart("traced", 600)
    assert sum(figures["ended"].values()) >= 600
    assert figures["ended"]["FAILED"] == 6  # Five raise, and one ends its lane.
    assert_nothing_grows(figures)


@pytest.mark.long
@pytest.mark.ray
def test_fluid_keeps_little_of_trials_under_ray_tune() -> None:
    pytest.importorskip("ray")
    figures = measure_apart("tune", 240)
    assert figures["ended"] == {"TERMINATED": 240}
    # Tune's loggers keep four files open for each live trial; one that stayed open for each would make hundreds.
    assert_nothing_grows(figures, spare=4 * CONCURRENT)
