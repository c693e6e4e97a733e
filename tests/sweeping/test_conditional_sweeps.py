"""Sweeps of spaces whose hyperparameters depend on each other, and of TPE at rungs; also in several sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sweep_trainables import curve

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepResult
from fluid.results.run_files import read_search
from fluid.search import randint, uniform, when

SPACE = {
    "x": uniform(0.0, 1.0),
    "momentum": when("optimizer", "sgd", uniform(0.0, 0.99)),
    "optimizer": ["adam", "sgd"],
    "adam": when("optimizer", "adam", {"layers": randint(1, 4)}),
}


def run(run_dir: Path, space: Any = SPACE, **options: Any) -> SweepResult:
    arguments = {"metric": "loss", "mode": "min", "samples": 9, "budget": 9, "name": "sweep", **options}
    return fluid.run(curve, space, run_dir=run_dir, **arguments)


def configs(result: SweepResult) -> list[dict[str, Any]]:
    return [dict(trial.config) for trial in result.trials]


@pytest.mark.parametrize("algorithm", ["asha", "tpe"])
def test_a_sweep_goes_on_with_configs_of_unlike_names(algorithm: str, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    first = run(tmp_path / "run", samples=9, algorithm=algorithm, time_budget_s=600.0)
    for config in configs(first):
        assert set(config) == {"x", "optimizer", "momentum" if config["optimizer"] == "sgd" else "adam"}
    assert {config["optimizer"] for config in configs(first)} == {"adam", "sgd"}
    whole = run(tmp_path / "run", samples=14, algorithm=algorithm, resume=True)
    assert configs(whole)[:9] == configs(first) and len(whole.trials) == 14
    with pytest.raises(InvalidFieldError, match="would be"):
        other = {**SPACE, "x": when("optimizer", "adam", uniform(0.0, 1.0))}
        run(tmp_path / "run", other, samples=14, algorithm="asha", resume=True)
    pytest.importorskip("pandas")
    table = whole.dataframe()
    assert table["config/momentum"].isna().tolist() == (table["config/optimizer"] == "adam").tolist()


def test_tpe_stops_trials_at_rungs(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    result = run(tmp_path / "run", samples=20, algorithm="tpe")
    reached = [trial.iteration for trial in result.trials]
    assert set(reached) == {1, 3, 9} and reached.count(1) > 8 and result.best.iteration == 9
    assert {trial.state for trial in result.trials} == {"STOPPED", "DONE"}
    whole = run(tmp_path / "whole", samples=4, algorithm="tpe", min_budget=9)
    assert [trial.iteration for trial in whole.trials] == [9] * 4
    several = run(tmp_path / "several", samples=4, algorithm="tpe", metric=["loss", "gain"], mode=["min", "max"])
    assert [trial.iteration for trial in several.trials] == [9] * 4


def test_a_drawn_seed_is_kept_and_repeats_the_sweep(tmp_path: Path) -> None:
    first, other = (run(tmp_path / name, samples=3, seed=None, algorithm="random") for name in ("a", "b"))
    assert configs(first) != configs(other)
    seed = _seed_of(tmp_path / "a")
    assert seed is not None and _seed_of(tmp_path / "b") != seed
    again = run(tmp_path / "c", samples=3, seed=seed, algorithm="random")
    assert configs(again) == configs(first)
    on = run(tmp_path / "a", samples=5, seed=None, algorithm="random", resume=True)
    assert configs(on)[:3] == configs(first) and len(on.trials) == 5


def test_the_seed_is_shown(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        fluid.run(curve, SPACE, metric="loss", mode="min", samples=2, budget=1, executor=executor)
        assert [group.seed for group in executor.session.status().groups] == [0]


def _seed_of(folder: Path) -> int | None:
    line = json.loads((folder / "trials.jsonl").read_text(encoding="utf-8").splitlines()[0])
    search = read_search(line)
    assert search is not None
    return search.seed
