"""Sweeps of Ray Tune that are rehearsed: Tune's decisions, results and checkpoints, on a virtual clock."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
import ray.tune.stopper
from ray.tune.schedulers import (
    ASHAScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search.bohb import TuneBOHB
from ray.tune.search.optuna import OptunaSearch
from tune_simulation import Controller
from tune_sweeps import Listener, Sweep, sweep

from fluid import FluidExecutor, tune
from fluid.errors import InvalidFieldError
from fluid.integrations.ray_tune.lane.rehearsed_trial import STATE_FILE
from fluid.integrations.ray_tune.schedulers.successive_halving import SuccessiveHalvingScheduler
from fluid.integrations.ray_tune.schedulers.sync_bohb import SyncBOHB
from fluid.integrations.ray_tune.virtual_time import MODULES
from fluid.rehearsal import RehearsalPlan, ReplayedIteration, rehearsing

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

#: Iterations after which a trial is done.
LENGTH = 27
SPACE = {"x": tune.uniform(0.0, 1.0)}


def curve(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
    """A trial is the better, and the slower, the larger ``x`` is."""
    x = config["x"]
    return [ReplayedIteration({"score": x * i}, seconds=60.0 + 60.0 * x) for i in iterations if i <= LENGTH]


def train(config: dict[str, Any]) -> None:
    raise AssertionError("a rehearsal runs no code of trials")


train.replay = curve  # type: ignore[attr-defined]


class Model(tune.Trainable):
    """The same as a class."""

    def setup(self, config: dict[str, Any]) -> None:
        raise AssertionError("a rehearsal runs no code of trials")

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        return curve(config, iterations)


#: Rehearses a sweep on a new executor; returns it and the seconds that it took on the virtual clock.
Rehearse = Callable[..., tuple[Sweep, float]]


@pytest.fixture
def rehearse(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    number = 0

    def run(trainable: Any, trials: int = 12, devices: int = 4, **options: Any) -> tuple[Sweep, float]:
        nonlocal number
        number += 1
        random.seed(5)
        np.random.seed(5)
        options = {"config": SPACE, "num_samples": trials, "metric": "score", "mode": "max", **options}
        folder = tmp_path / str(number)
        with FluidExecutor(backend="simulated", devices=devices, run_dir=folder / "fluid", verbose=0) as executor:
            done = sweep(trainable, folder / "tune", executor, options)
        times = [trial.run_metadata for trial in done.analysis.trials]
        begun = min(time.start_time or float("inf") for time in times)
        # Times since 1970 in a float have a quarter of a microsecond.
        return done, round(max(time.last_result_time or 0.0 for time in times) - begun, 4)

    return run


def asha() -> ASHAScheduler:
    return ASHAScheduler(max_t=LENGTH, grace_period=1, reduction_factor=3)


#: What two rehearsals may differ in.
OURS = frozenset({"trial_id", "pid", "date", "timestamp"})


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [train, Model])
def test_the_same_seed_gives_the_same_sweep(rehearse: Rehearse, trainable: Any) -> None:
    first, took = rehearse(trainable, 24, scheduler=asha())
    second, again = rehearse(trainable, 24, scheduler=asha())
    assert first.configs == second.configs
    assert first.results(OURS) == second.results(OURS)
    assert took == again > LENGTH * 60.0
    assert first.best == second.best
    assert len({len(trial.rows) for trial in first.trials}) > 2  # ASHA has stopped some at several rungs.


def test_asha_decides_as_it_does_over_actors_that_give_the_same_results_in_the_same_order(rehearse: Rehearse) -> None:
    class Order(Listener):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[tuple[str, int]] = []

        def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
            super().log_trial_result(iteration, trial, result)
            self.order.append((trial.trial_id, result["training_iteration"]))

    listener = Order()
    rehearsed, _ = rehearse(Model, 24, scheduler=asha(), callbacks=[listener])
    oracle = ASHAScheduler(metric="score", mode="max", max_t=LENGTH, grace_period=1, reduction_factor=3)
    controller = Controller(oracle)
    known: dict[str, Any] = {}
    rows = {(row["trial_id"], row["training_iteration"]): row for trial in rehearsed.trials for row in trial.rows}
    ended: dict[str, int] = {}
    for trial_id, iteration in listener.order:
        if trial_id not in known:
            known[trial_id] = controller.add()
            known[trial_id].set_status("RUNNING")
        row = rows[trial_id, iteration]
        if controller.process(known[trial_id], {**row, "done": False}) == TrialScheduler.STOP:
            ended[trial_id] = iteration
    assert ended == {trial.rows[-1]["trial_id"]: len(trial.rows) for trial in rehearsed.trials}


def test_a_result_has_the_fields_of_tune_with_virtual_times(rehearse: Rehearse) -> None:
    class Real(tune.Trainable):
        def step(self) -> dict[str, Any]:
            return {"score": 1.0, "timesteps_this_iter": 5}

    def steps(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"score": 1.0, "timesteps_this_iter": 5}, seconds=2.5) for _ in iterations]

    Real.replay = staticmethod(steps)  # type: ignore[attr-defined]
    expected = Real({"x": 0.5})
    expected.train()
    real = expected.train()
    rehearsed, _ = rehearse(Real, 1, devices=1, config={"x": 0.5}, stop={"training_iteration": 2})
    row = rehearsed.trials[0].rows[1]
    filled = {name: row[name] for name in real}
    assert [name for name in row if name in real] == list(real)
    same = real.keys() - {"trial_id", "timestamp", "date", "done"}
    times = {"time_this_iter_s": 2.5, "time_total_s": 5.0, "time_since_restore": 5.0}
    assert {name: filled[name] for name in same} == {**{name: real[name] for name in same}, **times}
    assert row["timestamp"] - rehearsed.trials[0].rows[0]["timestamp"] in (2, 3)
    stamp = time.mktime(time.strptime(row["date"], "%Y-%m-%d_%H-%M-%S"))
    assert stamp == row["timestamp"]


def test_a_time_budget_ends_on_the_virtual_clock(rehearse: Rehearse) -> None:
    rehearsed, took = rehearse(Model, 12, devices=2, time_budget_s=600.0)
    assert 450.0 < took <= 600.0
    assert set(rehearsed.statuses) == {"TERMINATED"}
    assert max(row["time_total_s"] for trial in rehearsed.trials for row in trial.rows) <= 600.0
    assert ray.tune.stopper.timeout.time is time  # type: ignore[attr-defined]


def test_a_stopper_and_a_scheduler_by_time_read_the_virtual_clock(rehearse: Rehearse) -> None:
    stopper = ray.tune.stopper.TimeoutStopper(900)
    _, took = rehearse(train, 12, devices=2, stop=stopper)
    assert 750.0 < took <= 900.0
    by_time = ASHAScheduler(time_attr="time_total_s", max_t=1000, grace_period=130, reduction_factor=2)
    rehearsed, _ = rehearse(train, 12, scheduler=by_time)
    ends = [trial.rows[-1]["time_total_s"] for trial in rehearsed.trials]
    assert min(ends) >= 130.0
    assert any(end < 1000.0 for end in ends)
    assert all(end < 1000.0 + 1000.0 for end in ends)


def test_trials_start_and_end_when_they_do_on_the_virtual_clock(rehearse: Rehearse) -> None:
    rehearsed, took = rehearse(Model, 6, devices=2)
    spans = [trial.run_metadata for trial in rehearsed.analysis.trials]
    alone = [LENGTH * (60.0 + 60.0 * config["x"]) for config in rehearsed.configs]
    assert min(span.last_result_time - span.start_time for span in spans) >= min(alone) - 0.01
    assert max(alone) < took < sum(alone)
    assert len({span.start_time for span in spans}) > 1


@pytest.mark.slow
def test_a_population_goes_on_from_the_iteration_of_its_better_members(rehearse: Rehearse) -> None:
    def population() -> PopulationBasedTraining:
        mutations = {"x": tune.uniform(0.0, 1.0)}
        return PopulationBasedTraining("training_iteration", perturbation_interval=3, hyperparam_mutations=mutations)

    for trainable in (train, Model):
        first, took = rehearse(trainable, 8, scheduler=population())
        second, again = rehearse(trainable, 8, scheduler=population())
        assert took == again
        assert first.results(OURS) == second.results(OURS)
        copied = [trial for trial in first.trials if len({row["config"]["x"] for row in trial.rows}) > 1]
        assert copied
        for trial in copied:
            for row in trial.rows:
                assert row["score"] == pytest.approx(row["config"]["x"] * row["training_iteration"])
            restored = [row for row in trial.rows if row["iterations_since_restore"] < row["training_iteration"]]
            assert restored
            assert trial.iterations[-1] == LENGTH
            folders = trial.folder.glob("checkpoint_*")
            saved = [json.loads((folder / STATE_FILE).read_text())["training_iteration"] for folder in folders]
            assert saved
            assert all(iteration % 3 == 0 for iteration in saved)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"scheduler": HyperBandScheduler(max_t=9)},
        lambda: {"scheduler": MedianStoppingRule(grace_period=3, min_samples_required=2)},
        lambda: {"scheduler": SuccessiveHalvingScheduler(max_t=9)},
        lambda: {"search_alg": OptunaSearch(seed=3), "scheduler": asha()},
        lambda: {"search_alg": TuneBOHB(seed=3), "scheduler": HyperBandForBOHB(max_t=9)},
        lambda: {"search_alg": TuneBOHB(seed=3), "scheduler": SyncBOHB(max_t=9)},
        lambda: {"config": {"x": tune.grid_search([0.1, 0.5, 0.9])}, "num_samples": 1},
    ],
    ids=["hyperband", "median", "halving", "optuna", "bohb", "bohb in rounds", "grid"],
)
def test_schedulers_and_searchers_run_unchanged(rehearse: Rehearse, make: Callable[[], dict[str, Any]]) -> None:
    first, took = rehearse(Model, 9, **make())
    second, again = rehearse(Model, 9, **make())
    assert set(first.statuses) == {"TERMINATED"}
    assert first.results(OURS) == second.results(OURS)
    assert took == again > 0.0
    assert max(len(trial.rows) for trial in first.trials) >= 9


def test_a_checkpoint_at_the_end_is_one_of_tune(rehearse: Rehearse) -> None:
    config = tune.CheckpointConfig(checkpoint_at_end=True, checkpoint_frequency=9)
    rehearsed, _ = rehearse(Model, 2, checkpoint_config=config)
    for trial in rehearsed.trials:
        folders = sorted(trial.folder.glob("checkpoint_*"))
        done = [json.loads((folder / STATE_FILE).read_text())["training_iteration"] for folder in folders]
        assert done == [9, 18, 27]


def test_a_tuner_rehearses_with_a_source_in_place_of_its_trainable(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")

    class Source:
        def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
            return curve(config, iterations)

    def other(config: dict[str, Any]) -> None:
        raise AssertionError

    plan = RehearsalPlan(source=Source(), devices=2)
    with rehearsing(plan), FluidExecutor(backend="local", run_dir=tmp_path / "fluid", verbose=0) as executor:
        options = tune.TuneConfig(metric="score", mode="max", num_samples=4)
        storage = tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0)
        tuner = tune.Tuner(other, param_space=SPACE, tune_config=options, run_config=storage, executor=executor)
        results = tuner.fit()
    assert [result.metrics["training_iteration"] for result in results] == [LENGTH] * 4


def test_a_trainable_that_cannot_be_replayed_is_refused(rehearse: Rehearse) -> None:
    def other(config: dict[str, Any]) -> None:
        raise AssertionError

    with pytest.raises(InvalidFieldError, match="no replay"):
        rehearse(other, 1)


def test_trials_that_would_run_on_ray_itself_are_refused(rehearse: Rehearse) -> None:
    def other(config: dict[str, Any]) -> None:
        raise AssertionError("a rehearsal runs no code of trials")

    other.replay = curve  # type: ignore[attr-defined]
    bundles = tune.with_resources(other, tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}]))
    with pytest.raises(InvalidFieldError, match=r"several bundles.*cannot be rehearsed"):
        rehearse(bundles, 1)


@pytest.mark.slow
def test_the_clocks_of_tune_are_put_back(rehearse: Rehearse) -> None:
    import importlib

    rehearse(Model, 1, stop={"training_iteration": 1})
    assert all(importlib.import_module(name).time is time for name in MODULES)  # type: ignore[attr-defined]
