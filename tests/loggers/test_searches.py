"""Loggers hear the trials of searches by other libraries, as these name them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logger_heard import Heard

from fluid.executor import FluidExecutor

pytestmark = pytest.mark.slow

PATIENCE = 90.0


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1, 100):
        yield {"loss": (config["x"] - 1.0) ** 2 + 1.0 / step}


def test_an_objective_of_optuna(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    from fluid.integrations.optuna import optimize

    def objective(trial: Any) -> float:
        x: float = trial.suggest_float("x", 0.0, 2.0)
        for step in range(3):
            trial.report(x + step, step)
        return x

    heard, study = Heard(), optuna.create_study(study_name="parabola")
    with FluidExecutor("local", 1, run_dir=tmp_path, verbose=0, loggers=[heard]) as executor:
        optimize(study, objective, n_trials=3, executor=executor)
    assert len(heard.trials) == 3 and {each.group for each in heard.trials.values()} == {"parabola"}
    assert set(heard.ends.values()) == {"DONE"}
    params = sorted(trial.params["x"] for trial in study.trials)
    assert sorted(each.config["x"] for each in heard.trials.values()) == params, "told when the trial ends"
    assert all(heard.results.values()) and len(heard.results) == 3


def test_hyperband_of_hpbandster(tmp_path: Path) -> None:
    space = pytest.importorskip("ConfigSpace")
    pytest.importorskip("hpbandster")
    from fluid.integrations.hpbandster import run

    heard = Heard()
    with FluidExecutor("local", 1, run_dir=tmp_path, verbose=0, loggers=[heard]) as executor:
        one = space.ConfigurationSpace({"x": (0.0, 4.0)})
        result = run("HyperBand", one, train, max_budget=9, executor=executor, seed=1)
    assert len(heard.trials) == len(result.get_id2config_mapping()) == 9
    lengths = sorted(len(results) for results in heard.results.values())
    assert lengths == [1, 1, 1, 1, 1, 1, 3, 3, 9], "a configuration that goes on keeps its run"
    for trial_id in heard.trials:
        assert heard.iterations(trial_id) == list(range(1, len(heard.results[trial_id]) + 1))
