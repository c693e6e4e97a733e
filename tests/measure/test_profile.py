from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.measure.cohorts.tree import CohortTree
from fluid.measure.measurements import DRIFT_BASELINE, DRIFT_STREAK, HOPELESS, MIN_OBSERVATIONS
from fluid.measure.profile import FORMAT, Profile
from fluid.measure.runtime_model import packing_limit, packing_limit_from_seconds, width_limit
from fluid.resources import MemoryNeed

KEY = "alexnet"


def noisy(seconds: float, count: int, seed: int, sigma: float = 0.03) -> list[float]:
    """Observations with multiplicative noise, a slow first iteration and a straggler of 20 times."""
    values = seconds * np.exp(sigma * np.random.default_rng(seed).standard_normal(count))
    values[0] *= 8.0
    values[count // 2] *= 20.0
    return [float(value) for value in values]


def feed(profile: Profile, values: Iterable[float], key: str = KEY, **where: Any) -> None:
    for value in values:
        profile.observe(key, value, **where)


def profile_of(packed: Iterable[float] = (), wide: Iterable[float] = (), **options: Any) -> Profile:
    """Exact observations of T^1, T^2, ... by co-residents, and of widths 2, 3, ..."""
    profile = Profile(**options)
    for p, seconds in enumerate(packed, 1):
        feed(profile, [seconds] * MIN_OBSERVATIONS, co_residents=p)
    for w, seconds in enumerate(wide, 2):
        feed(profile, [seconds] * MIN_OBSERVATIONS, width=w)
    return profile


def learnt(profile: Profile) -> list[object]:
    """Everything a profile can be asked."""
    keys = profile.keys()
    return [keys, profile.epsilon] + [
        (
            profile.seconds_per_iteration(key),
            profile.alpha(key),
            profile.beta(key),
            profile.memory(key),
            profile.marginal_benefits(key),
            profile.measured_packing(key),
            profile.busy(key),
            [profile.packing_limit(key, c) for c in (1, 2, 4, 8)],
            [profile.width_limit(key, n=n, d_max=16) for n in (1, 4, 16)],
            [profile.needs_measuring(key, co_residents=p) for p in (1, 2, 3)],
            [profile.needs_measuring(key, width=w) for w in (2, 3)],
        )
        for key in keys
    ]


# --- Without data


def test_without_data_nothing_is_guessed() -> None:
    profile = Profile()
    assert profile.keys() == []
    assert profile.epsilon == 0.0
    assert profile.seconds_per_iteration(KEY) is None
    assert profile.memory(KEY) is None
    assert (profile.alpha(KEY), profile.beta(KEY)) == (1.0, 1.0)
    assert profile.marginal_benefits(KEY) == {}
    assert profile.measured_packing(KEY) == 0
    assert profile.packing_limit(KEY, 4) == packing_limit(1.0, c_max=4) == 4
    assert profile.width_limit(KEY, n=5, d_max=8) == 5
    assert profile.needs_measuring(KEY)
    assert profile.keys() == [], "asking about a key must not make it known"


def test_overheads_stay_ideal_until_two_buckets_are_measured() -> None:
    profile = Profile()
    feed(profile, [1.0] * MIN_OBSERVATIONS)
    # Only one short of enough, and slow from warming up: relying on it would switch packing off for good.
    feed(profile, [20.0] * (MIN_OBSERVATIONS - 1), co_residents=2)
    assert profile.alpha(KEY) == 1.0
    assert profile.measured_packing(KEY) == 1
    assert profile.packing_limit(KEY, 4) == 4
    profile.observe(KEY, 20.0, co_residents=2)
    assert profile.alpha(KEY) == pytest.approx(20.0)
    assert profile.packing_limit(KEY, 4) == 1


# --- Recovering what generated the data


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("alpha", "beta", "seconds"), [(1.1, 1.05, 0.02), (1.2, 1.2, 3.0), (1.0, 1.0, 500.0)])
def test_recovers_a_known_model_from_noisy_data(alpha: float, beta: float, seconds: float, seed: int) -> None:
    profile = Profile()
    for p in range(1, 5):
        feed(profile, noisy(seconds * alpha ** (p - 1), 25, 10 * seed + p), co_residents=p)
    for w in range(2, 5):
        feed(profile, noisy(seconds * beta ** (w - 1) / w, 25, 10 * seed + 4 + w), width=w)
    assert profile.seconds_per_iteration(KEY) == pytest.approx(seconds, rel=0.03)
    assert profile.alpha(KEY) == pytest.approx(alpha, rel=0.02)
    assert profile.beta(KEY) == pytest.approx(beta, rel=0.02)
    assert profile.measured_packing(KEY) == 4
    assert profile.packing_limit(KEY, 4) == packing_limit(alpha, c_max=4)


def test_outliers_do_not_move_the_estimates() -> None:
    clean, dirty = Profile(), Profile()
    for p, factor in ((1, 1.0), (2, 1.2)):
        values = [factor * value for value in noisy(1.0, 30, seed=p)]
        feed(dirty, values, co_residents=p)
        feed(clean, (value for value in values if value < 5.0), co_residents=p)
    assert dirty.seconds_per_iteration(KEY) == pytest.approx(clean.seconds_per_iteration(KEY), rel=0.01)
    assert dirty.alpha(KEY) == pytest.approx(clean.alpha(KEY), rel=0.02)


def test_a_slow_first_iteration_is_outvoted_by_the_second() -> None:
    profile = Profile()
    profile.observe(KEY, 20.0)
    assert profile.seconds_per_iteration(KEY) == 20.0
    profile.observe(KEY, 1.0)
    assert profile.seconds_per_iteration(KEY) == 1.0


def test_one_odd_bucket_does_not_decide_alpha() -> None:
    profile = profile_of([1.0, 1.1, 1.1**2, 2.5, 1.1**4, 1.1**5])
    assert profile.alpha(KEY) == pytest.approx(1.1, rel=0.02)


def test_well_observed_buckets_outweigh_the_others() -> None:
    profile = Profile(window=201)
    for p in range(1, 4):
        feed(profile, [1.1**p] * 201, co_residents=p)
    for p in range(4, 6):
        feed(profile, [1.5 * 1.1**p] * MIN_OBSERVATIONS, co_residents=p)
    assert profile.alpha(KEY) == pytest.approx(1.1)


def test_seconds_are_those_of_one_iteration() -> None:
    profile = Profile()
    profile.observe(KEY, 30.0, iterations=10)
    assert profile.seconds_per_iteration(KEY) == pytest.approx(3.0)


def test_the_window_is_bounded() -> None:
    profile = Profile(window=12)
    feed(profile, [1.0] * 100)
    feed(profile, [1.05] * 7)  # Below the noise floor: no drift, the window simply moves on.
    assert profile.seconds_per_iteration(KEY) == 1.05


def test_alone_is_inferred_from_packed_and_wide_iterations() -> None:
    profile = Profile()
    for p in (2, 3, 4):
        feed(profile, [2.0 * 1.1 ** (p - 1)] * MIN_OBSERVATIONS, co_residents=p)
    assert profile.seconds_per_iteration(KEY) == pytest.approx(2.0)
    assert profile.alpha(KEY) == pytest.approx(1.1)
    assert profile.measured_packing(KEY) == 0

    wide = Profile()
    for w in (2, 4):
        feed(wide, [6.0 / w * 1.05 ** (w - 1)] * MIN_OBSERVATIONS, width=w)
    assert wide.seconds_per_iteration(KEY) == pytest.approx(6.0)
    assert wide.beta(KEY) == pytest.approx(1.05)


def test_alone_is_inferred_with_ideal_overheads_where_none_were_learnt() -> None:
    profile = Profile()
    profile.observe(KEY, 2.0, width=4)
    assert profile.seconds_per_iteration(KEY) == pytest.approx(8.0)


def test_a_measured_bucket_is_preferred_to_one_odd_iteration_alone() -> None:
    profile = Profile()
    profile.observe(KEY, 40.0)
    feed(profile, [1.0] * MIN_OBSERVATIONS, width=2)
    assert profile.seconds_per_iteration(KEY) == pytest.approx(2.0)
    feed(profile, [2.2] * (MIN_OBSERVATIONS - 1))
    assert profile.seconds_per_iteration(KEY) == 2.2


def test_keys_are_kept_apart() -> None:
    profile = Profile()
    feed(profile, [1.0] * 5, key="small")
    feed(profile, [9.0] * 5, key="large")
    assert profile.keys() == ["small", "large"]
    assert (profile.seconds_per_iteration("small"), profile.seconds_per_iteration("large")) == (1.0, 9.0)


# --- Limits


def test_packing_follows_what_was_measured_and_not_a_constant_alpha() -> None:
    # The fourth trial comes almost free: with alpha constant c would be 3, and the literal argmax gives 2.
    seconds = [1.0, 1.05, 1.4, 1.42]
    profile = profile_of(seconds)
    benefits = profile.marginal_benefits(KEY)
    assert benefits == pytest.approx({p: 1 - (p - 1) / p * seconds[p - 1] / seconds[p - 2] for p in (2, 3, 4)})
    assert max(benefits, key=benefits.__getitem__) == 2
    assert profile.packing_limit(KEY, 4) == 4
    assert profile.packing_limit(KEY, 3) == 3


def test_packing_stops_at_the_first_trial_that_gains_too_little() -> None:
    # O^4 is above the threshold again, but getting there means passing p = 3.
    profile = profile_of([1.0, 1.0, 1.49, 1.3])
    assert profile.marginal_benefits(KEY)[3] < 0.05 < profile.marginal_benefits(KEY)[4]
    assert profile.packing_limit(KEY, 4) == 2


def test_a_tenfold_overhead_switches_packing_off() -> None:
    profile = profile_of([1.0, 10.0])
    assert profile.packing_limit(KEY, 8) == 1


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.2, 1.3, 1.6, 2.0])
@pytest.mark.parametrize("measured", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0.05, 0.3])
def test_packing_beyond_the_measured_is_extrapolated(alpha: float, measured: int, threshold: float) -> None:
    profile = profile_of([alpha**p for p in range(measured)], threshold=threshold)
    expected = alpha if measured > 1 else 1.0
    assert profile.packing_limit(KEY, 8) == packing_limit(expected, c_max=8, threshold=threshold)


@pytest.mark.parametrize(("busy", "c"), [(1.0, 1), (0.96, 1), (0.9, 2), (0.5, 2), (0.3, 4), (0.0, 8)])
def test_a_busy_device_is_not_packed_any_further(busy: float, c: int) -> None:
    profile = Profile()
    feed(profile, [1.0] * MIN_OBSERVATIONS, busy=busy)
    assert profile.busy(KEY) == busy
    assert profile.packing_limit(KEY, 8) == c
    # The limit is where p trials that need a share u of the device each gain no more than the threshold.
    best = [max(1.0, p * busy) for p in range(1, 9)]
    assert c == packing_limit_from_seconds(best)
    assert Profile.from_json(profile.to_json()).packing_limit(KEY, 8) == c


def test_what_was_measured_of_packing_counts_more_than_how_busy_the_device_was() -> None:
    profile = profile_of([1.0, 1.2])
    feed(profile, [1.0] * MIN_OBSERVATIONS, busy=1.0)
    assert profile.packing_limit(KEY, 8) == 2


def test_only_a_trial_alone_on_one_device_tells_how_busy_it_keeps_it() -> None:
    profile = Profile()
    profile.observe(KEY, 1.0, busy=0.9, co_residents=2)
    profile.observe(KEY, 1.0, busy=0.9, width=2)
    assert profile.busy(KEY) is None
    with pytest.raises(InvalidFieldError, match=r"busy=1\.5: must be at most 1"):
        profile.observe(KEY, 1.0, busy=1.5)
    assert profile.busy(KEY) is None


def test_one_look_is_enough_where_there_is_no_hope() -> None:
    def limit(seconds: float, looks: int, alone: int = MIN_OBSERVATIONS) -> int:
        profile = Profile()
        feed(profile, [1.0] * alone)
        feed(profile, [seconds] * looks, width=2)
        return profile.width_limit(KEY, n=2, d_max=2)

    assert limit(HOPELESS * 1.01, 1) == 1
    assert limit(HOPELESS * 0.99, 1) == 2, "it takes more to tell"
    assert limit(9.0, 1, MIN_OBSERVATIONS - 1) == 2, "nothing to compare it with"


def test_packing_honours_the_threshold() -> None:
    seconds = [1.0, 1.3, 1.3**2]
    assert profile_of(seconds, threshold=0.05).packing_limit(KEY, 3) == 3
    assert profile_of(seconds, threshold=0.2).packing_limit(KEY, 3) == 2
    assert profile_of(seconds, threshold=0.4).packing_limit(KEY, 3) == 1


def test_measured_packing_counts_up_to_the_first_gap() -> None:
    profile = profile_of([1.0, 1.1])
    feed(profile, [1.4] * MIN_OBSERVATIONS, co_residents=4)
    assert profile.measured_packing(KEY) == 2
    assert list(profile.marginal_benefits(KEY)) == [2]
    feed(profile, [1.2] * MIN_OBSERVATIONS, co_residents=3)
    assert profile.measured_packing(KEY) == 4
    assert list(profile.marginal_benefits(KEY)) == [2, 3, 4]


@pytest.mark.parametrize(("beta", "n"), [(1.05, 16), (1.1, 16), (1.15, 8), (1.2, 8), (1.3, 8)])
def test_width_limit_follows_beta(beta: float, n: int) -> None:
    profile = profile_of([1.0], wide=[beta / 2, beta**2 / 3])
    assert profile.width_limit(KEY, n=n, d_max=16) == width_limit(beta, n=n, d_max=16)
    assert profile.width_limit(KEY, n=2, d_max=16) == 2
    assert profile.width_limit(KEY, n=n, d_max=1) == 1


# --- Clamping


@pytest.fixture(autouse=True)
def note_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fluid.measure.profile")


def notes_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fluid.measure.profile"]


def test_an_alpha_above_its_interval_is_clamped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    profile = profile_of([1.0, 1.85, 2.6])  # c = 3 by O^p, while the fit gives 1.61 > 3/2.
    assert profile.packing_limit(KEY, 3) == 3
    for _ in range(3):
        assert 1.499 < profile.alpha(KEY) < 1.5
        profile.observe(KEY, 1.0)
    (message,) = notes_of(caplog)
    assert KEY in message
    assert "alpha=1.61" in message
    assert "[1, 1.5)" in message


def test_overheads_below_one_are_clamped_and_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    profile = profile_of([1.0, 0.9], wide=[0.4])
    for _ in range(2):
        assert (profile.alpha(KEY), profile.beta(KEY)) == (1.0, 1.0)
        profile.observe(KEY, 1.0)
    alpha, beta = notes_of(caplog)
    assert "alpha=0.9" in alpha
    assert "beta=0.8" in beta


def test_a_beta_above_its_interval_is_clamped(caplog: pytest.LogCaptureFixture) -> None:
    profile = profile_of([1.0], wide=[0.95, 0.9])  # d = 3 as measured, while the fit gives 1.64 > 3/2.
    assert 1.499 < profile.beta(KEY) < 1.5
    assert profile.width_limit(KEY, n=8, d_max=8) == 3
    assert "beta=1.64" in notes_of(caplog)[0]


def test_overheads_that_rule_out_sharing_are_kept_as_measured(caplog: pytest.LogCaptureFixture) -> None:
    # c = d = 1: the intervals have no upper end, and a planner needs to see how bad it is.
    profile = profile_of([1.0, 3.0], wide=[2.0])
    assert profile.alpha(KEY) == pytest.approx(3.0)
    assert profile.beta(KEY) == pytest.approx(4.0)
    assert profile.width_limit(KEY, n=8, d_max=8) == 1
    assert notes_of(caplog) == []


@given(
    packed=st.lists(st.floats(1e-3, 1e3), max_size=5),
    wide=st.lists(st.floats(1e-3, 1e3), max_size=4),
)
def test_overheads_lie_in_their_intervals(packed: list[float], wide: list[float]) -> None:
    profile = profile_of(packed, wide)
    alpha, beta = profile.alpha(KEY), profile.beta(KEY)
    c = profile.packing_limit(KEY, 8)
    d = profile.width_limit(KEY, n=8, d_max=8)
    assert 1.0 <= alpha < (c / (c - 1) if c > 1 else math.inf)
    assert 1.0 <= beta < (d / (d - 1) if d > 1 else math.inf)


# --- Drift


def test_a_drifting_bucket_is_measured_again() -> None:
    profile = Profile()
    feed(profile, noisy(1.0, 31, seed=1))
    feed(profile, [1.5] * (DRIFT_STREAK - 1))
    assert profile.seconds_per_iteration(KEY) == pytest.approx(1.0, rel=0.02)
    assert not profile.needs_measuring(KEY)
    profile.observe(KEY, 1.5)
    assert profile.needs_measuring(KEY)
    assert profile.seconds_per_iteration(KEY) == 1.5, "the restarted bucket stays usable meanwhile"
    assert profile.measured_packing(KEY) == 1
    feed(profile, [1.5] * (MIN_OBSERVATIONS - DRIFT_STREAK))
    assert not profile.needs_measuring(KEY)


def test_a_bucket_can_drift_down_and_again() -> None:
    profile = Profile()
    for seconds in (1.0, 0.5, 2.0):
        feed(profile, [seconds] * (DRIFT_BASELINE + DRIFT_STREAK))
        assert profile.seconds_per_iteration(KEY) == seconds


def test_drift_is_seen_in_spite_of_stragglers() -> None:
    profile = Profile()
    values = noisy(1.0, 31, seed=2)
    values[20] = 30.0
    feed(profile, values)
    feed(profile, [1.5] * DRIFT_STREAK)
    assert profile.seconds_per_iteration(KEY) == 1.5


def test_what_was_measured_packed_follows_a_drift_alone() -> None:
    profile = profile_of([1.0, 1.2])
    feed(profile, [1.0] * DRIFT_BASELINE)
    feed(profile, [0.9] * DRIFT_STREAK)  # Within the floor.
    assert not profile.needs_measuring(KEY)
    feed(profile, [0.8] * DRIFT_STREAK)
    assert profile.needs_measuring(KEY)
    assert not profile.needs_measuring(KEY, co_residents=2)
    assert profile.alpha(KEY) == pytest.approx(1.2)


def test_a_width_measured_of_slow_trials_pays_for_the_fast_ones_that_follow() -> None:
    profile = Profile()
    feed(profile, [4.0] * DRIFT_BASELINE)
    feed(profile, [2.0] * MIN_OBSERVATIONS, width=2)
    feed(profile, [1.0] * DRIFT_STREAK)  # Their iterations alone are four times as fast, and a wide one would be.
    assert profile.beta(KEY) == pytest.approx(1.0)
    assert profile.width_limit(KEY, n=2, d_max=2) == 2


def test_a_drift_of_a_packed_bucket_leaves_the_others_alone() -> None:
    profile = profile_of([1.0, 1.2])
    feed(profile, [1.2] * DRIFT_BASELINE, co_residents=2)
    feed(profile, [1.6] * DRIFT_STREAK, co_residents=2)
    assert profile.seconds_per_iteration(KEY) == 1.0
    assert profile.alpha(KEY) == pytest.approx(1.6)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1.5, 1.5, 1.5, 1.0] * 2, id="interrupted"),
        pytest.param([1.5, 1.5, 0.5, 0.5] * 2, id="both sides"),
        pytest.param([1.09] * 4, id="timer noise"),
        pytest.param([20.0] * 3, id="too few"),
    ],
)
def test_what_is_no_drift(values: list[float]) -> None:
    profile = Profile()
    feed(profile, [1.0] * 31)
    for value in values:
        profile.observe(KEY, value)
        assert not profile.needs_measuring(KEY)
    assert profile.seconds_per_iteration(KEY) == 1.0


def test_noise_within_mean_plus_std_is_no_drift() -> None:
    profile = Profile()
    feed(profile, [0.7, 1.3, 1.0] * 10)
    for _ in range(10):
        profile.observe(KEY, 1.3)
        assert not profile.needs_measuring(KEY)


def test_the_drifting_observations_do_not_hide_the_drift() -> None:
    profile = Profile()
    # Deviations from 0.9 are 0 and 0.2, so mean + std is 0.2; with the newcomers the median would be 1.1.
    feed(profile, [0.9, 1.1] * (DRIFT_BASELINE // 2))
    feed(profile, [1.15] * DRIFT_STREAK)
    assert profile.needs_measuring(KEY)


def test_a_streak_counts_one_side_only() -> None:
    profile = Profile()
    feed(profile, [1.0] * 31)
    feed(profile, [1.5] * 2 + [0.5] * (DRIFT_STREAK - 1))
    assert not profile.needs_measuring(KEY)
    profile.observe(KEY, 0.5)
    assert profile.needs_measuring(KEY)
    assert profile.seconds_per_iteration(KEY) == 0.5


def test_a_young_bucket_has_nothing_to_drift_from() -> None:
    profile = Profile()
    feed(profile, [1.0] * (DRIFT_BASELINE - 1))
    feed(profile, [3.0] * DRIFT_STREAK)
    assert not profile.needs_measuring(KEY)


# --- Memory and resizes


def test_memory_is_the_maximum_of_each_part() -> None:
    profile = Profile()
    profile.observe(KEY, 1.0, memory=MemoryNeed(100.0, 10.0))
    profile.observe(KEY, 1.0)
    profile.observe(KEY, 1.0, co_residents=2, memory=MemoryNeed(50.0, 70.0))
    assert profile.memory(KEY) == MemoryNeed(100.0, 70.0)
    feed(profile, [1.0] * 100)
    assert profile.memory(KEY) == MemoryNeed(100.0, 70.0), "a maximum does not age"


def test_epsilon_is_robust() -> None:
    profile = Profile()
    for seconds in (4.0, 0.2, 0.21, 0.0, 0.19):
        profile.observe_resize(seconds)
    assert profile.epsilon == 0.2


def test_free_resizes_are_allowed() -> None:
    profile = Profile()
    for _ in range(20):
        profile.observe_resize(0.0)
    assert profile.epsilon == 0.0


# --- What is refused


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"seconds": math.nan}, "seconds", math.nan),
        ({"seconds": math.inf}, "seconds", math.inf),
        ({"seconds": 0.0}, "seconds", 0.0),
        ({"seconds": -1.5}, "seconds", -1.5),
        ({"seconds": 5e-324, "iterations": 3}, "seconds", 5e-324),
        ({"seconds": "1"}, "seconds", "1"),
        ({"key": ""}, "key", ""),
        ({"key": 7}, "key", 7),
        ({"co_residents": 0}, "co_residents", 0),
        ({"co_residents": 1.5}, "co_residents", 1.5),
        ({"width": 0.5}, "width", 0.5),
        ({"co_residents": 2, "width": 3}, "width", 3),
        ({"iterations": 0}, "iterations", 0),
        ({"memory": 100}, "memory", 100),
    ],
)
def test_observe_refuses_and_learns_nothing(arguments: dict[str, Any], field: str, value: object) -> None:
    profile = Profile()
    with pytest.raises(InvalidFieldError) as caught:
        profile.observe(**{"key": KEY, "seconds": 1.0, "memory": MemoryNeed(1.0), **arguments})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}={value!r}: ")
    assert profile.to_json() == Profile().to_json()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Profile(window=11), "window=11: must be at least 12"),
        (lambda: Profile(threshold=-0.1), "threshold=-0.1: must be at least 0"),
        (lambda: Profile(threshold=1.0), "threshold=1.0: must be below 1"),
        (lambda: Profile().observe_resize(-0.1), "seconds=-0.1: must be at least 0"),
        (lambda: Profile().observe_resize(math.nan), "seconds=nan: must be a number, not NaN"),
        (
            lambda: Profile().needs_measuring(KEY, co_residents=2, width=2),
            "width=2: cannot be wide and packed",
        ),
        (lambda: Profile().packing_limit(KEY, 0), "c_max=0: must be at least 1"),
    ],
)
def test_errors_name_field_and_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        call()
    assert str(caught.value).startswith(message)


# --- Save and load

buckets = st.one_of(
    st.fixed_dictionaries({"co_residents": st.integers(1, 4)}),
    st.fixed_dictionaries({"width": st.integers(1, 4)}),
)
# Few distinct values, so that streaks, restarts and ties happen.
seconds = st.one_of(st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.0, 20.0]), st.floats(1e-4, 1e4))
needs = st.one_of(st.none(), st.builds(MemoryNeed, st.floats(0, 1e12), st.floats(0, 1e12)))
#: (key, seconds, how often in a row, where, memory)
reports = st.lists(st.tuples(st.sampled_from(["a", "b"]), seconds, st.integers(1, 13), buckets, needs), max_size=15)


def report(profile: Profile, observations: list[tuple[str, float, int, dict[str, int], MemoryNeed | None]]) -> None:
    for key, value, times, where, memory in observations:
        for _ in range(times):
            profile.observe(key, value, memory=memory, **where)
        profile.observe_resize(value)


@given(before=reports, after=reports, window=st.integers(12, 40), threshold=st.floats(0.0, 0.5))
def test_a_round_trip_learns_on_alike(before: Any, after: Any, window: int, threshold: float) -> None:
    profile = Profile(window=window, threshold=threshold)
    report(profile, before)
    copy = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert copy.to_json() == profile.to_json()
    assert learnt(copy) == learnt(profile)
    report(profile, after)
    report(copy, after)
    assert copy.to_json() == profile.to_json()
    assert learnt(copy) == learnt(profile)


def test_what_was_asked_of_a_profile_is_not_saved() -> None:
    profile = Profile()
    for _ in range(5):
        profile.observe("net", seconds=2.0)
    before = profile.to_json()
    assert profile.seconds_per_iteration("net") == 2.0
    assert profile.to_json() == before == Profile.from_json(before).to_json()


def test_what_to_json_returns_is_a_copy() -> None:
    profile = profile_of([1.0, 1.1])
    before = learnt(profile)
    data: Any = profile.to_json()
    data["keys"][KEY][0]["buckets"][0]["seconds"].append(100.0)
    data["keys"].clear()
    assert learnt(profile) == before


def test_save_and_load(tmp_path: Path) -> None:
    profile = profile_of([1.0, 1.1], wide=[0.55])
    profile.observe("größe", 2.0, memory=MemoryNeed(1.0, 2.0))
    path = tmp_path / "profile.json"
    path.write_text("what was there before")
    profile.save(path)
    assert learnt(Profile.load(str(path))) == learnt(profile)
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "profile.json"
    profile_of([1.0]).save(path)
    old = path.read_text()

    def disk_full(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(step, disk_full)
    with pytest.raises(OSError, match="disk full"):
        profile_of([2.0]).save(path)
    assert path.read_text() == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_another_program_has_written_anew_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile_of([1.0, 1.1]).save(path)
    content = json.loads(path.read_bytes())
    assert "crc" in content
    assert Profile.from_json(content).to_json() == Profile.load(path).to_json()
    path.write_text(json.dumps(content))
    assert Profile.load(path).to_json() == profile_of([1.0, 1.1]).to_json()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"not json"])
def test_loading_a_broken_file_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(InvalidFieldError, match=r"path='.*broken\.json'"):
        Profile.load(path)


def test_loading_a_wrong_file_names_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**Profile().to_json(), "window": 3}))
    with pytest.raises(InvalidFieldError, match=r"window=3: .*other\.json") as caught:
        Profile.load(path)
    assert caught.value.field == "window"


def test_loading_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Profile.load(tmp_path / "nowhere.json")


BUCKET = f"keys['{KEY}'][0].buckets[0]"


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (["format"], FORMAT + 1, "format"),
        (["format"], None, "format"),
        (["window"], "31", "window"),
        (["threshold"], math.nan, "threshold"),
        (["resizes"], [], "resizes"),
        (["resizes", "seconds"], [-1.0], "resizes.seconds[0]"),
        (["keys"], [], "keys"),
        (["keys", ""], [], "keys"),
        (["keys", KEY], 3, f"keys['{KEY}']"),
        (["keys", KEY, 0, "memory"], 3, f"keys['{KEY}'][0].memory"),
        (["keys", KEY, 0, "memory"], {"persistent_bytes": 1.0}, f"keys['{KEY}'][0].memory.ephemeral_bytes"),
        (["keys", KEY, 0, "memory", "persistent_bytes"], -1.0, f"keys['{KEY}'][0].memory.persistent_bytes"),
        (["keys", KEY, 0, "busy"], 0.5, f"keys['{KEY}'][0].busy"),
        (["keys", KEY, 0, "busy"], [1.5], f"keys['{KEY}'][0].busy[0]"),
        (["keys", KEY, 0, "busy"], [0.5] * 32, f"keys['{KEY}'][0].busy"),
        (["keys", KEY, 0, "buckets"], {}, f"keys['{KEY}'][0].buckets"),
        (["keys", KEY, 0, "buckets", 0], None, BUCKET),
        (["keys", KEY, 0, "buckets", 0, "co_residents"], 0, f"{BUCKET}.co_residents"),
        (["keys", KEY, 0, "buckets", 1, "width"], 2, f"keys['{KEY}'][0].buckets[1].width"),
        (["keys", KEY, 0, "buckets", 1, "co_residents"], 1, f"keys['{KEY}'][0].buckets[1]"),
        (["keys", KEY, 0, "buckets", 0, "seconds"], [], f"{BUCKET}.seconds"),
        (["keys", KEY, 0, "buckets", 0, "seconds"], [0.0], f"{BUCKET}.seconds"),
        (["keys", KEY, 0, "buckets", 0, "seconds"], [math.nan], f"{BUCKET}.seconds[0]"),
        (["keys", KEY, 0, "buckets", 0, "seconds"], [1.0] * 32, f"{BUCKET}.seconds"),
        (["keys", KEY, 0, "buckets", 0, "seconds"], "1.0", f"{BUCKET}.seconds"),
        (["keys", KEY, 0, "buckets", 0, "streak"], DRIFT_STREAK, f"{BUCKET}.streak"),
        (["keys", KEY, 0, "buckets", 0, "streak"], -DRIFT_STREAK, f"{BUCKET}.streak"),
        (["keys", KEY, 0, "buckets", 0, "restarts"], 0.5, f"{BUCKET}.restarts"),
    ],
)
def test_malformed_content_is_refused(place: list[Any], value: object, field: str) -> None:
    profile = profile_of([1.0, 1.1])
    profile.observe(KEY, 1.0, memory=MemoryNeed(1.0, 2.0))
    data: Any = profile.to_json()
    spot = data
    for step in place[:-1]:
        spot = spot[step]
    spot[place[-1]] = value
    with pytest.raises(InvalidFieldError) as caught:
        Profile.from_json(data)
    assert caught.value.field == field


def test_what_a_newer_fluid_adds_is_passed_over() -> None:
    profile = profile_of([1.0, 1.1])
    profile.cohorts[KEY] = CohortTree()
    plain, data = json.dumps(profile.to_json()), profile.to_json()

    def add_everywhere(part: Any) -> None:
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            add_everywhere(inner)
        if isinstance(part, dict) and not {KEY, "new"} & part.keys():
            part["new"] = [{"at": 1}]

    add_everywhere(data)
    data["restores"] = {}
    assert data["keys"][KEY][0]["new"] and data["keys"][KEY][0]["buckets"][0]["new"] and data["cohorts"][KEY]["new"]
    assert json.dumps(Profile.from_json(data).to_json()) == plain


@pytest.mark.parametrize("name", ["format", "window", "threshold", "resizes", "keys"])
def test_missing_content_is_refused(name: str) -> None:
    data = Profile().to_json()
    del data[name]
    with pytest.raises(InvalidFieldError, match=f"{name}=None: is missing"):
        Profile.from_json(data)


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"profile=\[\]: must be a JSON object"):
        Profile.from_json([])


def test_memory_can_be_learnt_without_seconds() -> None:
    profile = Profile()
    profile.observe_memory("net", MemoryNeed(3.0, 1.0))
    profile.observe_memory("net", MemoryNeed(2.0, 2.0))
    assert profile.memory("net") == MemoryNeed(3.0, 2.0)
    assert profile.seconds_per_iteration("net") is None
    assert Profile.from_json(profile.to_json()).memory("net") == MemoryNeed(3.0, 2.0)
    with pytest.raises(InvalidFieldError, match="memory"):
        profile.observe_memory("net", 3.0)  # type: ignore[arg-type]
