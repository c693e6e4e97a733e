from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.session.forecasting.progress import LiveLength, forecast


def test_trials_that_no_scheduler_stops_run_their_budgets() -> None:
    found = forecast({10: 3}, {LiveLength(4, 10, 10): 2}, 5)
    assert (found.left, found.longest, found.is_supported) == (2 * 6 + 5 * 10, 10, True)


def test_before_any_decision_all_rungs_are_taken_to_need_the_same_work() -> None:
    found = forecast({}, {LiveLength(1, 3, 27): 2}, 1)
    assert found.left == pytest.approx(2 * 2 + 3 + 3 * 3 * math.log(9))
    assert not found.is_supported
    # Successive halving of 27 trials by 3: 27 x 1, 9 x 2 more, 3 x 6 more, 1 x 18 more.
    start = forecast({}, {LiveLength(0, 1, 27): 27}, 0)
    assert 81 < start.left < 1.5 * 81


def test_a_scheduler_that_never_stops_a_trial_is_recognised() -> None:
    running = forecast({}, {LiveLength(50, 51, 100): 2}, 18)
    assert 20 * 80 < 100 + running.left < 20 * 100


def test_ended_trials_tell_how_many_survive_a_rung() -> None:
    # Of nine trials at the first rung six were stopped, and of three at the second two.
    found = forecast({1: 6, 3: 2, 9: 1}, {}, 9)
    assert found.left == pytest.approx(6 + 6 + 9)
    assert found.is_supported


def test_running_trials_count_as_survivors() -> None:
    # The ended ones alone would say that a trial runs one iteration.
    found = forecast({1: 2}, {LiveLength(8, 9, 9): 2}, 4)
    assert found.left == pytest.approx(2 * 1 + 4 * (1 + 0.5 * 8))
    assert forecast({1: 2}, {}, 4).left == 4


def test_a_prediction_beyond_what_was_seen_supports_no_time() -> None:
    assert not forecast({1: 2}, {LiveLength(1, 3, 81): 3}, 9).is_supported
    assert forecast({1: 2, 81: 1}, {LiveLength(1, 3, 81): 3}, 18).is_supported
    assert forecast({1: 6}, {LiveLength(1, 3, 81): 3}, 9).is_supported, "a third of all trials"


def test_nothing_is_left_of_a_search_that_has_ended() -> None:
    found = forecast({5: 1}, {}, 0)
    assert (found.left, found.longest, found.is_supported) == (0, 0, True)
    assert forecast({}, {}, 0).left == 0


def test_a_guess_of_the_length_is_corrected_by_the_first_that_ends() -> None:
    assert forecast({}, {LiveLength(3, 100, 100): 2}, 8).left == 2 * 97 + 800
    assert forecast({10: 1}, {LiveLength(9, 100, 100): 1}, 8).left == pytest.approx(1 + 80)


def test_trials_that_end_before_their_first_iteration() -> None:
    assert forecast({0: 1, 4: 1}, {}, 2).left == 4


@given(
    st.dictionaries(st.integers(0, 30), st.integers(1, 5), max_size=6),
    st.dictionaries(
        st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 5)).map(
            lambda parts: LiveLength(parts[0], parts[0] + parts[1], sum(parts))
        ),
        st.integers(1, 4),
        max_size=6,
    ),
    st.integers(0, 20),
)
def test_the_rest_is_never_more_than_all_could_run(
    ended: dict[int, int], live: dict[LiveLength, int], coming: int
) -> None:
    found = forecast(ended, live, coming)
    cap = max([*ended, *(length.most for length in live)], default=0)
    most = sum((length.most - length.done) * number for length, number in live.items()) + coming * cap
    assert 0.0 <= found.left <= most + 1e-6
    assert math.isfinite(found.longest)


def test_the_expected_length_is_that_of_the_trials() -> None:
    lengths = Counter(int(length) for length in np.random.default_rng(1).geometric(0.2, 2000))
    mean = sum(length * number for length, number in lengths.items()) / 2000
    assert forecast(lengths, {}, 100).left == pytest.approx(100 * mean)
