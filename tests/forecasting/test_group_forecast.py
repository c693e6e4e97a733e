"""Forecasts of groups in closed form, against draws and against cases that can be worked out by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from fluid.forecasting.group import EarlyEnds, GroupForecast, TrialsLeft, forecast_group

NEVER = EarlyEnds([], [1.0] * 1000)


def left(seconds: list[float], sigma: float | list[float] = 0.0, **columns: Any) -> TrialsLeft:
    k = len(seconds)
    given = {"elapsed": 0.0, "at_least": 0.0, "done": 0.0, "runs": True, "counts": True, "servers": 1, **columns}
    arrays = {name: np.broadcast_to(np.asarray(value), (k,)).copy() for name, value in given.items()}
    return TrialsLeft(seconds=np.array(seconds), sigma=np.broadcast_to(np.asarray(sigma, dtype=float), (k,)), **arrays)


def forecast(trials: TrialsLeft, servers: int, early: EarlyEnds = NEVER, **more: Any) -> GroupForecast:
    return forecast_group(trials, servers, early, **more)


def test_a_trial_that_is_certain_ends_when_it_does() -> None:
    found = forecast(left([100.0]), 1)
    assert found.ends.quantile(0.5) == pytest.approx(100.0, rel=0.01)
    assert found.ends.quantile(0.9) == pytest.approx(100.0, rel=0.03)
    assert found.odds_last.tolist() == [1.0]


def test_the_last_of_several_that_run_is_the_product_of_their_distributions() -> None:
    rng = np.random.default_rng(1)
    medians, sigmas = rng.uniform(20.0, 100.0, 12), rng.uniform(0.1, 0.6, 12)
    draws = np.exp(np.log(medians) + sigmas * rng.standard_normal((40_000, 12)))
    found = forecast(left(medians.tolist(), sigmas.tolist()), 12)
    for q in (0.1, 0.5, 0.9):
        assert found.ends.quantile(q) == pytest.approx(np.quantile(draws.max(axis=1), q), rel=0.02)
    last = np.bincount(draws.argmax(axis=1), minlength=12) / len(draws)
    assert np.abs(found.odds_last - last).max() < 0.02
    assert found.odds_last.sum() == pytest.approx(1.0)


def test_trials_that_wait_start_as_servers_become_free() -> None:
    trials = left([10.0, 20.0, 10.0, 15.0], runs=[True, True, False, False])
    assert forecast(trials, 2).ends.quantile(0.5) == pytest.approx(35.0, rel=0.02)


def test_other_groups_take_servers_and_are_not_waited_for() -> None:
    trials = left([50.0, 20.0, 10.0], runs=[True, True, False], counts=[False, True, True])
    found = forecast(trials, 2)
    assert found.ends.quantile(0.5) == pytest.approx(30.0, rel=0.02)
    assert found.odds_last[0] == 0.0


def test_fewer_trials_than_servers_run_faster() -> None:
    # Two trials share a device and take twice as long for that; the longer one has it alone for its second half.
    found = forecast(left([10.0, 20.0]), 2, seconds_with=lambda trials: 0.5 + 0.25 * (trials - 1.0) * 2.0)
    assert found.ends.quantile(0.5) == pytest.approx(15.0, rel=0.05)


def test_what_a_first_iteration_has_taken_so_far_is_known() -> None:
    slow = left([10.0], 0.5, elapsed=20.0, at_least=20.0)
    rng = np.random.default_rng(2)
    draws = 10.0 * np.exp(0.5 * rng.standard_normal(400_000))
    draws = draws[draws > 20.0] - 20.0
    for q in (0.1, 0.5, 0.9):
        assert forecast(slow, 1).ends.quantile(q) == pytest.approx(np.quantile(draws, q), abs=0.5)


def test_trials_that_end_early_bring_the_end_forward() -> None:
    early = EarlyEnds(ended=np.random.default_rng(3).uniform(0.0, 1.0, 500).tolist(), others=[1.0] * 500)
    found = forecast(left([100.0]), 1, early)
    assert found.ends.odds_by(98.0) == pytest.approx(0.5, abs=0.05)
    assert found.ends.odds_by(50.0) == pytest.approx(0.25, abs=0.06)


def test_early_ends_follow_what_was_seen_and_hardly_assume_any() -> None:
    assert EarlyEnds([], []).odds < 0.05
    assert EarlyEnds([], [1.0] * 20).odds < 0.01
    seen = EarlyEnds(ended=[0.25] * 60, others=[1.0] * 40)
    assert seen.odds == pytest.approx(0.6, abs=0.05)
    parts = seen.parts(np.array([0.0, 0.5]), 4)
    assert parts.sum(axis=0) == pytest.approx([1.0, 1.0])
    assert parts[-1, 1] > 0.8, "most that end early do so before half"


@pytest.mark.parametrize("sigma", [0.1, 1.0])
def test_more_servers_end_no_later(sigma: float) -> None:
    rng = np.random.default_rng(4)
    seconds = sorted(rng.uniform(5.0, 50.0, 60).tolist(), reverse=True)
    ends = [
        forecast(left(seconds, sigma, runs=[row < servers for row in range(60)]), servers).ends.quantile(0.9)
        for servers in (2, 4, 8, 16, 32, 60)
    ]
    assert all(math.isfinite(end) for end in ends)
    assert all(later >= earlier * 0.98 for later, earlier in itertools.pairwise(ends))
