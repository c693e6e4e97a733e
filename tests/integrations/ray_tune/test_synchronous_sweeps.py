"""Whole synchronous sweeps: the same with Fluid and without, stage by stage, failing and restored."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from fluid import FluidExecutor, TrialGroupHandle, tune

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Both, Climber, assert_same, await_uploads, climb, sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SCORE = {"metric": "score", "mode": "max"}


class Order(tune.Callback):
    """Records the results in the order in which they come: trial and iteration."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        self.heard.append((trial.trial_id, result["training_iteration"]))


@pytest.mark.long
def test_successive_halving_is_the_same_with_fluid_and_without(both: Both) -> None:
    def make() -> dict[str, Any]:
        scheduler = tune.SuccessiveHalvingScheduler(**SCORE, max_t=4, reduction_factor=2)
        return {"config": {"x": tune.grid_search([0.5, 2.0, 1.0, 1.5])}, "scheduler": scheduler}

    stock, fluid = both(Climber, make)
    assert_same(stock, fluid)
    assert [len(trial.rows) for trial in fluid.trials] == [1, 4, 1, 2]
    assert [trial.checkpoints for trial in fluid.trials] == [trial.checkpoints for trial in stock.trials]


def test_bohb_suggests_the_same_with_fluid_and_without(both: Both) -> None:
    pytest.importorskip("ConfigSpace")
    pytest.importorskip("hpbandster")
    from ray.tune.search.bohb import TuneBOHB

    searchers = []

    def make() -> dict[str, Any]:
        # All configurations after the first bracket are the model's.
        searchers.append(TuneBOHB(**SCORE, seed=5, bohb_config={"random_fraction": 0.0}))
        return {
            "config": {"x": tune.uniform(0.5, 1.5)},
            "num_samples": 6,
            "search_alg": searchers[-1],
            "scheduler": tune.SyncBOHB(**SCORE, max_t=4, reduction_factor=2),
        }

    stock, fluid = both(Climber, make)
    assert_same(stock, fluid)
    assert sorted(len(trial.rows) for trial in fluid.trials[:4]) == [1, 1, 2, 4]
    assert sorted(len(trial.rows) for trial in fluid.trials[4:]) == [2, 4]
    for searcher in searchers:
        # Every result at a rung, and no other.
        assert {budget: len(losses) for budget, losses in searcher.bohber.losses.items()} == {1.0: 4, 2.0: 4, 4.0: 2}
    assert searchers[0].bohber.losses == searchers[1].bohber.losses


@pytest.mark.parametrize("trainable", [Climber, climb], ids=["class", "function"])
def test_each_bracket_is_planned_at_once_and_each_stage_waits_for_all(
    trainable: Any, executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    submit, add = executor.submit_trialgroup, TrialGroupHandle.add
    monkeypatch.setattr(
        executor, "submit_trialgroup", lambda group, **options: sizes.append(len(group)) or submit(group, **options)
    )
    monkeypatch.setattr(
        TrialGroupHandle, "add", lambda handle, *trials: sizes.append(len(trials)) or add(handle, *trials)
    )
    config = {"x": tune.grid_search([1.0, 3.0, 2.0, 5.0, 4.0, 6.0, 9.0, 8.0, 7.0, *range(10, 13)])}
    options = {
        "config": {**config, "length": 9, "every": 1},
        "scheduler": tune.SuccessiveHalvingScheduler(**SCORE, max_t=9, bracket_size=9),
        "callbacks": [order := Order()],
    }
    done = sweep(trainable, tmp_path, executor, options)
    assert [len(trial.rows) for trial in done.trials] == [1, 1, 1, 1, 1, 1, 9, 3, 3, 1, 1, 9]
    assert sizes == [9, 3]
    number = {trial.trial_id: n for n, trial in enumerate(sorted(done.analysis.trials, key=lambda t: t.trial_id))}
    heard = [(number[trial_id], iteration) for trial_id, iteration in order.heard]
    at = {what: when for when, what in enumerate(heard)}
    assert max(at[trial, 1] for trial in range(9)) < min(at[trial, 2] for trial in (6, 7, 8))
    assert max(at[trial, 3] for trial in (6, 7, 8)) < at[6, 4]
    assert at[6, 9] < min(at[trial, 1] for trial in (9, 10, 11))


def test_a_trial_that_raises_for_good_and_one_that_ends(executor: Any, tmp_path: Path) -> None:
    (notes := tmp_path / "notes").mkdir()
    config = {
        "x": tune.grid_search([1.0, 2.0, 3.0, 4.0]),
        "folder": str(notes),
        "raises_at": tune.sample_from(lambda config: [1] if config["x"] == 4.0 else []),
        "ends_at": tune.sample_from(lambda config: 1 if config["x"] == 3.0 else None),
    }
    scheduler = tune.SuccessiveHalvingScheduler(**SCORE, max_t=4, reduction_factor=2)
    done = sweep(Climber, tmp_path / "sweep", executor, {"config": config, "scheduler": scheduler})
    assert done.statuses == ["TERMINATED"] * 3 + ["ERROR"]
    assert [len(trial.rows) for trial in done.trials] == [2, 4, 1, 0]


def test_a_trial_that_raises_once_keeps_its_place(executor: Any, tmp_path: Path) -> None:
    (notes := tmp_path / "notes").mkdir()
    config = {
        "x": tune.grid_search([1.0, 2.0, 3.0, 4.0]),
        "folder": str(notes),
        "raises_at": tune.sample_from(lambda config: [2] if config["x"] == 4.0 else []),
    }
    scheduler = tune.SuccessiveHalvingScheduler(**SCORE, max_t=4, reduction_factor=2)
    options = {"config": config, "scheduler": scheduler, "max_failures": 1}
    done = sweep(Climber, tmp_path / "sweep", executor, options)
    assert done.statuses == ["TERMINATED"] * 4
    assert [trial.iterations[-1] for trial in done.trials] == [1, 1, 2, 4]
    assert done.trials[3].iterations == [1, 2, 3, 4], "it continued from the rung"


class Breaks(tune.Callback):
    """Ends the sweep with an error when a trial reports an iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        if result["training_iteration"] == self.iteration:
            raise KeyError("broken off")


def break_off(tuner: Any) -> None:
    """Runs a sweep that ends with an error, and leaves Tune's state of it."""
    with pytest.raises(tune.TuneError, match="broken off"):
        tuner.fit()
    await_uploads()


@pytest.mark.parametrize("broken_at", [2, 4], ids=["between rungs", "after the second"])
def test_a_sweep_that_is_restored_goes_on_with_its_stage(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_at: int
) -> None:
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0")  # Tune writes its state after every step.
    tuner = tune.Tuner(
        Climber,
        param_space={"x": tune.grid_search([1.0, 3.0, 2.0, 5.0, 4.0, 6.0, 9.0, 8.0, 7.0])},
        tune_config=tune.TuneConfig(scheduler=tune.SuccessiveHalvingScheduler(**SCORE, max_t=9)),
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path), verbose=0, callbacks=[Breaks(broken_at)]),
        executor=executor,
    )
    break_off(tuner)
    again = FluidExecutor(backend="local", devices=2, run_dir=tmp_path / "again", verbose=0)
    restored = tune.Tuner.restore(str(tmp_path / "sweep"), Climber, executor=again)
    restored._local_tuner._run_config.callbacks = []
    grid = restored.fit()
    lengths: dict[float, int] = defaultdict(int)
    for result in grid:
        lengths[result.config["x"]] = result.metrics["training_iteration"]
    assert lengths == {1.0: 1, 2.0: 1, 3.0: 1, 4.0: 1, 5.0: 1, 6.0: 1, 7.0: 3, 8.0: 3, 9.0: 9}


def test_bohb_that_is_restored_knows_what_it_has_suggested(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ConfigSpace")
    pytest.importorskip("hpbandster")
    from ray.tune.search.bohb import TuneBOHB

    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0")
    tuner = tune.Tuner(
        Climber,
        param_space={"x": tune.uniform(0.5, 1.5)},
        tune_config=tune.TuneConfig(
            search_alg=TuneBOHB(**SCORE, seed=1), scheduler=tune.SyncBOHB(**SCORE, max_t=9), num_samples=15
        ),
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path), verbose=0, callbacks=[Breaks(2)]),
        executor=executor,
    )
    break_off(tuner)
    again = FluidExecutor(backend="local", devices=2, run_dir=tmp_path / "again", verbose=0)
    restored = tune.Tuner.restore(str(tmp_path / "sweep"), Climber, executor=again)
    restored._local_tuner._run_config.callbacks = []
    grid = restored.fit()
    assert not grid.errors
    lengths = sorted(result.metrics["training_iteration"] for result in grid)
    assert lengths == [1] * 6 + [3] * 2 + [3] * 2 + [9] * 5
