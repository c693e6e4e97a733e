"""Forecasts of groups that run: what handles say of trials that sleep, and what they refuse."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import FluidExecutor, Forecast, Search, SearchShape, Trial, TrialGroup
from fluid.errors import InvalidFieldError

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


def sleep(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    while True:
        time.sleep(config["seconds"])
        yield {"loss": 1.0}


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    with FluidExecutor("local", devices=2, max_packing=1, verbose=0, run_dir=tmp_path / "run") as executor:
        yield executor


@pytest.mark.slow
def test_the_forecast_of_a_group_that_sleeps_and_the_trial_that_ends_last(executor: FluidExecutor) -> None:
    trials = [Trial(sleep, {"seconds": 0.05}, budget=10 + 110 * (name == "c"), trial_id=name) for name in "abc"]
    handle = executor.submit_trialgroup(TrialGroup(trials))
    forecast, begun = None, time.monotonic()
    while forecast is None and time.monotonic() < begun + PATIENCE:
        time.sleep(0.01)
        forecast = handle.forecast()
    at, likely = time.monotonic(), handle.stragglers(most=2)
    assert forecast is not None, "after the first iteration there is a forecast"
    assert list(forecast.seconds) == [0.1, 0.5, 0.9]
    values = list(forecast.seconds.values())
    assert values == sorted(values) and all(math.isfinite(value) for value in values)
    assert len(likely) == 2 and likely[0][0] == "c" and likely[0][1] > 0.5 > likely[1][1]
    assert handle.wait(PATIENCE)
    assert 0.2 * (time.monotonic() - at) < forecast.seconds[0.9] < PATIENCE
    assert handle.forecast(q=[0.25]) == Forecast(seconds={0.25: 0.0})
    assert handle.stragglers() == []


@pytest.mark.slow
def test_trials_that_a_search_is_still_to_submit_may_end_last(executor: FluidExecutor) -> None:
    trials = [Trial(sleep, {"seconds": 0.02}, budget=1000, trial_id=name) for name in "ab"]
    handle = executor.submit_trialgroup(TrialGroup(trials, search=Search("loss", "min", trials=12, extends=False)))
    next(iter(handle.results()))
    odds = dict(handle.stragglers())
    assert set(odds) == {"a", "b"}
    assert sum(odds.values()) < 0.5, "ten others start later"
    for name in "ab":
        handle.stop(name)


@pytest.mark.slow
def test_trials_that_fail_before_their_first_iteration_say_nothing_of_the_rungs(executor: FluidExecutor) -> None:
    shape = SearchShape(algorithm="asha", rungs=(1, 3, 9))
    search = Search("loss", "min", trials=12, extends=False, shape=shape)
    known = executor.submit_trialgroup(TrialGroup([Trial(sleep, {"seconds": 0.01}, budget=9)]))
    assert known.wait(PATIENCE)
    failing = [Trial(sleep, {}, budget=9, trial_id=name, retry_errors=False) for name in "bc"]
    group = TrialGroup([*failing, Trial(sleep, {"seconds": 60.0}, budget=9, trial_id="a")], search=search)
    handle = executor.submit_trialgroup(group)
    begun = time.monotonic()
    while len(handle.failures) < 2 and time.monotonic() < begun + PATIENCE:
        time.sleep(0.01)
    assert handle.forecast() is not None
    handle.stop("a", now=True)


def test_nothing_is_said_before_anything_was_measured(executor: FluidExecutor) -> None:
    handle = executor.submit_trialgroup(TrialGroup([Trial(sleep, {"seconds": 60.0}, trial_id="a")]))
    assert handle.forecast() is None
    assert handle.stragglers() == []
    handle.stop("a", now=True)


@pytest.mark.parametrize("q", [0.9, "0.9", [], [0.0], [0.5, 1.0], [math.nan], None, [True, "a"]])
def test_odds_that_are_none_are_refused(executor: FluidExecutor, q: Any) -> None:
    handle = executor.submit_trialgroup(TrialGroup([Trial(sleep, {"seconds": 0.0}, trial_id="a")]))
    with pytest.raises(InvalidFieldError, match="q"):
        handle.forecast(q)


@pytest.mark.parametrize("most", [0, -1, 1.5, "all"])
def test_a_number_of_stragglers_that_is_none_is_refused(executor: FluidExecutor, most: Any) -> None:
    handle = executor.submit_trialgroup(TrialGroup([Trial(sleep, {"seconds": 0.0}, trial_id="a")]))
    with pytest.raises(InvalidFieldError, match="most"):
        handle.stragglers(most)
