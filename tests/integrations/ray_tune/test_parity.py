"""The same sweeps with and without Fluid: Tune's decisions, results and files must be the same."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import numpy as np
from ray.tune import CheckpointConfig
from ray.tune.schedulers import (
    ASHAScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
)
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter
from ray.tune.stopper import CombinedStopper, MaximumIterationStopper, Stopper

from fluid import tune

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import ORDER, TIMES, Both, Climber, assert_same, climb, sweep

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

SCORE = {"metric": "score", "mode": "max"}
TIMED = {"time_attr": "training_iteration"}
GRID = {"x": tune.grid_search([0.5, 2.0, 1.0, 1.5])}
LENGTH = {"training_iteration": 4}
#: Two trials of which PBT makes one continue from the other's checkpoint.
PAIR = {"x": tune.grid_search([0.5, 2.0])}
#: How a sweep is run with Ray alone where that makes no difference to what is tested: starting a process for each trial
#: takes most of the time. One trial after another, all in the process of the first.
REUSING = {"reuse_actors": True, "max_concurrent_trials": 1}
#: The same for schedulers that pause trials, which must all be there.
PAUSING = {"reuse_actors": True}
#: Alone, for under Ray alone HyperBand may wait for ever for a trial that is being saved while another reports.
ALONE = {"cpu": 2}
TRAINABLES = pytest.mark.parametrize("trainable", [Climber, climb], ids=["class", "function"])

# --- Without a scheduler


@TRAINABLES
def test_grid(both: Both, trainable: Any) -> None:
    stock, fluid = both(trainable, lambda: {"config": GRID, "stop": LENGTH})
    assert_same(stock, fluid)
    assert [row["score"] for row in fluid.trials[0].rows] == [0.5, 1.0, 1.5, 2.0]
    assert all(trial.logged == trial.rows for trial in fluid.trials)
    assert [trial.progress for trial in fluid.trials] == [trial.progress for trial in stock.trials]
    params = [[json.loads((t.folder / "params.json").read_text()) for t in s.trials] for s in (stock, fluid)]
    assert params[0] == params[1] == stock.configs


@pytest.mark.slow
def test_random_search_over_a_nested_space(both: Both) -> None:
    space = {
        "x": tune.uniform(0.5, 1.5),
        "model": {"layers": [tune.choice([16, 32]), {"kind": tune.grid_search(["relu", "tanh"])}], "depth": 3},
        "twice": tune.sample_from(lambda config: 2 * config["x"]),
    }
    stock, fluid = both(
        Climber,
        lambda: {
            "config": space,
            "num_samples": 2,
            "search_alg": BasicVariantGenerator(random_state=7),
            "stop": {"training_iteration": 2},
        },
        {"reuse_actors": True},
    )
    assert_same(stock, fluid)
    assert len(fluid.trials) == 4
    assert all(config["twice"] == 2 * config["x"] for config in fluid.configs)


@pytest.mark.slow
def test_trials_that_end_by_themselves(both: Both) -> None:
    config = {"x": 1.0, "ends_at": tune.grid_search([1, 3, 5])}
    stock, fluid = both(Climber, lambda: {"config": config, "stop": LENGTH}, REUSING)
    assert_same(stock, fluid)
    assert [len(trial.rows) for trial in fluid.trials] == [1, 3, 4]


@pytest.mark.slow
@TRAINABLES
def test_parameters_and_resources_that_come_with_the_trainable(both: Both, trainable: Any) -> None:
    assert_same(*both(with_extras(trainable), lambda: {"config": {"x": tune.grid_search([1.0, 2.0])}, "stop": LENGTH}))


def with_extras(trainable: Any) -> Any:
    """The trainable with a large parameter, which Tune keeps in its object store, and with its own core."""
    table = np.arange(200_000.0)
    if trainable is climb:

        def summed(config: dict[str, Any], table: Any) -> None:
            climb({**config, "x": config["x"] + table[-1]})

        return tune.with_resources(tune.with_parameters(summed, table=table), {"cpu": 1})

    class Summed(Climber):
        def setup(self, config: dict[str, Any], table: Any) -> None:
            super().setup(config)
            self.score = float(table.sum())

    return tune.with_resources(tune.with_parameters(Summed, table=table), {"cpu": 1})


# --- Schedulers that decide in rounds: the same in any order of results


@pytest.mark.slow
def test_hyperband(both: Both) -> None:
    def make() -> dict[str, Any]:
        # A bracket of two trials, which are never compared, and one of three, of which one is promoted.
        config = {"x": tune.grid_search([0.5, 2.0, 1.0, 1.5, 1.2])}
        scheduler = HyperBandScheduler(**TIMED, **SCORE, max_t=3, reduction_factor=3)
        return {"config": config, "scheduler": scheduler, "resources_per_trial": ALONE}

    stock, fluid = both(Climber, make, PAUSING)
    assert_same(stock, fluid, TIMES | ORDER)
    assert [len(trial.rows) for trial in fluid.trials] == [3, 3, 1, 3, 1]


@pytest.mark.slow
def test_bohb(both: Both) -> None:
    pytest.importorskip("ConfigSpace")
    pytest.importorskip("hpbandster")
    from ray.tune.search.bohb import TuneBOHB

    def make() -> dict[str, Any]:
        return {
            "config": {"x": tune.uniform(0.5, 1.5)},
            "num_samples": 5,
            # The model's suggestions depend on the order of results, so it is not asked.
            "search_alg": TuneBOHB(**SCORE, seed=5, bohb_config={"random_fraction": 1.0}),
            "scheduler": HyperBandForBOHB(**TIMED, **SCORE, max_t=3, reduction_factor=3),
            "resources_per_trial": ALONE,
        }

    stock, fluid = both(Climber, make, PAUSING)
    assert_same(stock, fluid, TIMES | ORDER)
    assert {len(trial.rows) for trial in fluid.trials} == {1, 3}


@pytest.mark.slow
def test_population_based_training_in_lock_step(both: Both) -> None:
    def make() -> dict[str, Any]:
        scheduler = PopulationBasedTraining(
            **TIMED,
            **SCORE,
            perturbation_interval=2,
            # Without its own exploration: how often others have used the same generator depends on time.
            custom_explore_fn=lambda config: {"x": config["x"] + 0.25},
            synch=True,
        )
        return {"config": PAIR, "scheduler": scheduler, "stop": {"training_iteration": 6}}

    stock, fluid = both(Climber, make, PAUSING)
    assert_same(stock, fluid, TIMES | ORDER)
    assert fluid.configs != [{"x": x} for x in PAIR["x"]["grid_search"]], "no trial copied another"
    policies = [
        {path.name[-9:]: path.read_text() for path in done.trials[0].folder.parent.glob("pbt_policy_*")}
        for done in (stock, fluid)
    ]
    assert policies[0].keys() == policies[1].keys() != set()


@pytest.mark.slow
def test_pb2_in_lock_step(both: Both) -> None:
    pytest.importorskip("sklearn")
    from ray.tune.schedulers.pb2 import PB2

    def make() -> dict[str, Any]:
        scheduler = PB2(**TIMED, **SCORE, perturbation_interval=2, hyperparam_bounds={"x": [0.1, 3.0]}, synch=True)
        return {"config": PAIR, "scheduler": scheduler, "stop": {"training_iteration": 6}}

    assert_same(*both(Climber, make, PAUSING), TIMES | ORDER)


@pytest.mark.slow
def test_replay_of_population_based_training(both: Both, tmp_path: Path) -> None:
    policy = tmp_path / "pbt_policy_00000.txt"
    changes = [("0", "0", 2, 2, {"x": 1.0}, {"x": 5.0}), ("0", "0", 4, 4, {"x": 5.0}, {"x": 7.0})]
    policy.write_text("\n".join(map(json.dumps, changes)), encoding="utf-8")

    def make() -> dict[str, Any]:
        return {"scheduler": PopulationBasedTrainingReplay(str(policy)), "stop": {"training_iteration": 6}}

    stock, fluid = both(Climber, make, PAUSING)
    assert_same(stock, fluid, TIMES | ORDER)
    assert [row["score"] for row in fluid.trials[0].rows] == [1.0, 2.0, 7.0, 12.0, 19.0, 26.0]


# --- Schedulers that decide as results come: one trial at a time, and all that never depends on the order


def asha() -> ASHAScheduler:
    return ASHAScheduler(**TIMED, **SCORE, max_t=4, grace_period=1, reduction_factor=2)


@pytest.mark.slow
def test_asha_trial_by_trial(both: Both) -> None:
    stock, fluid = both(Climber, lambda: {"config": GRID, "scheduler": asha(), "max_concurrent_trials": 1}, REUSING)
    assert_same(stock, fluid)
    assert [len(trial.rows) for trial in fluid.trials] == [4, 4, 1, 4]


def test_asha_with_all_at_once(both: Both) -> None:
    stock, fluid = both(Climber, lambda: {"config": GRID, "scheduler": asha()}, PAUSING)
    assert fluid.configs == stock.configs
    assert fluid.statuses == stock.statuses
    for trials in (stock.trials, fluid.trials):
        assert {len(trial.rows) for trial in trials} <= {1, 2, 4}, "a trial was stopped between two rungs"
        assert len(trials[1].rows) == 4, "the best trial is in the upper half of every rung"
    assert fluid.best == stock.best == 1


@pytest.mark.slow
def test_median_stopping_trial_by_trial(both: Both) -> None:
    def make() -> dict[str, Any]:
        scheduler = MedianStoppingRule(**TIMED, **SCORE, grace_period=2, min_samples_required=1)
        return {"config": GRID, "scheduler": scheduler, "max_concurrent_trials": 1, "stop": LENGTH}

    stock, fluid = both(Climber, make, REUSING)
    assert_same(stock, fluid)
    assert [len(trial.rows) for trial in fluid.trials] == [4, 4, 2, 4]


def test_population_based_training(both: Both) -> None:
    def make() -> dict[str, Any]:
        scheduler = PopulationBasedTraining(
            **TIMED, **SCORE, perturbation_interval=2, hyperparam_mutations={"x": [0.1, 3.0]}
        )
        return {"config": PAIR, "scheduler": scheduler, "stop": {"training_iteration": 6}}

    stock, fluid = both(Climber, make, PAUSING)
    for done in (stock, fluid):
        assert done.statuses == ["TERMINATED"] * 2
        for trial, x in zip(done.trials, PAIR["x"]["grid_search"], strict=True):
            assert trial.rows[0]["score"] == x
            assert trial.iterations[-1] == 6
            assert all(row["steps"] == row["training_iteration"] for row in trial.rows)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_optuna_under_a_limiter(both: Both, at_once: int) -> None:
    optuna = pytest.importorskip("optuna")
    from ray.tune.search.optuna import OptunaSearch

    def make() -> dict[str, Any]:
        # With one trial at a time every suggestion may follow from the results so far.
        sampler = optuna.samplers.TPESampler(seed=3, n_startup_trials=2) if at_once == 1 else None
        searcher = OptunaSearch(**SCORE, sampler=sampler or optuna.samplers.RandomSampler(seed=3))
        return {
            "config": {"x": tune.uniform(0.5, 1.5)},
            "num_samples": 4,
            "search_alg": ConcurrencyLimiter(searcher, max_concurrent=at_once),
            "stop": {"training_iteration": 2},
        }

    assert_same(*both(Climber, make, PAUSING))


# --- What else a sweep may be given


class StopsAll(Stopper):
    """Ends the sweep after a number of results."""

    def __init__(self, results: int) -> None:
        self.left = results

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.left -= 1
        return False

    def stop_all(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize(
    ("stop", "lengths"),
    [
        (lambda: {"score": 3.0}, [6, 2, 3, 2]),
        (lambda: {"training_iteration": 5, "score": 3.0}, [5, 2, 3, 2]),
        (lambda: lambda trial_id, result: result["score"] >= 2.0, [4, 1, 2, 2]),
        (lambda: MaximumIterationStopper(3), [3, 3, 3, 3]),
        (lambda: CombinedStopper(MaximumIterationStopper(4), StopsAll(10**6)), [4, 4, 4, 4]),
    ],
    ids=["metric", "metric or iterations", "function", "iterations", "combined"],
)
def test_stoppers(both: Both, stop: Callable[[], Any], lengths: list[int]) -> None:
    stock, fluid = both(Climber, lambda: {"config": GRID, "stop": stop()}, REUSING)
    assert_same(stock, fluid)
    assert [len(trial.rows) for trial in fluid.trials] == lengths


@pytest.mark.slow
def test_a_stopper_that_ends_the_sweep(both: Both) -> None:
    make = lambda: {"config": {**GRID, "ends_at": 4}, "stop": StopsAll(6), "max_concurrent_trials": 1}  # noqa: E731
    stock, fluid = both(Climber, make, REUSING)
    assert_same(stock, fluid)
    assert [len(trial.rows) for trial in fluid.trials] == [4, 2]


class Recorder(tune.Callback):
    """Records each callback of a trial, with the iteration."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self.sweep: list[str] = []

    def _note(self, what: str, trial: Any) -> None:
        self.told[trial.experiment_tag].append((what, trial.last_result.get("training_iteration", 0)))

    def setup(self, **info: Any) -> None:
        self.sweep.append("setup")

    def on_trial_start(self, trial: Any, **info: Any) -> None:
        self._note("start", trial)

    def on_trial_result(self, trial: Any, result: dict[str, Any], **info: Any) -> None:
        self.told[trial.experiment_tag].append(("result", result["training_iteration"]))

    def on_trial_save(self, trial: Any, **info: Any) -> None:
        self._note("save", trial)

    def on_checkpoint(self, trial: Any, checkpoint: Any, **info: Any) -> None:
        self._note("checkpoint", trial)

    def on_trial_restore(self, trial: Any, **info: Any) -> None:
        self._note("restore", trial)

    def on_trial_recover(self, trial: Any, **info: Any) -> None:
        self._note("recover", trial)

    def on_trial_error(self, trial: Any, **info: Any) -> None:
        self._note("error", trial)

    def on_trial_complete(self, trial: Any, **info: Any) -> None:
        self._note("complete", trial)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self.sweep.append("end")


@pytest.mark.slow
def test_callbacks(both: Both, tmp_path: Path) -> None:
    recorders: list[Recorder] = []

    def make() -> dict[str, Any]:
        recorders.append(Recorder())
        (folder := tmp_path / f"notes-{len(recorders)}").mkdir()
        return {
            "config": {**PAIR, "raises_at": [3], "folder": tune.sample_from(lambda _: str(folder))},
            "stop": LENGTH,
            "callbacks": [recorders[-1]],
            "checkpoint_config": CheckpointConfig(checkpoint_frequency=2),
            "max_failures": 1,
        }

    both(Climber, make)
    stock, fluid = recorders
    assert fluid.told == stock.told
    assert fluid.sweep == stock.sweep == ["setup", "end"]
    assert [what for what, _ in next(iter(fluid.told.values()))].count("result") == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "keeping",
    [
        {"checkpoint_frequency": 2},
        {"checkpoint_at_end": True},
        {"checkpoint_frequency": 1, "num_to_keep": 2},
        {
            "checkpoint_frequency": 1,
            "num_to_keep": 2,
            "checkpoint_at_end": True,
            "checkpoint_score_attribute": "score",
            "checkpoint_score_order": "min",
        },
    ],
    ids=["often", "at the end", "the newest", "the worst"],
)
def test_checkpoints_of_a_class(both: Both, keeping: dict[str, Any]) -> None:
    stock, fluid = both(
        Climber,
        lambda: {
            "config": {"x": tune.grid_search([1.0, 2.0])},
            "stop": {"training_iteration": 5},
            "checkpoint_config": CheckpointConfig(**keeping),
        },
    )
    assert_same(stock, fluid)
    assert [trial.checkpoints for trial in fluid.trials] == [trial.checkpoints for trial in stock.trials]
    assert all(trial.checkpoints for trial in fluid.trials)


@pytest.mark.slow
def test_checkpoints_of_a_function(both: Both) -> None:
    stock, fluid = both(
        climb,
        lambda: {
            "config": {"x": tune.grid_search([1.0, 2.0]), "length": 7, "every": 2},
            "checkpoint_config": CheckpointConfig(num_to_keep=2),
        },
    )
    assert_same(stock, fluid)
    assert [trial.checkpoints for trial in fluid.trials] == [trial.checkpoints for trial in stock.trials]
    assert sorted(fluid.trials[1].checkpoints.values()) == [(4, 8.0), (6, 12.0)]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [True, False], ids=["with checkpoints", "without"])
@TRAINABLES
def test_a_trial_that_raises_twice(both: Both, trainable: Any, checkpoints: bool, tmp_path: Path) -> None:
    folders = iter((tmp_path / "notes-stock", tmp_path / "notes-fluid"))

    def make() -> dict[str, Any]:
        (folder := next(folders)).mkdir()
        config = {"x": tune.grid_search([1.0, 2.0]), "folder": tune.sample_from(lambda _: str(folder)), "length": 6}
        config["raises_at"] = tune.sample_from(lambda config: [3, 4] if config["x"] == 1.0 else [])
        if checkpoints and trainable is climb:
            config["every"] = 2
        every = 2 if checkpoints and trainable is Climber else 0
        return {
            "config": config,
            "stop": {"training_iteration": 6},
            "checkpoint_config": CheckpointConfig(checkpoint_frequency=every),
            "max_failures": 2,
        }

    stock, fluid = both(trainable, make)
    for done in (stock, fluid):
        assert done.statuses == ["TERMINATED"] * 2
        assert [trial.failures for trial in done.trials] == [2, 0]
        error = (done.trials[0].folder / "error.txt").read_text()
        assert "iteration 3 went wrong" in error and "iteration 4 went wrong" in error
        assert not (done.trials[1].folder / "error.txt").exists()
    begins_again = 2 if checkpoints else 0
    assert fluid.trials[0].iterations == [1, 2, *range(begins_again + 1, 4), *range(begins_again + 1, 7)]


def test_a_tuner_and_its_result_grid(executor: Any, tmp_path: Path) -> None:
    grids = []
    for name, chosen in (("stock", None), ("fluid", executor)):
        (notes := tmp_path / f"notes-{name}").mkdir()
        tuner = tune.Tuner(
            Climber,
            param_space={
                **PAIR,
                "folder": str(notes),
                "raises_at": tune.sample_from(lambda config: [2] if config["x"] == 0.5 else []),
            },
            tune_config=tune.TuneConfig(**SCORE),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=str(tmp_path / name),
                stop=LENGTH,
                verbose=0,
                checkpoint_config=CheckpointConfig(checkpoint_at_end=True),
            ),
            executor=chosen,
        )
        grids.append(tuner.fit())
    stock, fluid = grids
    assert len(fluid) == len(stock) == 2
    assert fluid.num_errors == stock.num_errors == 1
    assert [type(error).__name__ for error in fluid.errors] == [type(error).__name__ for error in stock.errors]
    assert isinstance(fluid.errors[0], RuntimeError)
    assert "iteration 2 went wrong" in str(fluid.errors[0])
    assert [result.config["x"] for result in fluid] == [result.config["x"] for result in stock]
    assert fluid.get_best_result().config["x"] == stock.get_best_result().config["x"] == 2.0
    for mine, theirs in zip(fluid, stock, strict=True):
        assert (mine.error is None) == (theirs.error is None)
        assert (mine.checkpoint is None) == (theirs.checkpoint is None)
        for column in ("score", "steps", "training_iteration", "done", "config/x"):
            assert list(mine.metrics_dataframe[column]) == list(theirs.metrics_dataframe[column])
    assert set(fluid.get_dataframe().columns) == set(stock.get_dataframe().columns)


@pytest.mark.slow
def test_a_sweep_that_fails_raises(executor: Any, tmp_path: Path) -> None:
    (notes := tmp_path / "notes").mkdir()
    for name, chosen in (("stock", None), ("fluid", executor)):
        options = {"config": {"x": 1.0, "folder": str(notes), "raises_at": [1]}, "raise_on_failed_trial": True}
        with pytest.raises(tune.TuneError, match="did not complete"):
            sweep(Climber, tmp_path / name, chosen, {**options, "stop": LENGTH})
        notes.joinpath(next(notes.iterdir()).name).unlink()


@pytest.mark.slow
def test_a_time_budget_ends_the_sweep(both: Both) -> None:
    make = lambda: {"config": {**PAIR, "seconds": 0.02}, "time_budget_s": 2}  # noqa: E731
    for done in both(Climber, make):
        assert set(done.statuses) <= {"TERMINATED"}
        assert all(trial.iterations == list(range(1, len(trial.rows) + 1)) for trial in done.trials)


@pytest.mark.slow
def test_exported_models(both: Both, tmp_path: Path) -> None:
    exported: list[Path] = []

    def make() -> dict[str, Any]:
        exported.append(tmp_path / f"exported-{len(exported)}")
        exported[-1].mkdir()
        config = {"x": tune.grid_search([1.0, 2.0]), "folder": tune.sample_from(lambda _: str(exported[-1]))}
        return {"config": config, "stop": LENGTH, "export_formats": ["model"]}

    both(Climber, make, REUSING)
    for folder in exported:
        assert sorted(json.loads(path.read_text()) for path in folder.iterdir()) == [[4, 4.0], [4, 8.0]]
