"""A seeded program that optimizes a study draws the same random numbers in each run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.seeded_programs import two_runs

pytestmark = pytest.mark.slow

optuna = pytest.importorskip("optuna")

PROGRAM = """
import random
import numpy as np, optuna
from fluid.integrations.optuna import optimize
optuna.logging.set_verbosity(optuna.logging.ERROR)

def objective(trial):
    return trial.suggest_float("x", 0, 1) + np.random.normal() + random.random()

if __name__ == "__main__":
    random.seed(0), np.random.seed(0)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(2):  # The second call goes on with other numbers, in an executor of its own.
        optimize(study, objective, n_trials=3, n_jobs=1)
    for trial in study.trials:
        print(trial.value - trial.params["x"])
"""


def test_two_runs_have_the_same_values(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    first, second = two_runs(program)
    assert first == second
    assert len(set(first)) == 6
