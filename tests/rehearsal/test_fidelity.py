"""A sweep of real processes and its rehearsal: the same decisions, and about the same makespan."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.rehearsal import RehearsalPlan, recorded, rehearsing
from fluid.rehearsal.outcome import SweepOutcome, outcome_of
from fluid.search import uniform

pytestmark = pytest.mark.slow


def train(config: dict[str, Any]) -> Any:
    for step in range(1, 10):
        time.sleep(0.1)
        yield {"loss": config["lr"] + 1.0 / step}


def played(folder: Path, algorithm: str) -> SweepOutcome:
    options: dict[str, Any] = {"backend": "local", "devices": 2, "max_packing": 1, "run_dir": folder, "verbose": 0}
    with fluid.FluidExecutor(**options) as executor:
        found = fluid.run(
            train,
            {"lr": uniform(0.0, 1.0)},
            metric="loss",
            mode="min",
            samples=6,
            algorithm=algorithm,
            budget=9,
            seed=3,
            executor=executor,
        )
    return outcome_of(found.run_dir)


def decisions(outcome: SweepOutcome) -> dict[str, tuple[Any, ...]]:
    return {trial.trial_id: (dict(trial.config), trial.state, trial.iterations) for trial in outcome.played}


@pytest.mark.parametrize("algorithm", ["random", "sha"])
def test_a_rehearsal_decides_as_the_real_run_did(algorithm: str, tmp_path: Path) -> None:
    real = played(tmp_path / "real", algorithm)
    source = recorded(tmp_path / "real")
    with rehearsing(RehearsalPlan(source=source, overheads=source.overheads)):
        rehearsed = played(tmp_path / "rehearsed", algorithm)
    assert decisions(rehearsed) == decisions(real)
    assert rehearsed.results == real.results
    assert rehearsed.best == real.best
    # Beside other tests, each trial's process starts several times as slowly as the recorded ones in the median.
    assert 0.25 * real.makespan_s < rehearsed.makespan_s < 1.4 * real.makespan_s
