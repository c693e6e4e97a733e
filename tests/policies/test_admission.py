from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.policies.admission import AlikeTrials, Candidate, DeviceRoom, admit, is_scarce, late_starters

ROOMS = st.lists(st.tuples(st.integers(0, 72), st.integers(0, 5)), min_size=1, max_size=3)
TRIALS = st.lists(st.tuples(st.floats(0.01, 10.0), st.integers(0, 40)), max_size=9)


def rooms_of(sizes: list[tuple[int, int]]) -> list[DeviceRoom]:
    return [DeviceRoom(device, float(free), slots) for device, (free, slots) in enumerate(sizes)]


def candidates_of(trials: list[tuple[float, int]]) -> list[Candidate]:
    return [Candidate(row, gain, float(need)) for row, (gain, need) in enumerate(trials)]


def gain_of(candidates: list[Candidate], chosen: dict[int, int]) -> float:
    return sum(one.gain for one in candidates if one.row in chosen)


def best_on_one(candidates: list[Candidate], room: DeviceRoom) -> float:
    """The greatest gain of any set of trials that fits: all of them are tried."""
    return max(
        sum(one.gain for one in some)
        for count in range(min(room.slots, len(candidates)) + 1)
        for some in combinations(candidates, count)
        if sum(one.need for one in some) <= room.free
    )


@given(TRIALS, ROOMS, st.integers(0, 3))
def test_what_starts_fits_and_nothing_that_would_fit_is_left_out(
    trials: list[tuple[float, int]], sizes: list[tuple[int, int]], ahead: int
) -> None:
    candidates, rooms = candidates_of(trials), rooms_of(sizes)
    chosen = admit(candidates[ahead:], rooms, candidates[:ahead])
    free, slots = {room.device: room.free for room in rooms}, Counter(chosen.values())
    for row, device in chosen.items():
        free[device] -= candidates[row].need
    assert all(left >= 0.0 for left in free.values())
    assert all(slots[room.device] <= room.slots for room in rooms)
    for one in candidates:
        fits = any(one.need <= free[room.device] and slots[room.device] < room.slots for room in rooms)
        assert one.row in chosen or not fits


@pytest.mark.slow
def test_the_choice_is_near_the_best_one_in_three_thousand_small_cases() -> None:
    ratios, queued = [], []
    for seed in range(3_000):
        rng = random.Random(seed)
        room = DeviceRoom(0, rng.choice((36.0, 72.0)), rng.randint(2, 8))
        candidates = [Candidate(row, 1.0 / rng.lognormvariate(3, 1), float(rng.randint(1, 40))) for row in range(7)]
        best = best_on_one(candidates, room)
        ratios.append(gain_of(candidates, admit(candidates, [room])) / best)
        free, slots, gain = room.free, room.slots, 0.0
        for one in sorted(candidates, key=lambda one: one.gain):
            if one.need <= free and slots:
                free, slots, gain = free - one.need, slots - 1, gain + one.gain
        queued.append(gain / best)
    assert statistics.mean(ratios) >= 0.998 and min(ratios) >= 0.75
    assert sum(ratio < 0.95 for ratio in ratios) <= 40
    assert statistics.mean(queued) < 0.85, "the longest first, as in queue order"


def test_what_does_not_fit_is_skipped() -> None:
    candidates = candidates_of([(10.0, 10), (9.0, 100), (1.0, 20)])
    assert admit(candidates, [DeviceRoom(0, 36.0, 4)]) == {0: 0, 2: 0}


def test_one_that_is_worth_more_than_many_small_ones_is_not_left_out() -> None:
    candidates = candidates_of([(1.0, 1), (30.0, 72)])
    assert admit(candidates, [DeviceRoom(0, 72.0, 8)]) == {1: 0}


def test_trials_ahead_start_whatever_they_gain() -> None:
    candidates = candidates_of([(9.0, 20), (0.1, 60), (8.0, 10)])
    assert admit([candidates[0], candidates[2]], [DeviceRoom(0, 72.0, 8)], [candidates[1]]) == {1: 0, 2: 0}


def test_devices_that_a_trial_may_not_have_are_not_chosen() -> None:
    rooms = [DeviceRoom(0, 72.0, 8), DeviceRoom(1, 36.0, 8)]
    only = [Candidate(0, 1.0, 30.0, frozenset({1})), Candidate(1, 5.0, 30.0, frozenset({1})), Candidate(2, 1.0, 60.0)]
    assert admit(only, rooms) == {1: 1, 2: 0}


def test_full_devices_take_nothing() -> None:
    assert admit(candidates_of([(1.0, 1)]), [DeviceRoom(0, 72.0, 0), DeviceRoom(1, -4.0, 3)]) == {}


@pytest.mark.parametrize(("wanted", "scarce"), [(0.0, False), (90.0, False), (90.1, True), (500.0, True)])
def test_memory_is_scarce_from_nine_tenths_on(wanted: float, scarce: bool) -> None:
    assert is_scarce(wanted, 100.0) is scarce


# --- Late starters


def test_large_trials_that_fill_the_time_of_all_start_in_queue_order() -> None:
    """20 x 10 s one by one, as no two of 40 fit into 72; 20 short ones fit beside them."""
    large, small = AlikeTrials(40.0, 200.0, 10.0), AlikeTrials(4.0, 40.0, 2.0)
    late = late_starters([small, large], [72.0], slots=8)
    assert late.need == 40.0
    assert late.has(40.0, 10.0) and not late.has(4.0, 2.0)


def test_one_that_takes_long_starts_in_queue_order_whatever_it_needs() -> None:
    late = late_starters([AlikeTrials(1.0, 100.0, 50.0), AlikeTrials(30.0, 60.0, 5.0)], [72.0], slots=8)
    assert late.has(1.0, 50.0)


def test_with_few_trials_left_all_start_in_queue_order() -> None:
    late = late_starters([AlikeTrials(10.0, 20.0, 10.0), AlikeTrials(20.0, 9.0, 9.0)], [72.0, 72.0], slots=8)
    assert late.has(10.0, 10.0) and late.has(20.0, 9.0)


@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.floats(0.1, 100.0), st.integers(1, 20)), min_size=1, max_size=12))
def test_some_trial_always_starts_in_queue_order(lines: list[tuple[float, float, int]]) -> None:
    waiting = [AlikeTrials(need, longest * count, longest) for need, longest, count in lines]
    late = late_starters(waiting, [72.0, 36.0], slots=6)
    assert any(late.has(one.need, one.longest) for one in waiting)
    assert late.need >= 0.0 and not math.isnan(late.seconds)
