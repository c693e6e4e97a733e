"""A study and sweeps of fluid.run share an executor, which the last of them closes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna

import fluid
from fluid import Device, FluidExecutor
from fluid.integrations.optuna import optimize

pytestmark = pytest.mark.slow

PATIENCE = 120.0


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    for step in range(1, 10):
        time.sleep(config.get("seconds", 0.01))
        if config.get("fails"):
            raise RuntimeError("went wrong on purpose")
        yield {"loss": config["x"] / step}


def objective(trial: Any) -> float:
    time.sleep(0.2)
    return float(trial.suggest_float("x", 0.0, 1.0))


def test_a_study_and_sweeps_share_an_executor_whatever_becomes_of_one(tmp_path: Path) -> None:
    devices = [Device(0, memory_bytes=8e9), Device(1, memory_bytes=2e9)]
    executor = FluidExecutor("local", devices, run_dir=tmp_path / "run", verbose=0, max_failures=0)
    study = optuna.create_study()

    def sweep(samples: int, **fixed: Any) -> Any:
        space = {"x": fluid.search.uniform(0.0, 1.0), **fixed}
        shape: dict[str, Any] = {"metric": "loss", "mode": "min", "samples": samples, "budget": 3}
        return fluid.run(train, space, executor=executor, **shape)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(optimize, study, objective, n_trials=12, executor=executor)
        while not executor.handles:
            time.sleep(0.01)
        others = [threads.submit(sweep, 4), threads.submit(sweep, 2, fails=True)]
        assert len(others[0].result(PATIENCE).trials) == 4
        assert isinstance(others[1].exception(PATIENCE), Exception)
        assert not first.done() and not executor.closed
        first.result(PATIENCE)
    assert len([trial for trial in study.trials if trial.value is not None]) == 12
    assert executor.closed
