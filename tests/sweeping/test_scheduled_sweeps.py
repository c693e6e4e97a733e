"""Sweeps whose configs have schedules: in several sessions, in results, with other libraries' spaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import InvalidFieldError, SweepResult
from fluid.search import Schedule, make_space, schedule, uniform
from fluid.sweeping.resuming import is_same_config
from fluid.trainables.json_form import json_form


def cosine(iteration: int, lr: float, total: int) -> float:
    return lr * (1 - iteration / total)


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    at = 1.0
    for iteration in range(4):
        at -= config["lr"].at(iteration) + config["wd"].at(iteration)
        yield {"loss": at}


SPACE: dict[str, Any] = {
    "lr": schedule({0: 0.1, 2: [0.1, 0.01]}),
    "wd": schedule(cosine, lr=[0.1, 0.2], total=4),
    "plain": schedule({0: 1, 2: 3}),
}


def run(run_dir: Path, space: Any = SPACE, **options: Any) -> SweepResult:
    arguments = {"metric": "loss", "mode": "min", "budget": 4, "name": "sweep", "algorithm": "grid", **options}
    return fluid.run(train, space, run_dir=run_dir, devices=1, **arguments)


def texts(result: Any) -> list[str]:
    return [str(dict(trial.config)) for trial in result.trials]


def test_a_sweep_of_schedules_is_shown_resumed_and_continued(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    first = run(tmp_path / "run")
    assert len(first.trials) == 4
    best = first.best.config
    assert best["lr"] == schedule({0: 0.1, 2: 0.1}) and best["wd"] == schedule(cosine, lr=0.2, total=4)
    stored = fluid.load(tmp_path / "run")
    assert stored.best.config["lr"] == "schedule({0: 0.1, 2: 0.1})"
    tables = [result.dataframe()["config/lr"].map(str).tolist() for result in (first, stored)]
    assert tables[0] == tables[1] == ["schedule({0: 0.1, 2: 0.1})"] * 2 + ["schedule({0: 0.1, 2: 0.01})"] * 2

    assert texts(run(tmp_path / "run", resume=True)) == texts(first)
    with pytest.raises(InvalidFieldError, match=r"its config\['plain'\].*would be schedule"):
        run(tmp_path / "run", {**SPACE, "plain": schedule({0: 1, 2: 4})}, resume=True)
    again = run(tmp_path / "again", points=[best, stored.best.config], algorithm="random", samples=2)
    assert texts(again) == [str(best)] * 2 and isinstance(again.trials[1].config["lr"], Schedule)


def test_configs_are_compared_with_those_of_files_name_by_name() -> None:
    config = {
        "lr": schedule({0: 0.1, 2: 0.2}),
        "nested": [{"wd": schedule(cosine, lr=1, total=4)}],
        "other": object(),
        "x": 1,
    }
    stored = json_form(config)
    assert is_same_config(config, stored)
    for name, value in (
        ("lr", schedule({0: 0.1, 2: 0.3})),
        ("lr", schedule({0: 0.1, 3: 0.2})),
        ("lr", schedule({0: 0.1, 2: 0.2}, between="linear")),
        ("nested", [{"wd": schedule(cosine, lr=2, total=4)}]),
        ("x", 2),
    ):
        assert not is_same_config({**config, name: value}, stored)
    assert not is_same_config({**config, "new": object()}, stored)


def test_drivers_of_a_shared_folder_read_schedules_that_others_were_suggested(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = {**SPACE, "lr": schedule({0: uniform(0.1, 0.2), 2: [0.1, 0.01]})}
    result = run(tmp_path / "run", space, algorithm="tpe", samples=3, join=True)
    assert all(isinstance(trial.config["lr"], Schedule) for trial in result.trials)
    assert len({repr(trial.config["lr"]) for trial in result.trials}) == 3
    for trial in result.trials:
        assert make_space(space).read(json_form(dict(trial.config))) == trial.config


def test_a_function_of_a_trial_gives_schedules_of_what_it_suggests(tmp_path: Path) -> None:
    pytest.importorskip("optuna")

    def space(trial: Any) -> dict[str, Any]:
        first = trial.suggest_float("first", 0.1, 0.2)
        return {"lr": schedule({0: first, 2: 0.01}), "wd": schedule(0.0)}

    result = run(tmp_path / "run", space, algorithm="tpe", samples=3)
    assert all(0.1 <= trial.config["lr"].at(0) <= 0.2 for trial in result.trials)
    assert len({repr(trial.config["lr"]) for trial in result.trials}) == 3


@pytest.mark.parametrize("package", ["optuna", "ray"])
def test_distributions_of_other_libraries_may_be_values(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    if package == "optuna":
        from optuna.distributions import FloatDistribution

        rate: Any = FloatDistribution(0.1, 0.2)
        late: Any = rate
    else:
        from ray import tune

        rate = tune.uniform(0.1, 0.2)
        late = tune.sample_from(lambda spec: spec.config.wd.at(0) / 2)
    space = {"lr": schedule({0: rate, 2: late}), "wd": schedule({0: 0.5, 1: rate})}
    result = run(tmp_path / "run", space, algorithm="random", samples=2)
    for trial in result.trials:
        assert 0.1 <= trial.config["lr"].at(0) < 0.2 and 0.1 <= trial.config["wd"].at(1) < 0.2
        assert trial.config["lr"].at(2) == 0.25 or package == "optuna"
