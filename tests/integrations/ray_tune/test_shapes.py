"""The shapes of Tune's schedulers, for forecasts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.tune")

from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
)

from fluid import SearchShape, tune
from fluid.integrations.ray_tune.schedulers.shapes import shape_of


def controller(most: float | None = None, trials: int = 3) -> Any:
    stop = {} if most is None else {"training_iteration": most}
    return SimpleNamespace(get_trials=lambda: [SimpleNamespace(stopping_criterion=stop) for _ in range(trials)])


def shape(scheduler: Any, *, most: float | None = None, trials: int | None = 20) -> SearchShape | None:
    return shape_of(controller(most), scheduler, trials=trials, under_way=8)


def test_asha_stops_trials_at_its_rungs() -> None:
    found = shape(AsyncHyperBandScheduler(metric="loss", mode="min", max_t=30, grace_period=2, reduction_factor=3))
    assert found is not None and (found.algorithm, found.rungs, found.eta) == ("stopping", (2, 6, 18, 30), 3)
    assert found.concurrency == 8
    shorter = shape(AsyncHyperBandScheduler(metric="loss", mode="min", max_t=30, grace_period=2), most=10)
    assert shorter is not None and shorter.rungs == (2, 8, 10)
    assert shape(AsyncHyperBandScheduler(metric="loss", mode="min", stop_last_trials=False)) is None
    assert shape(AsyncHyperBandScheduler(metric="loss", mode="min", time_attr="seconds")) is None


@pytest.mark.parametrize("scheduler", [HyperBandScheduler, HyperBandForBOHB])
def test_hyperband_fills_one_bracket_after_the_other(scheduler: Any) -> None:
    found = shape(scheduler(metric="loss", mode="min", max_t=9), trials=12)
    assert found is not None and found.algorithm == "halving" and found.rungs == (1, 3, 9)
    assert found.brackets == ((3,), (5, 2), (4, 3, 1)) and not found.one_by_one
    assert shape(scheduler(metric="loss", mode="min"), trials=None) is None


def test_synchronous_halving_and_bohb_have_their_brackets() -> None:
    found = shape(tune.SuccessiveHalvingScheduler("loss", "min", max_t=9, bracket_size=9), trials=18)
    assert found is not None and found.rungs == (1, 3, 9)
    assert found.brackets == ((9, 3, 1), (9, 3, 1)) and found.one_by_one
    bohb = shape(tune.SyncBOHB("loss", "min", max_t=9), trials=15)
    assert bohb is not None and bohb.rungs == (1, 3, 9) and bohb.brackets == ((9, 3, 1), (3, 1), (3,))


def test_populations_and_sweeps_without_scheduler_run_to_the_end() -> None:
    found = shape(FIFOScheduler(), most=12)
    assert found == SearchShape(algorithm="full", rungs=(12,), concurrency=8)
    assert shape(FIFOScheduler()) is None
    fields: dict[str, Any] = {
        "time_attr": "training_iteration",
        "perturbation_interval": 5,
        "hyperparam_mutations": {"lr": [1, 2]},
    }
    free = PopulationBasedTraining(metric="loss", mode="min", **fields)
    assert shape(free, most=12) == SearchShape(algorithm="full", rungs=(12,), concurrency=8)
    in_step = PopulationBasedTraining(metric="loss", mode="min", synch=True, **fields)
    found = shape(in_step, most=12, trials=4)
    assert found is not None and found.rungs == (5, 10, 12) and found.brackets == ((4, 4, 4),)


@pytest.mark.slow
def test_unknown_schedulers_have_no_shape() -> None:
    class Own(FIFOScheduler):  # type: ignore[misc]
        def on_trial_result(self, *arguments: Any) -> Any:
            return "CONTINUE"

    assert shape(Own(), most=12) is None
    assert shape(MedianStoppingRule(metric="loss", mode="min"), most=12) is None
