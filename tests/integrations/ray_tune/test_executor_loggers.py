"""Loggers of the executor under Ray Tune, beside Tune's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from logger_heard import Heard

from fluid.executor import FluidExecutor

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1, 100):
        yield {"loss": (config["x"] - 1.0) ** 2 + 1.0 / step}


def test_loggers_of_the_executor_hear_the_trials_as_tune_names_them(cluster: str, tmp_path: Path) -> None:
    from ray.tune.schedulers import ASHAScheduler

    from fluid import tune

    heard = Heard()
    with FluidExecutor("local", 1, run_dir=tmp_path / "run", verbose=0, loggers=[heard]) as executor:
        analysis = tune.run(
            train,
            config={"x": tune.grid_search([0.0, 1.0, 2.0, 3.0])},
            scheduler=ASHAScheduler(metric="loss", mode="min", grace_period=1, max_t=4),
            executor=executor,
            storage_path=str(tmp_path / "tune"),
            name="asha",
            verbose=0,
        )
    assert {each.group for each in heard.trials.values()} == {"asha"}
    assert set(heard.trials) == {trial.trial_id for trial in analysis.trials}
    for trial in analysis.trials:
        assert heard.trials[trial.trial_id].config == trial.config
        assert heard.iterations(trial.trial_id) == list(range(1, trial.last_result["training_iteration"] + 1))
        assert heard.results[trial.trial_id][-1].metrics["loss"] == trial.last_result["loss"]
