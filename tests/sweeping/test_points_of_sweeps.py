"""Sweeps that go on with trials of earlier ones, as points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, SweepResult
from fluid.search import uniform

SPACE = {"lr": uniform(0.0, 1.0)}


def train(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    total, step = state or (0.0, 0)
    while True:
        total, step = total + config["lr"], step + 1
        yield {"total": total}, (total, step)


def sweep(executor: FluidExecutor, name: str, **options: Any) -> SweepResult:
    return fluid.run(train, SPACE, metric="total", mode="max", executor=executor, name=name, **options)


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path / "run", verbose=0) as executor:
        yield executor


@pytest.mark.parametrize("algorithm", ["asha", "sha", "hyperband", "tpe", "random"])
def test_the_best_goes_on_to_the_budget_whatever_the_algorithm(executor: FluidExecutor, algorithm: str) -> None:
    best = sweep(executor, "first", algorithm="random", samples=2, budget=4).best
    further = sweep(executor, "further", algorithm=algorithm, samples=5, budget=9, points=[best, {"lr": 0.5}])
    continued, other = further.trials[:2]
    assert continued.start is not None and continued.start.at == 4 and continued.config == best.config
    assert [each.iteration for each in continued.results] == [5, 6, 7, 8, 9] and continued.state == "DONE"
    assert continued.metrics["total"] == pytest.approx(9 * best.config["lr"])
    assert other.config == {"lr": 0.5} and other.results[0].iteration == 1
    assert len(further.trials) == 5 and all(trial.state in ("DONE", "STOPPED") for trial in further.trials)


def test_a_sweep_of_nothing_but_continued_trials_ends(executor: FluidExecutor) -> None:
    best = sweep(executor, "first", algorithm="random", samples=2, budget=4).best
    further = sweep(executor, "further", samples=1, budget=6, points=[best])
    assert [trial.iteration for trial in further.trials] == [6] and further.best.iteration == 6


def test_trials_beside_one_that_begins_behind_their_rungs_are_compared_without_it(executor: FluidExecutor) -> None:
    best = sweep(executor, "first", algorithm="random", samples=2, budget=4).best
    options: dict[str, Any] = {"algorithm": "sha", "samples": 4, "budget": 8, "eta": 2, "min_budget": 2}
    first, worst, _, top = sweep(
        executor, "further", points=[best, {"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}], **options
    ).trials
    assert first.iteration == 8 and top.iteration > worst.iteration == 2
