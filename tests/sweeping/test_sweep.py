"""fluid.run on real lanes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from sweep_trainables import (
    Counter,
    curve,
    fail_above_one,
    nan_below_zero,
    once,
    out_of_memory_above_one,
    perfect,
    short,
    sleep_and_return,
)

import fluid
from fluid import (
    FluidError,
    FluidExecutor,
    InvalidFieldError,
    SweepFailedError,
    SweepResult,
    Trial,
    TrialFailedError,
    TrialGroup,
)
from fluid.engine import tuning
from fluid.search import Plateau, Target, TrialPlateau, uniform

SPACE = {"x": uniform(0.0, 1.0)}


def run(executor: FluidExecutor | None, trainable: Any = curve, space: Any = SPACE, **options: Any) -> SweepResult:
    arguments = {"metric": "loss", "mode": "min", "samples": 9, "budget": 9, "executor": executor, **options}
    return fluid.run(trainable, space, **arguments)


def lengths(result: SweepResult) -> list[int]:
    return sorted(trial.iteration for trial in result.trials)


# -- the algorithms


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("sha", [1] * 6 + [3] * 2 + [9]),
        ("hyperband", [1] * 6 + [3] * 6 + [9] * 5),
        ("random", [9] * 9),
    ],
)
def test_synchronous_algorithms(executor: FluidExecutor, algorithm: str, expected: list[int]) -> None:
    samples = None if algorithm == "hyperband" else 9
    result = run(executor, algorithm=algorithm, samples=samples)
    assert lengths(result) == expected
    assert all(result.config == trial.config for trial in result.trials for result in trial.results)
    assert {trial.state for trial in result.trials} <= {"DONE", "STOPPED"}
    assert sum(trial.state == "DONE" for trial in result.trials) == expected.count(9)
    assert result.best.trial.config["x"] == min(trial.config["x"] for trial in result.trials if trial.iteration == 9)
    assert result.state == "DONE"
    assert result.notes == ()


@pytest.mark.parametrize("algorithm", ["asha", "sha", "hyperband", "random"])
def test_a_function_that_returns_its_metrics_runs_once(executor: FluidExecutor, algorithm: str, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    result = run(executor, once, {**SPACE, "calls": str(calls)}, algorithm=algorithm)
    assert calls.read_text(encoding="utf-8").count("called") == 9
    assert lengths(result) == [1] * 9
    assert [trial.trial_id for trial in result.trials] == [f"{result.name}-{number:05d}" for number in range(9)]
    assert result.best.value == min(trial.config["x"] for trial in result.trials)
    assert result.best.trial.state == "DONE"


@pytest.mark.slow
def test_a_function_that_returns_its_metrics_may_take_far_longer_than_others(
    executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LEAST_DUMP_S", 1.0)  # A minute.
    monkeypatch.setattr(tuning, "LEAST_KILL_S", 4.0)  # Ten minutes.
    points = [{"seconds": 0.01 * (number + 1)} for number in range(6)]
    options = {"algorithm": "random", "samples": 7, "points": [*points, {"seconds": 9.0}], "max_concurrent": 1}
    result = run(executor, sleep_and_return, {"seconds": uniform(0.0, 9.0)}, **options)
    assert [trial.state for trial in result.trials] == ["DONE"] * 7


@pytest.mark.parametrize("algorithm", ["asha", "random"])
def test_of_equal_trials_the_best_is_one_whose_checkpoint_is_kept(algorithm: str, tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path, verbose=0, keep="best:1"):
        options = {"metric": "accuracy", "mode": "max", "algorithm": algorithm, "samples": 12}
        results = [run(None, perfect, **options, name=f"sweep-{number}") for number in range(3)]
    for result in [*results, *(fluid.load(tmp_path) for _ in range(1))]:
        assert (result.best.value, result.best.iteration, result.best.checkpoint_iteration) == (1.0, 3, 3)
        assert result.best.load_checkpoint() == 3


def test_sha_promotes_the_best(executor: FluidExecutor) -> None:
    ranked = sorted(run(executor, algorithm="sha").trials, key=lambda trial: trial.config["x"])
    assert [trial.iteration for trial in ranked] == [9, 3, 3, 1, 1, 1, 1, 1, 1]


def test_asha(executor: FluidExecutor) -> None:
    result = run(executor, samples=27, budget=27)
    found = lengths(result)
    assert len(found) == 27
    assert set(found) <= {1, 3, 9, 27}
    assert sum(length > 1 for length in found) >= 9
    assert found[-1] == 27
    ranked = sorted(result.trials, key=lambda trial: trial.config["x"])
    assert ranked[0].iteration == 27, "the best of all is promoted whenever it comes"


def test_grid_of_lists(executor: FluidExecutor) -> None:
    result = run(executor, space={"x": [0.3, 0.1, 0.2], "y": [1, 2]}, algorithm="grid", samples=None, budget=2)
    assert [trial.config["x"] for trial in result.trials] == [0.3, 0.3, 0.1, 0.1, 0.2, 0.2]
    assert lengths(result) == [2] * 6


def test_tpe_comes_closer(executor: FluidExecutor) -> None:
    pytest.importorskip("optuna")
    result = run(executor, algorithm="tpe", samples=25, budget=1)
    assert len(result.trials) == 25
    values = [trial.config["x"] for trial in result.trials]
    assert sum(values[12:]) / 13 < sum(values[:12]) / 12


def test_a_conditional_space(executor: FluidExecutor) -> None:
    pytest.importorskip("optuna")

    def space(trial: Any) -> dict[str, Any]:
        deep = trial.suggest_categorical("deep", [True, False])
        return {"x": trial.suggest_float("x", 0.0, 1.0) if deep else 2.0}

    result = run(executor, space=space, samples=12, budget=3)
    assert {trial.config["x"] == 2.0 for trial in result.trials} == {True, False}


def test_points_come_first(executor: FluidExecutor) -> None:
    result = run(executor, points=[{"x": 0.5}, {"x": 0.25}], samples=3)
    assert [trial.config["x"] for trial in result.trials][:2] == [0.5, 0.25]


@pytest.mark.parametrize("algorithm", ["asha", "sha", "random", "tpe"])
def test_the_same_seed_on_one_device_gives_the_same_sweep(algorithm: str, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")

    def sweep(number: int) -> list[Any]:
        options = {"devices": 1, "packing": "off", "run_dir": tmp_path / str(number), "verbose": 0}
        with FluidExecutor(backend="local", **options) as executor:
            result = run(executor, algorithm=algorithm, samples=9, seed=3)
            return [(trial.trial_id, trial.config, trial.iteration) for trial in result.trials]

    assert sweep(1) == sweep(2)


# -- what ends trials and sweeps


def test_a_trial_that_ends_early(executor: FluidExecutor) -> None:
    result = run(executor, short, {"length": [0, 1, 2, 3, 5, 9, 12]}, algorithm="random", samples=20)
    assert all(trial.iteration == min(9, trial.config["length"]) for trial in result.trials)
    asha = run(executor, short, {"length": [1, 2, 3, 5, 9, 12]}, samples=20)
    assert len(asha.trials) == 20
    assert max(lengths(asha)) <= 9


def test_values_at_which_a_trial_stops(executor: FluidExecutor) -> None:
    result = run(executor, algorithm="random", samples=4, budget=10**9, stop={"at": 5, "gain": 2.0})
    # Iterations this short run on until the decision reaches them.
    assert all(5 <= trial.iteration < 10**9 for trial in result.trials)
    assert {trial.state for trial in result.trials} == {"DONE"}


@pytest.mark.parametrize(("budget", "samples"), [(50, 1), (2, 9)])
def test_a_value_to_stop_at_of_a_metric_that_is_not_there_is_warned_of_once(
    budget: int, samples: int, executor: FluidExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"algorithm": "random", "budget": budget, "samples": samples, "max_concurrent": 1}
    result = run(executor, stop={"lss": 0.5, "at": 10**9}, **options)
    (warning,) = [one.getMessage() for one in caplog.records if one.name == "fluid.sweeping.loop"]
    assert f"stop['lss'] stops no trial of the sweep {result.name!r}" in warning
    assert warning.endswith("but 'loss', 'gain', 'at'")


def test_a_trial_on_a_plateau_stops(executor: FluidExecutor) -> None:
    result = run(executor, algorithm="random", samples=2, budget=10**9, stop=TrialPlateau(iterations=3, min_delta=0.1))
    assert all(5 <= trial.iteration < 10**9 for trial in result.trials)
    assert {trial.state for trial in result.trials} == {"STOPPED"}


def test_a_target_ends_the_sweep(executor: FluidExecutor) -> None:
    result = run(executor, algorithm="random", samples=None, budget=1000, stop=Target(1.05))
    assert result.best.value <= 1.05
    assert result.notes == ("The sweep ended early: the metric reached the target 1.05.",)
    assert result.state == "DONE"


def test_a_plateau_ends_the_sweep(executor: FluidExecutor) -> None:
    result = run(executor, samples=None, budget=3, algorithm="random", stop=[Plateau(trials=7)])
    assert "did not improve in 7 trials" in result.notes[0]
    assert len(result.trials) < 200


def test_the_time_budget_ends_the_sweep(executor: FluidExecutor) -> None:
    result = run(executor, samples=3, budget=10**9, algorithm="random", time_budget_s=0.5)
    assert result.notes == ("The sweep ended early: the time budget of 0.5 s was used up.",)
    assert {trial.state for trial in result.trials} == {"UNFINISHED"} and result.state == "UNFINISHED"
    assert result.best.iteration > 1


def test_a_time_budget_of_nothing(executor: FluidExecutor) -> None:
    result = run(executor, samples=None, time_budget_s=0.0)
    assert len(result.notes) == 1


# -- metrics


def test_nothing_but_nan_is_said(executor: FluidExecutor, caplog: pytest.LogCaptureFixture) -> None:
    result = run(executor, nan_below_zero, {"x": uniform(-1.0, -0.5)}, samples=2)
    assert "no trial has reported a number as 'loss', but NaN" in caplog.text
    with pytest.raises(FluidError, match="no trial has reported a number as 'loss', but NaN"):
        _ = result.best


def test_nan_is_the_worst(executor: FluidExecutor) -> None:
    result = run(executor, nan_below_zero, {"x": uniform(-1.0, 1.0)}, algorithm="sha", samples=18)
    promoted = [trial.config["x"] for trial in result.trials if trial.iteration > 1]
    assert len(promoted) == 6
    assert min(promoted) > 0.0


def test_several_metrics(executor: FluidExecutor) -> None:
    result = run(executor, metric=("loss", "gain"), mode=("min", "min"), algorithm="random", samples=6, budget=1)
    assert result.metric == ("loss", "gain")
    assert len(result.pareto) == 6, "less of one is more of the other"
    best = executor.status().groups[-1].best
    assert best is not None
    x = best.config["x"]
    assert (best.value, best.besides) == (x + 1.0, {"gain": -x})
    with pytest.raises(InvalidFieldError, match="'asha' compares trials by one metric"):
        run(executor, metric=("loss", "gain"), mode=("min", "min"))


def test_several_metrics_are_known_from_the_folder(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path, verbose=0):
        options = {"metric": ("loss", "gain"), "mode": ("min", "max"), "algorithm": "random", "samples": 4}
        result = run(None, budget=1, **options)
    loaded = fluid.load(tmp_path)
    assert (loaded.metric, loaded.mode) == (("loss", "gain"), ("min", "max"))
    assert [best.value for best in loaded.pareto] == [best.value for best in result.pareto]
    assert fluid.load(tmp_path, metric="gain", mode="max").best.value == max(best.value[1] for best in result.pareto)


def test_nested_metrics(executor: FluidExecutor) -> None:
    def train(config: Any) -> Any:
        while True:
            yield {"test": {"loss": config["x"]}}

    result = run(executor, train, metric="test/loss")
    assert result.best.value == min(trial.config["x"] for trial in result.trials)


# -- failures


def test_failed_trials_do_not_end_the_sweep(executor: FluidExecutor) -> None:
    result = run(executor, fail_above_one, {"x": uniform(0.0, 2.0)}, algorithm="sha", samples=18, min_budget=3)
    failed = [trial for trial in result.trials if trial.state == "FAILED"]
    assert failed
    assert len(result.failures) == len(failed)
    assert all(trial.config["x"] > 1.0 for trial in failed)
    assert result.best.config["x"] < 1.0


def test_if_all_fail_the_first_failure_is_raised(executor: FluidExecutor) -> None:
    with pytest.raises(SweepFailedError, match=r"all 3 trials failed; the first one: ValueError: 2.0 is") as caught:
        run(executor, fail_above_one, {"x": 2.0}, samples=3, min_budget=3)
    assert isinstance(caught.value.__cause__, TrialFailedError)
    assert isinstance(caught.value.__cause__.__cause__, ValueError)
    assert len(caught.value.result.failures) == 3


@pytest.mark.parametrize(("on_oom", "is_told"), [("fail", False), ("worst", True)])
def test_exhausted_memory_as_the_worst_value(
    executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch, on_oom: str, is_told: bool
) -> None:
    from fluid.search.samplers import RandomSampler

    told: list[tuple[Any, bool]] = []
    tell = RandomSampler.tell

    def recorded(self: RandomSampler, token: int, values: Any, *, failed: bool = False) -> None:
        told.append((values, failed))
        tell(self, token, values, failed=failed)

    monkeypatch.setattr(RandomSampler, "tell", recorded)
    points = [{"x": 0.5}, {"x": 0.75}, {"x": 1.5}]
    options = {"algorithm": "random", "samples": 3, "budget": 2, "on_oom": on_oom, "max_concurrent": 1}
    result = run(executor, out_of_memory_above_one, {"x": uniform(0.0, 2.0)}, points=points, **options)
    assert [trial.state for trial in result.trials] == ["DONE", "DONE", "FAILED"]
    assert told[-1] == (((1.5,), False) if is_told else (None, True))


def test_a_lane_that_dies_loses_nothing(executor: FluidExecutor, tmp_path: Path) -> None:
    space = {"x": uniform(0.0, 1.0), "marker": str(tmp_path / "died"), "dies_at": 5}
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path / "run", verbose=0) as lasting:
        result = run(lasting, Counter, space, algorithm="sha")
    assert (tmp_path / "died").exists()
    assert lengths(result) == [1] * 6 + [3] * 2 + [9]
    for trial in result.trials:
        assert [one.metrics["count"] for one in trial.results] == list(range(1, trial.iteration + 1))


def test_the_best_trials_checkpoint_outlives_the_sweep(executor: FluidExecutor, tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path / "run", verbose=0, keep="best:1") as keeping:
        result = run(keeping, Counter)
        assert result.best.checkpoint is not None, "also while the executor is open"
    assert result.best.checkpoint_iteration == result.best.iteration == 9
    assert result.best.load_checkpoint().count == 9


# -- executors, names, callbacks


def test_the_executor_in_force_is_used_and_left_open(executor: FluidExecutor) -> None:
    result = run(None, name="in force", samples=2)
    assert result.run_dir == executor.run_dir
    assert result.name == "in force"
    assert not executor.closed
    again = run(None, name="in force", samples=2)
    assert again.name == "in force-2"
    assert len(again.trials) == 2


def test_a_given_executor_is_closed_at_the_end(executor: FluidExecutor, tmp_path: Path) -> None:
    given = FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "given", verbose=0)
    result = run(given, samples=2)
    assert given.closed
    assert len(fluid.load(result.run_dir).trials) == 2


def test_other_groups_are_not_disturbed(executor: FluidExecutor) -> None:
    with pytest.raises(InvalidFieldError):
        run(executor, metric="losss", samples=4, budget=10**9, algorithm="random")
    handle = executor.submit_trialgroup(TrialGroup([Trial(curve, {"x": 1.0}, budget=50, trial_id="other")]))
    assert len(run(executor, samples=4).trials) == 4
    assert len(list(handle.results())) == 50


def test_callbacks_are_called_besides(executor: FluidExecutor, caplog: pytest.LogCaptureFixture) -> None:
    class Recorder(fluid.TrialListener):
        def __init__(self) -> None:
            self.events: list[str] = []

        def on_result(self, result: fluid.Result) -> None:
            self.events.append(f"{result.trial_id} {result.iteration}")

        def on_end(self, trial_id: str, state: str, failure: Any) -> None:
            raise RuntimeError("oops")

    recorder = Recorder()
    with caplog.at_level(logging.ERROR):
        result = run(executor, name="watched", samples=1, budget=2, callbacks=[recorder])
    assert recorder.events == ["watched-00000 1", "watched-00000 2"]
    assert lengths(result) == [2]
    assert "a callback of the sweep 'watched' raised" in caplog.text


def test_further_fields_of_trials(executor: FluidExecutor) -> None:
    result = run(executor, samples=2, trial_options={"devices": 1 / 2, "priority": 3.0})
    assert len(result.trials) == 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"algorithm": "hypermapper"}, "algorithm='hypermapper': must be one of"),
        ({"metric": ()}, "metric="),
        ({"metric": None, "mode": None}, "metric=None"),
        ({"mode": "least"}, "mode='least'"),
        ({"samples": 0}, "samples=0"),
        ({"budget": 0}, "budget=0"),
        ({"eta": 1}, "eta=1"),
        ({"min_budget": 10}, "min_budget=10"),
        ({"time_budget_s": -1.0}, "time_budget_s=-1.0"),
        ({"stop": "soon"}, "stop='soon'"),
        ({"stop": {"loss": "low"}}, r"stop\['loss'\]='low'"),
        ({"on_oom": "ignore"}, "on_oom='ignore'"),
        ({"callbacks": [print]}, r"callbacks\[0\]="),
        ({"callbacks": [None]}, r"callbacks\[0\]="),
        ({"callbacks": 3}, "callbacks=3"),
        ({"executor": "local"}, "executor='local': must be a FluidExecutor"),
        ({"executor": None, "run_dir": "somewhere"}, "run_dir='somewhere'"),
        ({"name": ""}, "name=''"),
        ({"trial_options": {"id": 3}}, r"trial_options\['id'\]=3: must be one of chdir, devices"),
        ({"trial_options": [3]}, r"trial_options=\[3\]"),
        ({"algorithm": "sha", "max_concurrent": 2}, "max_concurrent=2"),
        ({"max_concurrent": 0}, "max_concurrent=0"),
        ({"algorithm": "grid"}, "is continuous"),
        ({"trainable": 3}, "trainable=3"),
    ],
)
def test_bad_arguments_are_refused(executor: FluidExecutor, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        run(**{"executor": executor, **options})
