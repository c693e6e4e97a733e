"""What cannot succeed is not tried thrice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vain_trainables as trainables

import fluid
from fluid import FluidExecutor, SweepFailedError, SweepResult, TrialFailedError
from fluid.search import uniform
from fluid.sweeping.plan import UnreportedMetricError


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """An executor whose user has not said how often a trial is tried."""
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=1, run_dir=folder, verbose=0) as made:
        yield made


def run(executor: FluidExecutor, trainable: Any, calls: Path, **options: Any) -> SweepResult:
    space = {"x": uniform(0.0, 1.0), "calls": str(calls)}
    arguments = {"metric": "loss", "samples": 6, "algorithm": "random", "budget": 3, "executor": executor, **options}
    return fluid.run(trainable, space, **arguments)


def tries(calls: Path) -> int:
    return calls.read_text(encoding="utf-8").count("called")


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        (trainables.returns_nothing, "returned nothing"),
        (trainables.returns_a_number, "return {'loss': 0.5}, say"),
        (trainables.returns_a_tuple, "return {'loss': ..., 'accuracy': ...}, a name for each"),
        (trainables.yields_a_number, "not float: yield {'loss': 0.5}, say"),
        (trainables.yields_a_pair, "write def yields_a_pair(config, state), which gets None at first"),
        (trainables.yields_no_pair, "has a parameter named state, so it must yield (metrics, state), not a dict"),
        (trainables.StepsWithoutMetrics, "step() must give a dict of metrics per iteration, not NoneType: return"),
    ],
)
def test_a_trainable_that_cannot_be_run_ends_the_sweep_at_once(
    default: FluidExecutor, trainable: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(SweepFailedError) as raised:
        run(default, trainable, tmp_path / "calls", max_concurrent=1)
    assert str(raised.value).startswith("the trainable cannot be run: ") and text in str(raised.value)
    assert tries(tmp_path / "calls") == 1
    assert raised.value.result.trials[0].state == "FAILED"


def test_a_trainable_that_has_reported_can_be_run(default: FluidExecutor, tmp_path: Path) -> None:
    space = {"layers": [1, 2, 1], "calls": str(tmp_path / "calls")}
    shared = {"metric": "loss", "algorithm": "grid", "budget": 1, "max_concurrent": 1, "executor": default}
    result = fluid.run(trainables.returns_nothing_above_one, space, **shared)
    assert [trial.state for trial in result.trials] == ["DONE", "FAILED", "DONE"]


def test_first_trials_that_fail_alike_end_the_sweep(default: FluidExecutor, tmp_path: Path) -> None:
    with pytest.raises(SweepFailedError) as raised:
        run(default, trainables.misspells_a_key, tmp_path / "calls", max_concurrent=1)
    text = "the first 3 trials failed alike, without a result, so no further one is tried: KeyError: 'learning_rate'"
    assert str(raised.value).startswith(f"{text}: config has x, calls;")
    assert tries(tmp_path / "calls") == 6, "each of the three is tried once more"
    cause = raised.value.__cause__
    assert isinstance(cause, TrialFailedError) and "/fluid/" not in cause.failure.traceback


def test_an_exception_that_comes_again_ends_its_trial(default: FluidExecutor, tmp_path: Path) -> None:
    with pytest.raises(SweepFailedError, match="all 2 trials failed"):
        run(default, trainables.raises_after_two, tmp_path / "calls", samples=2)
    assert tries(tmp_path / "calls") == 4


def test_one_that_comes_later_each_time_is_tried_as_often_as_any(default: FluidExecutor, tmp_path: Path) -> None:
    with pytest.raises(SweepFailedError):
        run(default, trainables.raises_otherwise_each_time, tmp_path / "calls", samples=1, budget=9)
    assert tries(tmp_path / "calls") == 3


@pytest.mark.parametrize("name", ["finds_no_disk", "finds_no_server", "finds_no_gpu"])
def test_what_may_pass_is_tried_as_often_as_any(default: FluidExecutor, name: str, tmp_path: Path) -> None:
    with pytest.raises(SweepFailedError, match="all 4 trials failed"):
        run(default, getattr(trainables, name), tmp_path / "calls", samples=4, max_concurrent=1)
    assert tries(tmp_path / "calls") == 12


def test_max_failures_counts_where_it_was_given(tmp_path: Path) -> None:
    with (
        FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0, max_failures=3) as executor,
        pytest.raises(SweepFailedError, match="all 4 trials failed"),
    ):
        run(executor, trainables.returns_nothing, tmp_path / "calls", samples=4, max_concurrent=1)
    assert tries(tmp_path / "calls") == 16


def test_first_trials_of_a_grid_that_share_a_value_do_not_end_it(default: FluidExecutor, tmp_path: Path) -> None:
    space = {"kernel": ["poly", "rbf"], "degree": [1, 2, 3, 4], "calls": str(tmp_path / "calls")}
    shared = {"metric": "loss", "algorithm": "grid", "budget": 1, "max_concurrent": 1, "executor": default}
    result = fluid.run(trainables.has_no_poly, space, **shared)
    assert [trial.state for trial in result.trials] == ["FAILED"] * 4 + ["DONE"] * 4


def test_first_configs_of_a_function_that_share_a_value_do_not_end_it(default: FluidExecutor, tmp_path: Path) -> None:
    pytest.importorskip("optuna")

    def space(trial: Any) -> dict[str, Any]:
        kernel = "poly" if trial.number < 4 else "rbf"
        return {"kernel": kernel, "degree": trial.suggest_int("degree", 1, 9), "calls": str(tmp_path / "calls")}

    shared = {"metric": "loss", "algorithm": "random", "samples": 6, "budget": 1, "max_concurrent": 1}
    result = fluid.run(trainables.has_no_poly, space, executor=default, **shared)
    assert [trial.state for trial in result.trials] == ["FAILED"] * 4 + ["DONE"] * 2


def test_messages_that_differ_in_numbers_do_not_end_a_sweep_at_three(default: FluidExecutor, tmp_path: Path) -> None:
    space = {"layers": [6, 5, 4, 3], "calls": str(tmp_path / "calls")}
    shared = {"metric": "loss", "algorithm": "grid", "budget": 1, "max_concurrent": 1, "executor": default}
    assert fluid.run(trainables.has_few_layers, space, **shared).best.value == 3


def test_a_long_grid_is_given_up_in_the_end(default: FluidExecutor, tmp_path: Path) -> None:
    space = {"kernel": ["poly", "rbf"], "degree": list(range(40)), "calls": str(tmp_path / "calls")}
    shared = {"metric": "loss", "algorithm": "grid", "budget": 1, "max_concurrent": 1, "executor": default}
    with pytest.raises(SweepFailedError, match="the first 30 trials failed alike"):
        fluid.run(trainables.has_no_poly, space, **shared)


# -- a metric that comes later than the first rung


def test_trials_are_compared_once_they_have_reported_the_metric(default: FluidExecutor, tmp_path: Path) -> None:
    options = {"algorithm": "asha", "samples": 9, "budget": 9}
    result = run(default, trainables.validates_every_third, tmp_path / "calls", **options)
    assert {trial.state for trial in result.trials} <= {"DONE", "STOPPED"}
    lengths = sorted(trial.iteration for trial in result.trials)
    assert lengths[0] == 3 and lengths[-1] == 9 and lengths.count(9) < 9
    assert result.best.iteration == 9
    assert all("loss" not in one.metrics for trial in result.trials for one in trial.results if one.iteration % 3)


def test_a_metric_that_comes_too_late_says_what_to_do(default: FluidExecutor, tmp_path: Path) -> None:
    with pytest.raises(UnreportedMetricError) as raised:
        run(default, trainables.validates_at_its_end, tmp_path / "calls", algorithm="asha", samples=3, budget=9)
    assert "but 'train_loss' in 3 iterations" in str(raised.value)
    assert "if it comes after iteration 3, raise min_budget=" in str(raised.value)
    late = {"algorithm": "asha", "samples": 3, "budget": 9, "min_budget": 9}
    assert run(default, trainables.validates_at_its_end, tmp_path / "calls", **late).best.iteration == 9
