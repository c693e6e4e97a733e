"""Widths in proportion to work: on arrival, beside others, and giving way to others."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from brute_force import packed, single
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import Case, Scene, cases, scenes

from fluid.planners.arrangement import WidthChange
from fluid.planners.instance import Instance
from fluid.planners.portfolio import PLANNERS
from fluid.planners.shares import arrival_widths, make_room, packed_widths, shares, static_widths

quarters = st.lists(st.integers(1, 200), min_size=1, max_size=12)


def exact_shares(heights: list[Fraction], n: int) -> list[Fraction]:
    return [height / sum(heights) * n for height in heights]


# --- On arrival


@given(heights=quarters, n=st.integers(1, 16), data=st.data())
def test_static_widths_are_the_formula_in_exact_arithmetic(heights: list[int], n: int, data: st.DataObject) -> None:
    k = len(heights)
    c = data.draw(st.lists(st.integers(1, 5), min_size=k, max_size=k))
    d = data.draw(st.lists(st.integers(1, n), min_size=k, max_size=k))
    due = exact_shares([Fraction(h) for h in heights], n)
    expected = [float(min(max(math.floor(s), Fraction(1, c[i])), d[i])) for i, s in enumerate(due)]
    # Tenths are no binary fractions, and sevenths less so: the floor must not notice.
    for scale in (1.0, 0.1, 1 / 7, 1e-9, 1e12):
        widths = static_widths(np.array(heights) * scale, np.array(c), np.array(d), n)
        assert widths.tolist() == expected
    wide = [width for width, most in zip(expected, c, strict=True) if width > 1 / most]
    assert sum(wide) <= n


@pytest.mark.parametrize("k", [1, 3, 7, 49, 1000])
def test_as_many_alike_trials_as_devices_get_one_each(k: int) -> None:
    for height in (0.1, 1 / 3, 7.0, 1e-7):
        assert static_widths(np.full(k, height), 4, 8, k).tolist() == [1.0] * k


def test_shares_of_nothing() -> None:
    assert shares(np.zeros(3), 4).tolist() == [0.0] * 3
    assert static_widths(np.zeros(2), 4, 8, 4).tolist() == [0.25, 0.25]


# --- Beside others


@given(case=cases(), others=st.lists(st.integers(0, 400), max_size=6), data=st.data())
def test_widths_beside_others(case: Case, others: list[int], data: st.DataObject) -> None:
    instance = case.instance
    model = instance.model
    idle = data.draw(st.integers(0, instance.n))
    widths = arrival_widths(instance, np.array(others) / 4, idle).tolist()
    everything = [Fraction(h) for h in case.heights] + [Fraction(h, 4) for h in others]
    due = exact_shares(everything, instance.n)
    left = idle
    for row in sorted(range(len(instance)), key=lambda row: -case.heights[row]):
        devices = min(math.floor(due[row]), int(model.d[row]), left)
        assert widths[row] == (devices if devices >= 1 else 1 / model.c[row])
        left -= devices
    assert left >= 0


@given(case=cases(), others=st.lists(st.integers(0, 400), max_size=6), data=st.data())
def test_widths_of_kinds_are_those_of_their_trials(case: Case, others: list[int], data: st.DataObject) -> None:
    kinds = case.instance
    counts = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(kinds), max_size=len(kinds))))
    idle = data.draw(st.integers(0, kinds.n))
    widths = packed_widths(kinds, counts, idle)
    kind_of = np.repeat(np.arange(len(kinds)), counts)
    trials = kinds.take(kind_of.tolist(), [str(position) for position in range(len(kind_of))])
    each = arrival_widths(trials, np.array(others) / 4, idle)
    if widths is not None:
        assert each.tolist() == widths[kind_of].tolist()
    else:
        assert idle > 0, "where no device is idle, none is given"


def test_trials_that_may_get_a_device_have_no_widths_by_kind() -> None:
    kinds = Instance.build([4.0, 1.0], 2, c=3)
    assert packed_widths(kinds, np.array([1, 4]), 1) is None
    assert packed_widths(kinds, np.array([1, 5]), 1).tolist() == [1 / 3, 1 / 3]
    assert packed_widths(kinds, np.array([1, 1]), 0).tolist() == [1 / 3, 1 / 3]


def test_widths_beside_others_by_hand() -> None:
    instance = Instance.build([20.0, 10.0, 1.0], 8, c=4, d=8)
    # 31 of 40 s are theirs: shares 4, 2 and 0.2 of the 8 devices.
    assert arrival_widths(instance, np.array([9.0]), 8).tolist() == [4.0, 2.0, 0.25]
    assert arrival_widths(instance, np.array([9.0]), 5).tolist() == [4.0, 1.0, 0.25]
    assert arrival_widths(instance, np.array([9.0]), 0).tolist() == [0.25, 0.25, 0.25]
    assert arrival_widths(instance, np.array([0.0]), 8).tolist() == [5.0, 2.0, 0.25]
    assert arrival_widths(instance, np.array([]), 8).tolist() == [5.0, 2.0, 0.25]


@pytest.mark.parametrize("name", ["static", "dynamic", "portfolio"])
def test_trials_join_at_those_widths_by_priority(name: str) -> None:
    planner = PLANNERS[name]()
    instance = Instance.build([20.0, 10.0, 1.0], 8, priority=[1.0, 1.0, 2.0])
    joined = planner.join(instance, np.array([9.0]), 8)
    assert joined.widths.tolist() == [4.0, 2.0, 0.25]
    assert joined.order.tolist() == [2, 0, 1]
    assert not joined.replan_at_start
    assert type(joined.replanner) is type(planner.replanner())


def test_fifo_joins_at_width_1_in_order() -> None:
    joined = PLANNERS["fifo"]().join(Instance.build([1.0, 20.0, 10.0], 8), np.array([9.0]), 8)
    assert joined.widths.tolist() == [1.0] * 3
    assert joined.order.tolist() == [0, 1, 2]


# --- Giving way


@given(
    scene=scenes(most=5, widths=(1, 2, 3, 4), speeds=(1.0, 2.0), mixed=True),
    waiting=st.lists(st.integers(1, 200), max_size=4),
)
def test_make_room_is_its_rule(scene: Scene, waiting: list[int]) -> None:
    running = scene.running
    heights = [Fraction(seconds, 4) for seconds in waiting]
    due = exact_shares([Fraction(r) for r in running.remaining.tolist()] + heights, scene.n)
    resizes = dict(make_room(running, np.array(waiting) / 4))
    for i, row in enumerate(running.rows.tolist()):
        width = running.widths[i]
        if width >= 2:
            target = float(max(1, math.floor(due[i])))
        elif width == 1 and due[i] < 1:
            target = 1.0 / float(running.c[i])
        else:
            target = width
        stretch = running.beta[i] ** (width - 1) / width
        ends_in = running.remaining[i] / running.speed[i] * stretch if width >= 1 else 0.0
        if waiting and target < width and ends_in > scene.epsilon:
            assert resizes.pop(row) == target
    assert not resizes


@given(scene=scenes(most=5, widths=(1, 2, 3, 4)), waiting=st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_the_widest_give_way_first(scene: Scene, waiting: list[int]) -> None:
    running = scene.running
    width = dict(zip(running.rows.tolist(), running.widths.tolist(), strict=True))
    before = [width[row] for row, _ in make_room(running, np.array(waiting) / 4)]
    assert before == sorted(before, reverse=True)


def test_make_room_by_hand() -> None:
    # A share of 60 of 120 s on 4 devices is 2.
    assert make_room(Scene((single(60.0, 4),), free=0).running, np.array([60.0])) == [WidthChange(10, 2.0)]
    # With a share of half a device, a wide trial keeps one device; it allows packing only once it is on one.
    assert make_room(Scene((single(1.0, 4),), free=0).running, np.array([60.0])) == [WidthChange(10, 1.0)]
    alone = Scene((single(1.0), single(2.0, c=1), packed(3.0, 4.0)), free=0)
    assert make_room(alone.running, np.array([60.0])) == [WidthChange(10, 0.25)]
    assert make_room(alone.running, np.array([])) == []
    assert make_room(Scene((packed(3.0, 4.0),), free=0).running, np.array([60.0])) == []


def test_trials_about_to_end_do_not_give_way() -> None:
    groups = (single(4.0, 4), single(0.5))
    assert make_room(Scene(groups, free=0, epsilon=0.4).running, np.array([60.0])) == [
        WidthChange(10, 1.0),
        WidthChange(13, 0.25),
    ]
    assert make_room(Scene(groups, free=0, epsilon=0.5).running, np.array([60.0])) == [WidthChange(10, 1.0)]
    assert make_room(Scene(groups, free=0, epsilon=1.0).running, np.array([60.0])) == []
