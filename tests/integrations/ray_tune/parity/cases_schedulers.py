"""Cases about schedulers.

Those that decide in rounds decide the same in any order of results. Those that decide as results come run one trial at
a time, or are compared in what does not depend on the order.
"""

from __future__ import annotations

import json
from typing import Any

from parity_case import Side, case
from parity_observation import ORDER
from ray.tune.schedulers import (
    ASHAScheduler,
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    ResourceChangingScheduler,
    TrialScheduler,
)
from tune_sweeps import ReusableClimber

from fluid import tune

SCORE = {"metric": "score", "mode": "max"}
TIMED = {"time_attr": "training_iteration"}
GRID = {"x": tune.grid_search([0.5, 2.0, 1.0, 1.5])}
PAIR = {"x": tune.grid_search([0.5, 2.0])}
REUSING = {"reuse_actors": True, "max_concurrent_trials": 1}
PAUSING = {"reuse_actors": True}
#: Alone, for under Ray alone HyperBand may wait for ever for a trial that is being saved while another reports.
ALONE = {"cpu": 2}


def _lengths(side: Side) -> list[int]:
    return [len(rows) for rows in side.rows()]


@case("FIFOScheduler", "run.scheduler")
def first_in_first_out(side: Side) -> None:
    for name, scheduler in (("object", FIFOScheduler()), ("by name", "fifo")):
        side.run(
            ReusableClimber, name=name, config=PAIR, stop={"training_iteration": 2}, scheduler=scheduler, stock=REUSING
        )


@case("ASHAScheduler", "AsyncHyperBandScheduler", "run.scheduler", telling=True)
def asha_trial_by_trial(side: Side) -> None:
    scheduler = ASHAScheduler(**TIMED, **SCORE, max_t=4, grace_period=1, reduction_factor=2)
    side.run(
        ReusableClimber,
        config=GRID,
        scheduler=scheduler,
        max_concurrent_trials=1,
        stock={"reuse_actors": True},
    )
    assert _lengths(side) == [4, 4, 1, 4]


@case("ASHAScheduler")
def asha_with_all_at_once(side: Side) -> Any:
    scheduler = ASHAScheduler(**TIMED, **SCORE, max_t=4, grace_period=1, reduction_factor=2)
    side.run(ReusableClimber, config=GRID, scheduler=scheduler, stock=PAUSING)
    lengths, trials = _lengths(side), side.trials()
    side.seen.clear()  # Which trial is stopped where depends on the order of results.
    assert set(lengths) <= {1, 2, 4}, "a trial was stopped between two rungs"
    return [lengths[1], [trial["config"] for trial in trials], [trial["status"] for trial in trials]]


@case("AsyncHyperBandScheduler", "run.metric", "run.mode", "run.scheduler")
def asha_by_name_and_with_brackets(side: Side) -> None:
    options = {"config": GRID, "max_concurrent_trials": 1, "stock": {"reuse_actors": True}}
    stop = {"training_iteration": 3}
    side.run(ReusableClimber, name="by name", scheduler="async_hyperband", stop=stop, **SCORE, **options)
    scheduler = AsyncHyperBandScheduler(**TIMED, max_t=4, reduction_factor=2, brackets=2, stop_last_trials=False)
    stop = {"training_iteration": 6}
    side.run(ReusableClimber, name="brackets", scheduler=scheduler, stop=stop, **SCORE, **options)


@case("MedianStoppingRule")
def median_stopping(side: Side) -> None:
    scheduler = MedianStoppingRule(**TIMED, **SCORE, grace_period=2, min_samples_required=1)
    side.run(
        ReusableClimber,
        config=GRID,
        scheduler=scheduler,
        max_concurrent_trials=1,
        stop={"training_iteration": 4},
        stock={"reuse_actors": True},
    )
    assert _lengths(side) == [4, 4, 2, 4]


@case("HyperBandScheduler", without=(ORDER,), telling=True)
def hyperband(side: Side) -> None:
    # A bracket of two trials, which are never compared, and one of three, of which one is promoted.
    config = {"x": tune.grid_search([0.5, 2.0, 1.0, 1.5, 1.2])}
    scheduler = HyperBandScheduler(**TIMED, **SCORE, max_t=3, reduction_factor=3)
    side.run(ReusableClimber, config=config, scheduler=scheduler, resources_per_trial=ALONE, stock=PAUSING)
    assert _lengths(side) == [3, 3, 1, 3, 1]
    _forget_hooks(side)


@case("HyperBandForBOHB", "run.search_alg", without=(ORDER,))
def bohb(side: Side) -> None:
    import pytest

    pytest.importorskip("ConfigSpace")
    pytest.importorskip("hpbandster")
    from ray.tune.search.bohb import TuneBOHB

    side.run(
        ReusableClimber,
        config={"x": tune.uniform(0.5, 1.5)},
        num_samples=5,
        # The model's suggestions depend on the order of results, so it is not asked.
        search_alg=TuneBOHB(**SCORE, seed=5, bohb_config={"random_fraction": 1.0}),
        scheduler=HyperBandForBOHB(**TIMED, **SCORE, max_t=3, reduction_factor=3),
        resources_per_trial=ALONE,
        stock=PAUSING,
    )
    assert set(_lengths(side)) == {1, 3}
    _forget_hooks(side)


@case("PopulationBasedTraining", without=(ORDER,), telling=True)
def population_based_training_in_lock_step(side: Side) -> Any:
    scheduler = PopulationBasedTraining(
        **TIMED,
        **SCORE,
        perturbation_interval=2,
        # Without its own exploration: how often others have used the same generator depends on time.
        custom_explore_fn=lambda config: {"x": config["x"] + 0.25},
        synch=True,
    )
    side.run(ReusableClimber, config=PAIR, scheduler=scheduler, stop={"training_iteration": 6}, stock=PAUSING)
    _forget_hooks(side)
    assert any(trial["config"]["x"] not in (0.5, 2.0) for trial in side.trials()), "no trial copied another"


@case("PopulationBasedTraining", without=(ORDER,))
def population_based_training(side: Side) -> Any:
    scheduler = PopulationBasedTraining(
        **TIMED, **SCORE, perturbation_interval=2, hyperparam_mutations={"x": [0.1, 3.0]}
    )
    side.run(ReusableClimber, config=PAIR, scheduler=scheduler, stop={"training_iteration": 6}, stock=PAUSING)
    trials = side.trials()
    side.seen.clear()  # Which trial copies which depends on the order of results.
    assert all(row["steps"] == row["training_iteration"] for trial in trials for row in trial["results"])
    return [(trial["status"], trial["results"][0]["score"], trial["results"][-1]["steps"]) for trial in trials]


@case("PB2", without=(ORDER,))
def pb2_in_lock_step(side: Side) -> None:
    import pytest

    pytest.importorskip("sklearn")
    from ray.tune.schedulers.pb2 import PB2

    scheduler = PB2(**TIMED, **SCORE, perturbation_interval=2, hyperparam_bounds={"x": [0.1, 3.0]}, synch=True)
    side.run(ReusableClimber, config=PAIR, scheduler=scheduler, stop={"training_iteration": 6}, stock=PAUSING)
    _forget_hooks(side)


@case("PopulationBasedTrainingReplay", without=(ORDER,))
def replay_of_population_based_training(side: Side) -> None:
    policy = side.notes / "pbt_policy_00000.txt"
    changes = [("0", "0", 2, 2, {"x": 1.0}, {"x": 5.0}), ("0", "0", 4, 4, {"x": 5.0}, {"x": 7.0})]
    policy.write_text("\n".join(map(json.dumps, changes)), encoding="utf-8")
    scheduler = PopulationBasedTrainingReplay(str(policy))
    side.run(ReusableClimber, scheduler=scheduler, stop={"training_iteration": 6}, stock=PAUSING)
    assert [row["score"] for row in side.rows()[0]] == [1.0, 2.0, 7.0, 12.0, 19.0, 26.0]


def _more(controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> Any:
    """Gives a trial both CPUs from its second iteration on."""
    if result["training_iteration"] < 2:
        return None
    return tune.PlacementGroupFactory([{"CPU": 2}])


class Told(ReusableClimber):
    """Reports the resources that it is told of."""

    def step(self) -> dict[str, Any]:
        return {**super().step(), "cpus": self.trial_resources.required_resources.get("CPU")}

    def update_resources(self, new_resources: Any) -> None:
        self.told = new_resources


@case("ResourceChangingScheduler", without=(ORDER,))
def changed_resources(side: Side) -> None:
    scheduler = ResourceChangingScheduler(FIFOScheduler(), _more)
    side.run(Told, config={"x": 1.0}, scheduler=scheduler, stop={"training_iteration": 4})
    _forget_hooks(side)
    assert [row["cpus"] for row in side.rows()[0]] == [1.0, 1.0, 2.0, 2.0]


class Own(TrialScheduler):
    """A scheduler of the user's own: pauses each trial after its second result, and stops it after the fourth."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if result["training_iteration"] == 2:
            return self.PAUSE
        return self.STOP if result["training_iteration"] == 4 else self.CONTINUE

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None: ...

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None: ...

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None: ...

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None: ...

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        waiting = [trial for trial in tune_controller.get_trials() if trial.status in ("PENDING", "PAUSED")]
        return waiting[0] if waiting else None

    def debug_string(self) -> str:
        return "own"


@case("TrialScheduler", "run.scheduler", without=(ORDER,))
def a_scheduler_of_the_users_own(side: Side) -> None:
    side.run(ReusableClimber, config=PAIR, scheduler=Own(), stock=PAUSING)
    assert side.iterations() == [[1, 2, 3, 4]] * 2
    _forget_hooks(side)


def _forget_hooks(side: Side) -> None:
    """Leaves out what depends on the order of results where trials are paused: which trial never was."""
    for trial in side.trials():
        for name in ("hooks", "checkpoints", "latest checkpoint"):
            trial.pop(name)
        files = trial["files"]
        for path in [path for path in files if path.startswith(("checkpoint_", "result.json", "progress.csv"))]:
            del files[path]
