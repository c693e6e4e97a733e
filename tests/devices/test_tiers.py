from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.devices.idle import fastest_part, waits_for_tier

POSITIVE = st.floats(0.01, 100.0)


def stretch(width: int, beta: float = 1.05) -> float:
    return beta ** (width - 1) / width


def test_a_trial_waits_for_devices_twice_as_fast_for_less_than_half_its_time() -> None:
    assert waits_for_tier(seconds_now=10.0, delay=4.9, seconds_there=5.0)
    assert not waits_for_tier(seconds_now=10.0, delay=5.0, seconds_there=5.0)


@pytest.mark.parametrize(
    ("speeds", "part"),
    [
        ([1.0, 1.0, 1.0], [0, 1, 2]),
        ([2.0, 2.0, 1.0, 1.0], [0, 1]),
        ([1.0, 1.0, 1.0, 2.0], [0, 1, 2, 3]),
        ([1.0, 4.0, 3.9, 1.0], [1, 2]),
    ],
)
def test_the_slowest_devices_are_left_out_where_the_others_alone_are_faster(
    speeds: list[float], part: list[int]
) -> None:
    assert fastest_part(speeds, stretch) == part


def test_of_parts_that_are_equally_fast_the_smaller_one_is_taken() -> None:
    assert fastest_part([1.0, 2.0, 1.0, 2.0], lambda width: 1.0 / width) == [1, 3]


@given(st.lists(st.sampled_from([0.5, 1.0, 1.7, 2.0, 4.0]), min_size=1, max_size=6), st.floats(1.0, 1.3))
def test_no_other_part_is_faster(speeds: list[float], beta: float) -> None:
    def seconds(part: tuple[int, ...] | list[int]) -> float:
        return stretch(len(part), beta) / min(speeds[position] for position in part)

    found = fastest_part(speeds, lambda width: stretch(width, beta))
    every = itertools.chain.from_iterable(
        itertools.combinations(range(len(speeds)), size) for size in range(1, len(speeds) + 1)
    )
    if stretch(len(speeds), beta) <= stretch(max(1, len(speeds) - 1), beta):  # Each device helps, as planners see to.
        assert seconds(found) <= min(map(seconds, every)) * (1 + 1e-9)
