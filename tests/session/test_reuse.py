"""Sweeps whose trials start from states that earlier runs have of the same content."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fluid
from fluid import InvalidFieldError, SweepResult, Trial
from fluid.search import schedule
from fluid.session.reuse import Reuse
from fluid.session.starts import SharedTrials

BUDGET = 6
#: Iterations of a sweep with one rate that nothing is known of: two trials that part after two.
WHOLE = 2 + 2 * 4


def train(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    x, step = state or (0.0, 0)
    while True:
        x, step = x + config["lr"].at(step) * random.random(), step + 1
        with open(config["count"], "a") as file:
            file.write(f"{step}\n")
        yield {"x": x}, (x, step)


def other_train(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    yield from train(config, state)


class Sweeps:
    """Runs sweeps with run folders in one folder, and counts the iterations that each runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = folder / "count"
        self.ran = 0

    def run(self, name: str, rates: list[float], **options: Any) -> SweepResult:
        self.count.write_text("")
        space = {"lr": schedule({0: 0.1, 2: [0.2, 0.3], 4: rates}), "count": str(self.count)}
        options = {"trainable": train, "reuse": True, "algorithm": "grid", "budget": BUDGET, "devices": 2, **options}
        run_dir = options.pop("run_dir", self.folder / "runs" / name)
        trainable = options.pop("trainable")
        result = fluid.run(trainable, space, metric="x", mode="max", name="grid", run_dir=run_dir, **options)
        self.ran = len(self.count.read_text().split())
        return result


@pytest.fixture
def sweeps(tmp_path: Path) -> Sweeps:
    return Sweeps(tmp_path)


def values(result: SweepResult) -> dict[str, list[tuple[int, float]]]:
    return {
        str(trial.config["lr"]): [(each.iteration, each.metrics["x"]) for each in trial.results]
        for trial in result.trials
    }


@pytest.mark.slow
def test_a_second_sweep_runs_only_what_is_new_and_has_the_same_results(sweeps: Sweeps, tmp_path: Path) -> None:
    first = sweeps.run("first", [1.0, 2.0])
    assert sweeps.ran == 2 + 2 * 2 + 4 * 2
    second = sweeps.run("second", [2.0, 3.0])
    assert sweeps.ran <= 4 * 2
    sources = {each.source for trial in second.trials for each in trial.results if each.iteration <= 4}
    assert sources >= {"first/grid-shared-00001", "first/grid-shared-00002"} and "" not in sources
    anew = sweeps.run("anew", [2.0, 3.0], run_dir=tmp_path / "elsewhere" / "anew")
    assert sweeps.ran == 14
    assert values(second) == values(anew)
    both = values(first).keys() & values(second).keys()
    assert len(both) == 2 and all(values(first)[name] == values(second)[name] for name in both)
    assert [trial.state for trial in second.trials] == ["DONE"] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"trainable": other_train}, {"reuse": "other data"}, {"seed": 1}, {"reuse": False}]
)
def test_other_code_data_and_seeds_are_other_contents(sweeps: Sweeps, options: dict[str, Any]) -> None:
    sweeps.run("first", [1.0])
    sweeps.run("second", [1.0], **options)
    assert sweeps.ran == WHOLE


def test_a_state_whose_checkpoint_is_gone_is_made_again(sweeps: Sweeps, tmp_path: Path) -> None:
    first = sweeps.run("first", [1.0])
    for folder in (tmp_path / "runs" / "first" / "trials").iterdir():
        shutil.rmtree(folder)
    second = sweeps.run("second", [1.0])
    assert sweeps.ran == WHOLE and values(second) == values(first)


def test_damaged_states_leave_trials_to_run_alone(sweeps: Sweeps, tmp_path: Path) -> None:
    first = sweeps.run("first", [1.0])
    for file in (tmp_path / "runs" / "first" / "trials").rglob("*.pkl"):
        file.write_bytes(b"damaged")
    second = sweeps.run("second", [1.0])
    assert values(second) == values(first) and [trial.state for trial in second.trials] == ["DONE"] * 2


@pytest.mark.slow
def test_a_third_sweep_reuses_what_the_second_reused(sweeps: Sweeps) -> None:
    for name in ("first", "second"):
        sweeps.run(name, [1.0])
    sweeps.run("third", [5.0])
    assert sweeps.ran <= 2 * 4


@pytest.mark.slow
def test_rungs_find_the_same_states(sweeps: Sweeps) -> None:
    options: dict[str, Any] = {"algorithm": "sha", "eta": 2, "min_budget": 3, "samples": 4}
    first = sweeps.run("first", [1.0, 2.0], **options)
    before = sweeps.ran
    second = sweeps.run("second", [1.0, 2.0], **options)
    assert values(second) == values(first) and sweeps.ran < before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"reuse": 3}, "reuse=3: must be True, False or a text"),
        ({"seed": None}, "reuse=True: cannot be with seed=None"),
    ],
)
def test_what_cannot_be_is_refused(sweeps: Sweeps, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        sweeps.run("first", [1.0], **options)


def test_configs_of_other_types_are_other_contents(tmp_path: Path) -> None:
    """A program can tell these apart, and may compute otherwise."""
    configs = [{"x": 1}, {"x": 1.0}, {"x": True}, {"x": "1"}, {"x": {1: 2}}, {"x": {"1": 2}}, {"x": [1]}, {"x": (1,)}]
    unknown = [{"x": np.float64(1.0)}, {"x": np.ones(2)}]
    trials = [Trial(train, config, budget=3, trial_id=str(number)) for number, config in enumerate(configs + unknown)]
    contents = Reuse("", 0).apply(SharedTrials(trials, {}), tmp_path / "run").contents
    assert len({each.base for each in contents.values()}) == len(contents) == len(configs)


def imports_as_it_runs(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    from reuse_helper import step  # type: ignore[import-not-found]

    yield {"x": step(config)}, None


def cannot_be_saved(config: dict[str, Any]) -> Iterator[Any]:
    yield {"x": config["x"]}


@pytest.mark.parametrize(
    ("trainable", "x", "reason"),
    [
        (imports_as_it_runs, 1, "not all of its code can be compared"),
        (cannot_be_saved, 1, "it cannot be saved"),
        (train, np.ones(2), "its config has values that cannot be compared"),
    ],
)
def test_what_is_not_reused_is_told_once(
    trainable: Any, x: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trials = [Trial(trainable, {"x": x}, budget=3, trial_id=name) for name in "ab"]
    Reuse("", 0).apply(SharedTrials(trials, {}), tmp_path / "run")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"reuse=True: 'a' starts from no earlier run, as {reason}")


def test_seeds_follow_from_configs_and_not_from_code(tmp_path: Path) -> None:
    def applied(trainable: Any, data: str) -> Any:
        trials = [Trial(trainable, {"x": x}, budget=3, trial_id=str(number)) for number, x in enumerate((1, 2, 1))]
        return Reuse(data, 0).apply(SharedTrials(trials, {}), tmp_path / "run")

    one, other = applied(train, ""), applied(other_train, "more")
    assert one.seeds == other.seeds and len({*one.seeds.values()}) == 3
    assert {each.base for each in one.contents.values()}.isdisjoint(each.base for each in other.contents.values())
