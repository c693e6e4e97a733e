"""Under Ray Tune: trials' random numbers follow from the program's, and fluid.trial_dir() is Tune's folder."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fluid
from fluid import FluidExecutor, tune

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ray_tune = pytest.importorskip("ray.tune")


def draw(config: dict[str, Any]) -> None:
    for _ in range(2):
        ray_tune.report({"random": random.random(), "numpy": float(np.random.normal())})


def numbers(folder: Path) -> list[Any]:
    random.seed(0)
    np.random.seed(0)
    with FluidExecutor(backend="local", devices=2, verbose=0) as executor:
        options = {"storage_path": str(folder), "verbose": 0, "executor": executor}
        found = tune.run(draw, config={"x": ray_tune.grid_search([1, 2, 3])}, **options)
    return sorted(
        (trial.config["x"], trial.last_result["random"], trial.last_result["numpy"]) for trial in found.trials
    )


def test_two_runs_draw_the_same_numbers(cluster: str, tmp_path: Path) -> None:
    first, second = numbers(tmp_path / "first"), numbers(tmp_path / "second")
    assert first == second
    assert len({number for _, *drawn in first for number in drawn}) == 6


def writes(config: dict[str, Any]) -> None:
    (fluid.trial_dir() / "mine.txt").write_text(str(config["x"]))
    Path("relative.txt").write_text(str(config["x"]))
    folder = ray_tune.get_context().get_trial_dir()
    ray_tune.report({"folder": str(fluid.trial_dir()), "of_tune": folder, "relative": os.path.abspath("relative.txt")})


class Writes(ray_tune.Trainable):  # type: ignore[misc]
    def setup(self, config: dict[str, Any]) -> None:
        (fluid.trial_dir() / "mine.txt").write_text(str(config["x"]))

    def step(self) -> dict[str, Any]:
        return {"folder": str(fluid.trial_dir()), "done": True, "relative": os.getcwd()}


@pytest.mark.parametrize("trainable", [writes, Writes])
def test_the_folder_is_that_of_tune(executor: Any, tmp_path: Path, trainable: Any) -> None:
    options = {"storage_path": str(tmp_path), "verbose": 0, "executor": executor}
    found = tune.run(trainable, config={"x": ray_tune.grid_search([1, 2])}, **options)
    assert len({trial.last_result["relative"] for trial in found.trials}) == 2
    for trial in found.trials:
        assert trial.last_result["folder"] == trial.last_result.get("of_tune", trial.local_path)
        kept = Path(trial.storage.trial_fs_path, "mine.txt")  # Where the results are.
        assert kept.read_text() == str(trial.config["x"])


def test_without_fluid_too(cluster: str, tmp_path: Path) -> None:
    found = ray_tune.run(writes, config={"x": 1}, storage_path=str(tmp_path), verbose=0)
    (trial,) = found.trials
    assert trial.last_result["folder"] == trial.last_result["of_tune"]
