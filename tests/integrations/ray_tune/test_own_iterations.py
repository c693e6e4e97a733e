"""Trainables that count ``training_iteration`` in a way of their own: Tune's checkpoints are of its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray.tune
from ray.tune.schedulers import AsyncHyperBandScheduler

from fluid import tune

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


class Tens(ray.tune.Trainable):  # type: ignore[misc]
    """Counts in steps of ``stride``, and notes every call of ``step``."""

    def setup(self, config: dict[str, Any]) -> None:
        self.n = 0

    def step(self) -> dict[str, Any]:
        self.n += 1
        with open(self.config["notes"], "a") as file:
            file.write(f"{self.n}\n")
        stride = self.config["stride"] if self.n >= self.config.get("from", 1) else 1
        return {"loss": 1.0 / self.n, "n": self.n, "training_iteration": stride * self.n}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "n").write_text(str(self.n))

    def load_checkpoint(self, folder: str) -> None:
        self.n = int(Path(folder, "n").read_text())


def counted(config: dict[str, Any]) -> None:
    for n in range(1, 1000):
        ray.tune.report({"loss": 1.0 / n, "n": n, "training_iteration": config["stride"] * n})


def run(executor: Any, folder: Path, trainable: Any, stride: float, **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    config = {"stride": stride, "notes": str(folder / "notes")}
    common = {"storage_path": str(folder), "verbose": 0, "executor": executor}
    return tune.run(trainable, config=config, **common, **options).trials[0]


@pytest.mark.parametrize("stride", [10, 1, 0.5])
def test_the_checkpoint_at_the_end_is_that_of_the_last_result(executor: Any, tmp_path: Path, stride: float) -> None:
    at_end = tune.CheckpointConfig(checkpoint_at_end=True)
    scheduler = AsyncHyperBandScheduler(metric="loss", mode="min", max_t=int(90 * min(1, stride)) if stride != 1 else 9)
    trial = run(executor, tmp_path, Tens, stride, scheduler=scheduler, checkpoint_config=at_end)
    expected = 90 if stride == 0.5 else 9
    assert trial.last_result["n"] == expected
    assert Path(trial.checkpoint.path, "n").read_text() == str(expected)
    assert (tmp_path / "notes").read_text().split() == [str(n + 1) for n in range(expected)]


@pytest.mark.parametrize("trainable", [Tens, counted])
def test_no_iteration_is_run_beyond_a_stop(executor: Any, tmp_path: Path, trainable: Any) -> None:
    trial = run(executor, tmp_path, trainable, 10, stop={"training_iteration": 50})
    assert trial.status == "TERMINATED" and trial.last_result["n"] == 5
    if trainable is Tens:
        assert (tmp_path / "notes").read_text().split() == ["1", "2", "3", "4", "5"]


def test_checkpoints_on_the_way_are_those_of_their_results(executor: Any, tmp_path: Path) -> None:
    every = tune.CheckpointConfig(checkpoint_frequency=20)
    trial = run(executor, tmp_path, Tens, 10, stop={"training_iteration": 60}, checkpoint_config=every)
    saved = sorted(Path(trial.path).glob("checkpoint_*/n"))
    assert [path.read_text() for path in saved] == ["2", "4", "6"]


def test_paused_and_copied_it_goes_on_from_its_own_states(executor: Any, tmp_path: Path) -> None:
    from ray.tune.schedulers import PopulationBasedTraining

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="n",
        mode="max",
        perturbation_interval=20,
        synch=True,
        hyperparam_mutations={"x": [1, 2]},
    )
    config = {"stride": 10, "notes": str(tmp_path / "notes"), "x": tune.grid_search([1, 2])}
    options: dict[str, Any] = {"storage_path": str(tmp_path), "verbose": 0, "executor": executor}
    found = tune.run(Tens, config=config, scheduler=scheduler, stop={"training_iteration": 60}, **options)
    assert [(trial.status, trial.last_result["n"]) for trial in found.trials] == [("TERMINATED", 6)] * 2
