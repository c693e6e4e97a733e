"""Sweeps that begin within the same second have folders of their own, in Tune's storage and until they are there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray.tune
from ray.tune import ExperimentAnalysis

from fluid import tune
from fluid.integrations.ray_tune.private_api import SweepDates

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


def report_once(config: dict[str, Any]) -> None:
    ray.tune.report({"n": 1})


class Clock:
    """Dates by hand."""

    def __init__(self) -> None:
        self.date = "2026-01-31_12-00-00"

    def __call__(self) -> str:
        return self.date


def test_dates_of_one_second_are_numbered() -> None:
    clock = Clock()
    dates = SweepDates(clock)
    assert [dates() for _ in range(3)] == [clock.date, f"{clock.date}-2", f"{clock.date}-3"]
    clock.date = "2026-01-31_12-00-01"
    assert dates() == clock.date
    clock.date = "2026-01-31_11-59-59"  # It is put back.
    assert dates() == "2026-01-31_12-00-01-2"


def test_dates_of_threads_differ() -> None:
    dates, found = SweepDates(Clock()), list[str]()
    threads = [threading.Thread(target=lambda: found.extend(dates() for _ in range(100))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 400


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> str:
    """Ray finds it to be the same second throughout; returns the date of that."""
    clock = Clock()
    monkeypatch.setattr("ray.tune.utils.date_str", clock)
    return clock.date


def trials_in(folder: str) -> list[int]:
    return [trial.config["x"] for trial in ExperimentAnalysis(folder).trials]


@pytest.mark.slow
def test_sweeps_without_a_name(executor: Any, tmp_path: Path, one_second: str) -> None:
    paths = []
    for x in range(4):
        options = {"storage_path": str(tmp_path), "verbose": 0, "executor": executor}
        paths.append(tune.run(report_once, config={"x": x}, **options).experiment_path)
    assert len(set(paths)) == 4 and one_second in paths[0]
    assert [trials_in(path) for path in paths] == [[0], [1], [2], [3]]
    assert [len(folders_of_trials(Path(path))) for path in paths] == [1, 1, 1, 1]


@pytest.mark.slow
def test_tuners_without_a_name(executor: Any, tmp_path: Path, one_second: str) -> None:
    config = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    tuners = [tune.Tuner(report_once, param_space={"x": x}, run_config=config, executor=executor) for x in range(2)]
    grids = [tuner.fit() for tuner in tuners]
    assert len({grid.experiment_path for grid in grids}) == 2
    assert [[one.config["x"] for one in grid] for grid in grids] == [[0], [1]]


@pytest.mark.slow
def test_sweeps_of_one_name_in_other_storages(executor: Any, tmp_path: Path, one_second: str) -> None:
    for x in range(3):
        options = {"storage_path": str(tmp_path / str(x)), "name": "mine", "verbose": 0, "executor": executor}
        found = tune.run(report_once, config={"x": x}, **options)
        assert trials_in(found.experiment_path) == [x]
    for x in range(3):
        (folder,) = folders_of_trials(tmp_path / str(x) / "mine")
        assert f'"x": {x}' in (folder / "params.json").read_text()


def folders_of_trials(experiment: Path) -> list[Path]:
    return [path for path in experiment.iterdir() if path.is_dir()]
