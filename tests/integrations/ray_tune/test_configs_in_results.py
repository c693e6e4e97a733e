"""A result's ``config`` is the trainable's own, as without Fluid, also where ``setup`` or ``step`` has changed it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
import ray.tune

from fluid import tune
from fluid.search import schedule

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


class Plain(ray.tune.Trainable):  # type: ignore[misc]
    """Leaves its config alone."""

    def step(self) -> dict[str, Any]:
        return {"loss": self.config["rate"].at(self._iteration), "done": self._iteration >= 1}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "state").touch()

    def load_checkpoint(self, folder: str) -> None:
        pass


class Replaced(Plain):
    def setup(self, config: dict[str, Any]) -> None:
        self.config = {**config, "derived": 10 * config["x"]}


class Mutated(Plain):
    def setup(self, config: dict[str, Any]) -> None:
        self.config["nested"]["derived"] = 10 * config["x"]


class Copied(Plain):
    """Keeps the copy of its config that it is given, and changes it later."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config

    def step(self) -> dict[str, Any]:
        if self._iteration == 1:
            self.config["derived"] = 10 * self.config["x"]
        return super().step()


def run(executor: Any, folder: Path, trainable: type) -> Any:
    config = {"x": 1, "nested": {"y": [2]}, "weights": np.array([1.0, 2.0]), "rate": schedule({0: 1.0, 1: 0.5})}
    options = {"config": config, "storage_path": str(folder), "verbose": 0, "executor": executor}
    return tune.run(trainable, checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True), **options)


CASES: list[tuple[type, Callable[[dict[str, Any]], Any], Any]] = [
    (Replaced, lambda config: config["derived"], [10, 10]),
    (Mutated, lambda config: config["nested"], [{"y": [2], "derived": 10}] * 2),
    (Copied, lambda config: config.get("derived"), [None, 10]),
    (Plain, lambda config: config["nested"], [{"y": [2]}] * 2),
]


@pytest.mark.parametrize(("trainable", "part", "expected"), CASES, ids=lambda case: getattr(case, "__name__", ""))
@pytest.mark.parametrize("on_fluid", [True, False], ids=["fluid", "stock"])
def test_a_result_has_the_config_of_its_trainable(
    cluster: str,
    executor: Any,
    tmp_path: Path,
    trainable: type,
    part: Callable[[dict[str, Any]], Any],
    expected: Any,
    on_fluid: bool,
) -> None:
    (trial,) = run(executor if on_fluid else None, tmp_path, trainable).trials
    lines = (Path(trial.path) / "result.json").read_text().splitlines()
    assert [part(json.loads(line)["config"]) for line in lines] == expected
    assert part(trial.last_result["config"]) == expected[-1]
    assert isinstance(trial.last_result["config"]["weights"], np.ndarray)
    assert [json.loads(line)["loss"] for line in lines] == [1.0, 0.5]
    assert trial.last_result["config"]["rate"] == trial.config["rate"] == schedule({0: 1.0, 1: 0.5})
    if trainable is not Copied:
        assert part(trial.latest_checkpoint_result.metrics["config"]) == expected[-1]
