"""Tables of Syne Tune's blackbox repository; needs pyarrow, with which the tests write them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fluid
from fluid.errors import InvalidFieldError
from fluid.rehearsal import RehearsalPlan, rehearsing
from fluid.rehearsal.benchmark import Curve
from fluid.rehearsal.blackbox import BlackboxBenchmark
from fluid.rehearsal.outcome import outcome_of
from fluid.rehearsal.sources import source_by_name
from fluid.search.domains import Choice, FloatRange, IntRange

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SPACE = {
    "hp_lr": {
        "domain_cls": "Float",
        "domain_kwargs": {"lower": 1e-4, "upper": 1.0},
        "sampler_cls": "LogUniform",
        "sampler_kwargs": {"base": 10},
    },
    "hp_units": {
        "domain_cls": "FiniteRange",
        "domain_kwargs": {"lower": 16, "upper": 64, "size": 3, "log_scale": True, "cast_int": True},
    },
    "hp_layers": {"domain_cls": "Integer", "domain_kwargs": {"lower": 1, "upper": 3}, "sampler_cls": "Uniform"},
    "hp_act": {"domain_cls": "Categorical", "domain_kwargs": {"categories": ["relu", "tanh"]}},
}
CONFIGS = [
    {"hp_lr": 1e-3, "hp_units": 16, "hp_layers": 1, "hp_act": "relu"},
    {"hp_lr": 1e-2, "hp_units": 32, "hp_layers": 2, "hp_act": "relu"},
    {"hp_lr": 1e-1, "hp_units": 64, "hp_layers": 3, "hp_act": "tanh"},
]
OBJECTIVES = ["metric_valid_error", "metric_train_error", "metric_runtime", "metric_elapsed_time"]


def values() -> Any:
    """Two tasks, three configs, two seeds, four epochs: errors fall, an epoch takes 10, 20 and 30 seconds."""
    found = np.zeros((2, 3, 2, 4, 4), np.float32)
    for task, row, seed, epoch in np.ndindex(2, 3, 2, 4):
        error = (row + 1) / (epoch + 1) / 10 + task + seed / 100
        each = 10.0 * (row + 1)
        found[task, row, seed, epoch] = (error, error / 2, each, each * (epoch + 1))
    return found


def write(
    folder: Path,
    found: Any = None,
    *,
    objectives: list[str] = OBJECTIVES,
    space: Mapping[str, Any] = SPACE,
    **facts: Any,
) -> Path:
    folder.mkdir()
    (folder / "configspace.json").write_text(json.dumps(space))
    epoch = {"domain_cls": "Integer", "domain_kwargs": {"lower": 1, "upper": 4}}
    (folder / "fidelityspace.json").write_text(json.dumps({"hp_epoch": epoch}))
    parquet.write_table(pyarrow.Table.from_pylist(CONFIGS), folder / "hyperparameters.parquet", compression="gzip")
    np.save(folder / "objectives_evaluations.npy", values() if found is None else found)
    np.save(folder / "fidelities_values.npy", np.arange(1, 5))
    told = {"objectives_names": objectives, "task_names": ["one", "other"], **facts}
    (folder / "metadata.json").write_text(json.dumps(told))
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "small")


def test_what_was_recorded_is_replayed(table: Path) -> None:
    benchmark = BlackboxBenchmark(table, "other", seed=1)
    assert (benchmark.name, benchmark.metric, benchmark.mode) == ("blackbox:small:other", "metric_valid_error", "min")
    assert (benchmark.max_iterations, benchmark.seeds, len(benchmark.configs)) == (4, 2, 3)
    played = benchmark.replay(CONFIGS[1], range(2, 9))
    assert [one.seconds for one in played] == [20.0] * 3
    errors = [one.metrics["metric_valid_error"] for one in played]
    assert errors == pytest.approx([1.11, 1.0766667, 1.06], rel=1e-5)
    assert all(one.spread == 0.0 for one in played)
    assert benchmark.replay(CONFIGS[1], range(5, 6)) == []
    assert benchmark.replay_many([Curve(CONFIGS[1], range(2, 9))]) == [played]


def test_the_space(table: Path) -> None:
    space = BlackboxBenchmark(table, "one").space
    assert space["hp_lr"] == FloatRange(1e-4, 1.0, log=True)
    assert space["hp_units"] == Choice((16, 32, 64))
    assert space["hp_layers"] == IntRange(1, 3)
    assert space["hp_act"] == Choice(("relu", "tanh"))


@pytest.mark.parametrize(
    ("config", "row"),
    [
        ({"hp_lr": 2e-3, "hp_units": 16, "hp_layers": 1, "hp_act": "relu"}, 0),
        ({"hp_lr": 5e-3, "hp_units": 32, "hp_layers": 2, "hp_act": "relu"}, 1),
        ({"hp_lr": 5e-3, "hp_units": 32, "hp_layers": 2, "hp_act": "tanh"}, 2),  # A category counts most.
        ({"hp_lr": 1e-2, "hp_units": 64, "hp_layers": 3, "hp_act": "tanh"}, 2),
    ],
)
def test_a_config_that_the_table_lacks_is_the_nearest(table: Path, config: dict[str, Any], row: int) -> None:
    benchmark = BlackboxBenchmark(table, "one")
    with pytest.warns(UserWarning, match="lacks a config"):
        played = benchmark.replay(config, range(1, 5))
    recorded = benchmark.replay(CONFIGS[row], range(1, 5))
    assert [(one.metrics, one.seconds) for one in played] == [(one.metrics, one.seconds) for one in recorded]
    assert played[0].spread > 0.0
    with warnings.catch_warnings():  # It is said once.
        warnings.simplefilter("error")
        assert benchmark.replay({**config, "hp_lr": 0.5}, range(1, 2))


def test_values_stored_with_fewer_digits_are_the_same(table: Path) -> None:
    benchmark = BlackboxBenchmark(table, "one")
    near = {**CONFIGS[0], "hp_lr": float(np.float32(1e-3))}
    assert benchmark.replay(near, range(1, 2)) == benchmark.replay(CONFIGS[0], range(1, 2))


def test_the_best_and_the_worst_are_those_of_the_table(table: Path) -> None:
    benchmark = BlackboxBenchmark(table, "one")
    assert benchmark.best_known == pytest.approx(0.025) and benchmark.worst_known == pytest.approx(0.075)
    assert benchmark.regret(0.05) == pytest.approx(0.5)
    larger = BlackboxBenchmark(table, "one", metric="metric_train_error", mode="max")
    assert larger.best_known == pytest.approx(0.15) and larger.worst_known == pytest.approx(0.0125)


def test_a_trial_ends_where_nothing_more_was_recorded(tmp_path: Path) -> None:
    found = values()
    found[0, 0, 0, 2:] = math.nan
    found[0, 1, 0, 1, 1] = math.nan
    benchmark = BlackboxBenchmark(write(tmp_path / "t", found), "one")
    assert len(benchmark.replay(CONFIGS[0], range(1, 5))) == 2
    second = benchmark.replay(CONFIGS[1], range(2, 3))[0].metrics
    assert "metric_train_error" not in second and second["metric_elapsed_time"] == 40.0


def test_seconds_come_from_the_objective_that_is_named(tmp_path: Path) -> None:
    names = ["metric_error", "wall", "metric_runtime", "metric_accuracy"]
    benchmark = BlackboxBenchmark(write(tmp_path / "t", objectives=names), "one")
    assert [one.seconds for one in benchmark.replay(CONFIGS[2], range(1, 3))] == [30.0, 30.0]  # Those of an iteration.
    benchmark = BlackboxBenchmark(write(tmp_path / "u", objectives=names), "one", elapsed="metric_accuracy")
    assert [one.seconds for one in benchmark.replay(CONFIGS[2], range(1, 3))] == [30.0, 30.0]  # Differences.
    assert BlackboxBenchmark(tmp_path / "u", "one", metric="metric_accuracy").mode == "max"
    with pytest.raises(InvalidFieldError, match="elapsed"):
        BlackboxBenchmark(write(tmp_path / "v", objectives=["a", "b", "c", "d"]), "one", mode="min")


def test_a_table_with_configs_of_its_own_for_each_task(tmp_path: Path) -> None:
    folder = write(tmp_path / "own")
    for task, number in (("one", 2), ("other", 3)):
        part = pyarrow.Table.from_pylist(CONFIGS[:number])
        parquet.write_table(part, folder / f"{task}-hyperparameters.parquet")
        index = 0 if task == "one" else 1
        np.save(folder / f"{task}-objectives_evaluations.npy", values()[index, :number])
        np.save(folder / f"{task}-fidelity_values.npy", np.array([1, 3, 9, 27]))
    for name in ("hyperparameters.parquet", "objectives_evaluations.npy", "fidelities_values.npy"):
        (folder / name).unlink()
    benchmark = BlackboxBenchmark(folder, "one")
    assert len(benchmark.configs) == 2 and benchmark.fidelity == (1.0, 3.0, 9.0, 27.0)
    assert BlackboxBenchmark(folder, "other").replay(CONFIGS[2], range(1, 2))[0].metrics[
        "metric_valid_error"
    ] == pytest.approx(1.3)


def test_names(table: Path, tmp_path: Path) -> None:
    assert source_by_name("blackbox:small:one", tmp_path).name == "blackbox:small:one"
    assert source_by_name(f"blackbox:{table}:one").name == "blackbox:small:one"
    for name, field in (("blackbox:small:none", "task"), ("blackbox:none:one", "data"), ("blackbox:", "benchmark")):
        with pytest.raises(InvalidFieldError) as caught:
            source_by_name(name, tmp_path)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metadata.json", "{}"),
        ("metadata.json", "no JSON"),
        ("configspace.json", '{"hp_lr": {"domain_cls": "Strange"}}'),
        ("configspace.json", '{"hp_none": {"domain_cls": "Categorical", "domain_kwargs": {"categories": [1]}}}'),
        ("objectives_evaluations.npy", "no array"),
        ("hyperparameters.parquet", "no table"),
    ],
)
def test_files_that_are_something_else(table: Path, file: str, content: str) -> None:
    (table / file).write_text(content)
    with pytest.raises(InvalidFieldError):
        BlackboxBenchmark(table, "one")


@pytest.mark.parametrize(
    ("field", "given"), [("seed", 2), ("seed", -1), ("metric", "none"), ("mode", "best"), ("elapsed", "none")]
)
def test_arguments_that_cannot_be_used(table: Path, field: str, given: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        BlackboxBenchmark(table, "one", **{field: given})
    assert caught.value.field == field


def test_a_config_that_lacks_a_hyperparameter(table: Path) -> None:
    with pytest.raises(InvalidFieldError, match="hp_act"):
        BlackboxBenchmark(table, "one").replay({"hp_lr": 1.0, "hp_units": 16, "hp_layers": 1}, range(1, 2))


def never_run(config: Mapping[str, Any]) -> Any:
    raise AssertionError("a rehearsal runs no trainable")
    yield {}


def test_a_sweep_of_the_table(table: Path, tmp_path: Path) -> None:
    plan = RehearsalPlan(devices=3, source=BlackboxBenchmark(table, "one"), folder=tmp_path / "out")
    with rehearsing(plan), fluid.FluidExecutor(max_width=1, verbose=0) as executor:
        trials = [fluid.Trial(never_run, config, budget=4) for config in CONFIGS]
        executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
    outcome = outcome_of(tmp_path / "out" / "1", "metric_valid_error", "min")
    assert (outcome.makespan_s, outcome.best, outcome.results) == (120.0, pytest.approx(0.025), 12)
