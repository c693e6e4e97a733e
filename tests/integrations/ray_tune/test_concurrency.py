"""How many trials of a sweep are under way at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.tune")

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from fluid.integrations.ray_tune import FluidScheduler

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def test_a_trial_that_goes_on_after_a_rung_keeps_its_place(cluster: str, executor: Any, tmp_path: Path) -> None:
    under_way: set[str] = set()
    most = []

    class Watch(tune.Callback):  # type: ignore[misc]
        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            under_way.add(trial.trial_id)
            most.append(len(under_way))

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            under_way.discard(trial.trial_id)

    def train(config: dict[str, Any]) -> None:
        for step in range(9):
            tune.report({"score": config["x"] * (step + 1)})

    asha = ASHAScheduler(metric="score", mode="max", max_t=9, grace_period=1, reduction_factor=3)
    analysis = tune.run(
        train,
        config={"x": tune.grid_search(list(range(8, 0, -1)))},
        scheduler=FluidScheduler(asha, executor, concurrency=2),
        callbacks=[Watch()],
        storage_path=str(tmp_path),
        verbose=0,
    )
    assert all(trial.status == "TERMINATED" for trial in analysis.trials)
    assert max(trial.last_result["training_iteration"] for trial in analysis.trials) == 9
    assert max(most) <= 2  # Fewer if the second lane becomes warm only after the first has run them all.
