"""Cases about stop criteria and stoppers."""

from __future__ import annotations

from typing import Any

from parity_case import Side, case
from ray.tune.stopper import (
    CombinedStopper,
    ExperimentPlateauStopper,
    FunctionStopper,
    MaximumIterationStopper,
    NoopStopper,
    Stopper,
    TimeoutStopper,
    TrialPlateauStopper,
)
from tune_sweeps import ReusableClimber

from fluid import tune

GRID = {"x": tune.grid_search([0.5, 2.0, 1.0]), "ends_at": 7}
REUSING = {"reuse_actors": True, "max_concurrent_trials": 1}


class StopsAll(Stopper):
    """Ends the sweep after a number of results."""

    def __init__(self, results: int) -> None:
        self.left = results

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.left -= 1
        return False

    def stop_all(self) -> bool:
        return self.left <= 0


def _lengths(side: Side, stop: Any, expected: list[int], config: Any = None) -> None:
    name = f"sweep-{len(side.seen)}"
    side.run(ReusableClimber, name=name, config=config or GRID, stop=stop, stock=REUSING)
    assert [len(rows) for rows in side.rows()] == expected


@case("run.stop", telling=True)
def criteria(side: Side) -> None:
    _lengths(side, {"training_iteration": 5, "score": 3.0}, [5, 2, 3])
    _lengths(side, lambda trial_id, result: result["score"] >= 2.0, [4, 1, 2])


@case("run.stop")
def criteria_on_other_values(side: Side) -> None:
    _lengths(side, {"score": 3.0}, [6, 2, 3])
    _lengths(side, {"config/x": 1.0, "training_iteration": 2.5}, [3, 1, 1])
    _lengths(side, {"time_total_s": 1e9}, [7, 7, 7])


@case("MaximumIterationStopper", "FunctionStopper", "NoopStopper", "CombinedStopper", "TimeoutStopper")
def plain_stoppers(side: Side) -> None:
    _lengths(side, MaximumIterationStopper(3), [3, 3, 3])
    _lengths(side, FunctionStopper(lambda trial_id, result: result["score"] >= 2.0), [4, 1, 2])
    _lengths(side, CombinedStopper(MaximumIterationStopper(4), StopsAll(10**6), NoopStopper()), [4, 4, 4])


@case("NoopStopper", "TimeoutStopper")
def stoppers_that_do_not_stop(side: Side) -> None:
    _lengths(side, NoopStopper(), [7, 7, 7])
    _lengths(side, TimeoutStopper(1000), [7, 7, 7])


@case("TrialPlateauStopper")
def a_plateau_of_a_trial(side: Side) -> None:
    config = {"x": tune.grid_search([0.0, 2.0]), "ends_at": 6}
    _lengths(side, TrialPlateauStopper("score", std=0.01, num_results=3, grace_period=2), [3, 6], config)
    limited = TrialPlateauStopper("score", num_results=2, grace_period=2, metric_threshold=5.0, mode="min")
    _lengths(side, limited, [2, 6], config)


@case("ExperimentPlateauStopper", "Stopper")
def stoppers_that_end_the_sweep(side: Side) -> None:
    for name, stop in (
        ("plateau", ExperimentPlateauStopper("score", std=0.1, top=2, mode="max", patience=1)),
        ("all", StopsAll(6)),
    ):
        side.run(
            ReusableClimber,
            name=name,
            config={"x": tune.grid_search([0.0, 2.0, 1.0]), "ends_at": 4},
            stop=stop,
            max_concurrent_trials=1,
            stock={"reuse_actors": True},
        )


@case("TimeoutStopper")
def a_timeout(side: Side) -> None:
    side.run(ReusableClimber, config={"x": 1.0, "seconds": 0.02}, stop=TimeoutStopper(1.0))
    (trial,) = side.trials()
    assert len(trial["results"]) < 60, "stopped by time, if it had begun"
    side.seen[-1] = {"status": trial["status"], "raised": side.seen[-1]["raised"]}
