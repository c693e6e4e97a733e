"""The shapes that sweeps name, for forecasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, Search, SearchShape
from fluid.errors import InvalidFieldError
from fluid.results.run_files import read_search
from fluid.search import AskTell, uniform
from fluid.search.algorithms import shape_for


def train(config: dict[str, Any]) -> Any:
    for step in range(1, 10):
        yield {"loss": config["x"] / step}


SWEEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "asha": ({}, {"algorithm": "asha", "rungs": (1, 3, 9), "concurrency": 5}),
    "sha": ({}, {"algorithm": "halving", "rungs": (1, 3, 9), "brackets": ((6, 2, 1),), "concurrency": None}),
    "hyperband": ({}, {"algorithm": "halving", "rungs": (1, 3, 9), "brackets": ((3, 1, 1), (2, 1), (1,))}),
    "bohb": (
        {},
        {"algorithm": "halving", "rungs": (1, 3, 9), "brackets": ((3, 1, 1), (2, 1), (1,)), "concurrency": 2},
    ),
    "bohb limited": ({"algorithm": "bohb", "max_concurrent": 3}, {"algorithm": "halving", "concurrency": 3}),
    "random": ({"max_concurrent": 2}, {"algorithm": "full", "rungs": (9,), "concurrency": 2}),
    "tpe": ({}, {"algorithm": "asha", "rungs": (1, 3, 9), "concurrency": 2}),
    "tpe at no rungs": ({"algorithm": "tpe", "min_budget": 9}, {"algorithm": "full", "rungs": (9,), "concurrency": 2}),
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with FluidExecutor(backend="local", devices=1, verbose=0, run_dir=tmp_path_factory.mktemp("runs") / "run") as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(SWEEPS))
def test_a_sweep_names_the_shape_of_its_algorithm(algorithm: str, executor: FluidExecutor) -> None:
    options, expected = SWEEPS[algorithm]
    name = f"shape-{algorithm}"
    fluid.run(
        *(train, {"x": uniform(0, 1)}),
        metric="loss",
        samples=6,
        budget=9,
        name=name,
        executor=executor,
        time_budget_s=600.0,
        **{"algorithm": algorithm, **options},
    )
    handle = next(handle for handle in executor.handles if handle.name == name)
    search = handle.search
    assert search is not None and search.shape is not None
    assert {field: getattr(search.shape, field) for field in expected} == expected
    assert search.time_budget_s == 600.0


@pytest.mark.slow
def test_a_searcher_that_names_budgets_has_no_shape(executor: FluidExecutor) -> None:
    configs = iter([{"x": 0.5}, {"x": 0.7}])
    ends = AskTell(lambda: next(configs, None), lambda *told: None)
    fluid.run(train, metric="loss", searcher=ends, algorithm="full", budget=2, name="own", executor=executor)
    handle = next(handle for handle in executor.handles if handle.name == "own")
    assert handle.search.shape is None


def test_asha_with_a_searcher_stops_trials_at_once() -> None:
    shape = shape_for("asha", rungs=(1, 3), eta=3, samples=None, is_told_once=True)
    assert shape.algorithm == "stopping" and shape.first == 2


def test_a_resumed_session_reads_the_shape_of_a_search() -> None:
    shape = SearchShape(algorithm="halving", rungs=(1, 3), brackets=((3, 1), (2,)))
    entry = {
        "metric": "loss",
        "mode": "min",
        "trials": 5,
        "time_budget_s": 60.0,
        "shape": {"algorithm": "halving", "rungs": [1, 3], "brackets": [[3, 1], [2]]},
    }
    assert read_search(entry) == Search("loss", "min", 5, extends=True, time_budget_s=60.0, shape=shape)
    assert read_search({**entry, "shape": {"algorithm": "from the future"}}) is None


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="shape"):
        Search(shape="asha")  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match="time_budget_s"):
        Search(time_budget_s=-1.0)
