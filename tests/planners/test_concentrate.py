"""The re-planner that packs most trials and runs the others very wide."""

from __future__ import annotations

import math

import numpy as np
import pytest
from brute_force import Group, outcome, packed, rate, single
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import CLOSE, Case, Scene, cases, scenes

from fluid.measure.runtime_model import RuntimeModel
from fluid.planners.arrangement import WidthChange
from fluid.planners.bounds import envelope
from fluid.planners.instance import Instance
from fluid.planners.shares import make_room
from fluid.planners.water_fill import Concentrate, WaterFill, concentrated_widths, efficient_widths


def replan(scene: Scene) -> list[WidthChange]:
    return Concentrate().replan(scene.running)


def gain(alpha: float, beta: float, c: int, width: int) -> float:
    """Rate gained per device by going from 1/c to the width; from nothing where c = 1."""
    if c == 1:
        return rate(alpha, beta, width, 1) / width
    return (rate(alpha, beta, width, 1) - rate(alpha, beta, 1, c)) / (width - 1 / c)


# --- Efficient widths


@given(case=cases())
def test_efficient_widths_gain_the_most_per_device(case: Case) -> None:
    model = case.instance.model
    for alpha, beta, c, d, width in zip(
        model.alpha, model.beta, model.c, model.d, efficient_widths(model), strict=True
    ):
        gains = {w: gain(float(alpha), float(beta), int(c), w) for w in range(1, int(d) + 1)}
        best = max(gains.values())
        assert width == max(w for w in gains if gains[w] >= best - CLOSE)


@pytest.mark.parametrize(
    ("alpha", "beta", "c", "d", "width"),
    [
        (1.0, 1.0, 4, 8, 8),
        (1.1, 1.05, 4, 8, 4),
        (1.3, 1.2, 2, 4, 2),
        (1.8, 1.2, 2, 4, 1),
        (1.0, 1.1, 1, 4, 1),
        (1.0, 1.0, 1, 5, 5),
    ],
)
def test_efficient_widths_by_hand(alpha: float, beta: float, c: int, d: int, width: int) -> None:
    assert efficient_widths(RuntimeModel.build(1, n=8, alpha=alpha, beta=beta, c=c, d=d)).tolist() == [width]


def test_an_efficient_width_is_the_next_corner_of_the_envelope() -> None:
    # alpha = 1.3, c = 2: the envelope goes from (1/1.3, 1/2) on to the efficient width.
    for alpha, beta in ((1.3, 1.02), (1.3, 1.05), (1.6, 1.1)):
        _, widths = envelope(alpha, beta, 2, 8)
        model = RuntimeModel.build(1, n=8, alpha=alpha, beta=beta, c=2, d=8)
        assert efficient_widths(model).tolist() == [widths[2]]


def test_efficient_widths_of_very_many_kinds_are_close() -> None:
    random = np.random.default_rng(3)
    model = RuntimeModel.build(200, n=8, alpha=random.uniform(1, 1.3, 200), beta=random.uniform(1, 1.2, 200))
    widths = efficient_widths(model)
    assert (widths >= 1).all() and (widths <= model.d).all()
    for alpha, beta, c, d, width in zip(model.alpha, model.beta, model.c, model.d, widths, strict=True):
        gains = [gain(float(alpha), float(beta), int(c), w) for w in range(1, int(d) + 1)]
        assert gain(float(alpha), float(beta), int(c), int(width)) >= 0.9 * max(gains)


# --- Concentrated widths


@given(case=cases(most_trials=16, priorities=True))
def test_concentrated_widths_fit_and_go_to_the_longest(case: Case) -> None:
    instance = case.instance
    model = instance.model
    widths, wide = concentrated_widths(instance), efficient_widths(model)
    longest = np.argsort(-instance.heights, kind="stable").tolist()

    def fits(count: int) -> bool:
        packed_devices = math.ceil((len(longest) - count) / int(model.c.min()))
        return sum(wide[row] for row in longest[:count]) + packed_devices <= instance.n

    count = next((count for count in range(len(longest)) if not fits(count + 1)), len(longest))
    expected = [wide[row] if longest.index(row) < count else 1 / model.c[row] for row in range(len(longest))]
    assert widths.tolist() == expected


def test_concentrated_widths_by_hand() -> None:
    # Four devices for the longest, two for the other seven; four for a second one there are not.
    instance = Instance.build([9, 8, 7, 6, 5, 4, 3, 2], 8, alpha=1.1, beta=1.05, c=4, d=8)
    assert concentrated_widths(instance).tolist() == [4.0, *[0.25] * 7]
    assert concentrated_widths(Instance.build([2, 1], 9, d=4)).tolist() == [4.0, 4.0]


# --- Re-planning


@given(scene=scenes(pack=False, widths=(1, 2, 3)))
def test_where_nobody_shares_it_is_r(scene: Scene) -> None:
    assert replan(scene) == WaterFill().replan(scene.running)


@given(scene=scenes(most=4, mixed=True, most_free=12))
def test_sharers_move_out_to_efficient_widths_while_devices_last(scene: Scene) -> None:
    running = scene.running
    resizes = replan(scene)
    _, taken = scene.after(resizes)
    assert taken <= scene.free
    at = {row: i for i, row in enumerate(running.rows.tolist())}
    shares = running.residents > 1
    if resizes == WaterFill().replan(running):
        return
    model = RuntimeModel(running.alpha, running.beta, running.c, running.d)
    wide = dict(zip(running.rows.tolist(), efficient_widths(model).tolist(), strict=True))
    assert all(shares[at[row]] for row, _ in resizes)
    remaining = [running.remaining[at[row]] for row, _ in resizes]
    assert remaining == sorted(remaining, reverse=True)
    longest_sharer = max(running.remaining[shares])
    assert remaining[0] == longest_sharer, "no trial overtakes a longer one"
    assert all(width == wide[row] for row, width in resizes[:-1])
    assert resizes[-1].width <= wide[resizes[-1].row]
    if resizes[-1].width < wide[resizes[-1].row]:
        assert taken == scene.free, "narrower only for want of devices"


@given(scene=scenes(most=4, mixed=True, most_free=12, eps=(0.5, 5.0, 50.0)))
def test_sharers_move_only_if_it_ends_them_sooner(scene: Scene) -> None:
    resizes = replan(scene)
    if resizes == WaterFill().replan(scene.running):
        return
    for group, orders in scene.orders(resizes):
        gone = 0
        for j in sorted(range(len(orders)), key=lambda j: -group.members[j].remaining):
            told = orders[j]
            if told is not None:
                member, residents = group.members[j], len(group.members) - gone
                now = member.remaining / group.speed / rate(member.alpha, member.beta, 1, residents)
                moved, _ = outcome(Group((member,), 1.0, group.speed), [told], scene.epsilon)
                assert moved < now
                gone += 1


def test_the_longest_moves_out_first() -> None:
    # alpha = 1.1, beta = 1.05, c = 4: the efficient width is 4.
    group = packed(4.0, 10.0, 6.0, alpha=1.1, beta=1.05)
    assert replan(Scene((group,), free=4)) == [WidthChange(13, 4.0)]
    assert replan(Scene((group,), free=6)) == [WidthChange(13, 4.0), WidthChange(16, 2.0)]
    # The last one keeps the device it is left with: 4 + 4 new ones and 3 beside its own.
    assert replan(Scene((group,), free=11)) == [WidthChange(13, 4.0), WidthChange(16, 4.0), WidthChange(10, 4.0)]
    pairs = (packed(10.0, 9.0, alpha=1.1, beta=1.05), packed(8.0, 4.0, alpha=1.1, beta=1.05))
    assert replan(Scene(pairs, free=11)) == [WidthChange(10, 4.0), WidthChange(13, 4.0), WidthChange(16, 4.0)]


def test_what_does_not_pay_is_left_to_r() -> None:
    group = packed(4.0, 10.0, alpha=1.1, beta=1.05)
    assert replan(Scene((group,), free=4, epsilon=50.0)) == []
    # Packing is free, and one device no gain for a sharer; R widens the other trial.
    scene = Scene((packed(4.0, 10.0), single(6.0)), free=1)
    assert replan(scene) == WaterFill().replan(scene.running) == [WidthChange(16, 2.0)]
    assert replan(Scene((group,), free=0)) == []


@given(waiting=st.lists(st.integers(1, 50), max_size=3), width=st.integers(1, 6))
def test_make_room_is_the_common_one(waiting: list[int], width: int) -> None:
    running = Scene((single(60.0, width),), free=0).running
    heights = np.array(waiting, dtype=np.float64)
    assert Concentrate().make_room(running, heights) == make_room(running, heights)
