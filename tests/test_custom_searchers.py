"""The searchers of examples/: what they suggest, and that their sweeps run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example, as it is when it is run as a script."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module


def run(code: str, home: Path, **variables: str) -> str:
    """Runs code in the folder of the examples; returns what it prints."""
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "examples",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_evolution_keeps_the_best_parents(example: Any) -> None:
    search = example("custom_searcher").Evolution(parents=2, seed=0)
    for loss in (3.0, 1.0, 2.0):
        search.tell({"lr": loss, "momentum": 0.5}, loss)
    assert [loss for loss, _ in search.parents] == [1.0, 2.0]
    children = [search.ask() for _ in range(50)]
    assert all(0.01 < child["lr"] < 100.0 and 0.0 <= child["momentum"] <= 0.99 for child in children)
    assert len({child["lr"] for child in children}) == 50


def test_a_network_goes_on_from_its_checkpoint(example: Any, tmp_path: Path) -> None:
    network = example("custom_searcher").Network
    config = {"lr": 0.1, "momentum": 0.9}
    first, second = network(), network()
    for one in (first, second):
        one.setup(config)
    losses = [first.step()["loss"] for _ in range(3)]
    first.save_checkpoint(str(tmp_path))
    second.load_checkpoint(str(tmp_path))
    assert losses[-1] < losses[0]
    assert [first.step() for _ in range(2)] == [second.step() for _ in range(2)]


@pytest.mark.slow
def test_evolution_goes_on_with_the_winner(tmp_path: Path) -> None:
    said = run("import custom_searcher; custom_searcher.main(generations=2, size=4)", tmp_path).splitlines()
    assert [line.partition(":")[0] for line in said] == ["generation 0", "generation 1", "after 80 iterations"]


@pytest.mark.ray
def test_local_search_goes_on_where_it_was_saved(example: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    searcher = example("custom_tune_searcher").LocalSearch

    def told() -> Any:
        search = searcher("loss", "min", begin=2)
        for number in range(4):
            search.suggest(f"{number}")
            search.on_trial_complete(f"{number}", {"loss": abs(number - 1.0)})
        search.suggest("4")
        search.on_trial_complete("4", error=True)
        return search

    first, second = told(), searcher("loss", "min")
    first.save(str(tmp_path / "state"))
    second.restore(str(tmp_path / "state"))
    assert first.best[0] == 0.0
    assert first.completed == 4
    suggested = first.suggest("5")
    assert suggested == second.suggest("5")
    assert suggested == told().suggest("5")


@pytest.mark.ray
def test_local_search_maximizes_too(example: Any) -> None:
    pytest.importorskip("ray")
    search = example("custom_tune_searcher").LocalSearch("accuracy", "max", begin=1)
    for number in range(3):
        search.suggest(f"{number}")
        search.on_trial_complete(f"{number}", {"accuracy": float(number)})
    assert search.best[0] == -2.0


@pytest.mark.ray
@pytest.mark.slow
def test_local_search_runs_under_ray_tune(tmp_path: Path, ray_folder: str) -> None:
    pytest.importorskip("ray")
    said = run("import custom_tune_searcher; custom_tune_searcher.main(samples=10)", tmp_path, RAY_TMPDIR=ray_folder)
    assert "10 trials, 0 failed; best loss" in said
