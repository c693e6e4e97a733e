"""The paper's re-planner, rule by rule (docs/theory.md, section 4)."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from brute_force import packed, single
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import Case, Scene, cases, scenes, started

from fluid.dynamic_fluid import DynamicFluid, ReallocateByShare
from fluid.planners.arrangement import WidthChange
from fluid.planners.instance import Instance
from fluid.planners.shares import make_room
from fluid.static_fluid import StaticFluid


def replan(scene: Scene) -> list[WidthChange]:
    return ReallocateByShare().replan(scene.running)


def height(remaining: Fraction, alpha: Fraction, beta: Fraction, width: Fraction, residents: int = 1) -> Fraction:
    if width < 1:
        return remaining * alpha ** (residents - 1)
    return remaining / width * beta ** (int(width) - 1)


def by_the_listing(scene: Scene) -> list[WidthChange]:
    """Algorithm 3.2 in exact arithmetic, for trials alone on their devices with c = 1 and for trials that share."""
    trials = [(group, member) for group in scene.groups for member in group.members]
    work = [Fraction(member.remaining) for _, member in trials]
    epsilon, free = Fraction(scene.epsilon), scene.free
    downs, ups = [], []
    longest = sorted(range(len(trials)), key=lambda i: (-work[i], i))
    exact = [tuple(Fraction(round(100 * overhead), 100) for overhead in (m.alpha, m.beta)) for _, m in trials]
    share = [
        min(max(Fraction(math.floor(own / sum(work) * scene.n)), Fraction(1, member.c)), Fraction(member.d))
        for own, (_, member) in zip(work, trials, strict=True)
    ]

    def now(i: int) -> Fraction:
        group = trials[i][0]
        return height(work[i], *exact[i], Fraction(group.width), len(group.members))

    for i in longest:
        width, target = Fraction(trials[i][0].width), share[i]
        if 1 <= target < width and target * (height(work[i], *exact[i], target) + epsilon) < width * now(i):
            downs.append(WidthChange(10 + 3 * i, float(target)))
            free += int(width - target)
    for i in longest:
        group = trials[i][0]
        own = group.devices if len(group.members) == 1 else 0
        target = min(share[i], Fraction(own + free))
        if 1 <= target > group.width and height(work[i], *exact[i], target) + epsilon < now(i):
            ups.append(WidthChange(10 + 3 * i, float(target)))
            free -= int(target) - own
    return downs + ups


def without_packing(scene: Scene) -> Scene:
    """The same where trials alone on their devices may not be packed."""
    groups = tuple(
        group if group.width < 1 else replace(group, members=(replace(group.members[0], c=1),))
        for group in scene.groups
    )
    return replace(scene, groups=groups)


@given(scene=scenes(most=6, widths=(1, 2, 3, 4), mixed=True).map(without_packing))
def test_resizes_are_those_of_the_listing(scene: Scene) -> None:
    assert replan(scene) == by_the_listing(scene)


@pytest.mark.slow
@given(scene=scenes(most=6, widths=(1, 2, 3), mixed=True, speeds=(1.0, 2.0)))
def test_what_always_holds(scene: Scene) -> None:
    running = scene.running
    at = {row: i for i, row in enumerate(running.rows.tolist())}
    resizes = replan(scene)
    assert len({row for row, _ in resizes}) == len(resizes)
    ups = [new > running.widths[at[row]] for row, new in resizes]
    assert ups == sorted(ups), "scale-downs come first"
    for wider in (False, True):
        remaining = [running.remaining[at[row]] for (row, _), up in zip(resizes, ups, strict=True) if up == wider]
        assert remaining == sorted(remaining, reverse=True)
    for row, new in resizes:
        i = at[row]
        assert new >= 1 or running.widths[i] >= 1, "no trial is moved from one shared device to another"
        assert 1 / running.c[i] <= new <= running.d[i]


# --- Scaling up


def test_targets_are_shares_of_all_devices() -> None:
    # 20 and 10 s of work on 6 devices: 4 and 2.
    assert replan(Scene((single(20.0), single(10.0)), free=4)) == [WidthChange(10, 4.0), WidthChange(13, 2.0)]


def test_scale_ups_are_capped_by_the_idle_devices_longest_first() -> None:
    # Shares 4, 3 and 1 of 8 devices; d caps none, and of the 5 idle ones the longest takes 3.
    scene = Scene((single(20.0), single(15.0), single(5.0)), free=5)
    assert replan(scene) == [WidthChange(10, 4.0), WidthChange(13, 3.0)]
    # The third holds 3 devices that cost it nothing to keep, so only one is left for the second.
    scene = Scene((single(20.0), single(15.0), single(5.0, 3, c=1)), free=3)
    assert replan(scene) == [WidthChange(10, 4.0)]
    assert replan(replace(scene, free=4)) == [WidthChange(10, 4.0), WidthChange(13, 2.0)]


def test_a_capped_scale_up_is_tested_again_at_the_width_it_gets() -> None:
    # Shares 7 and 2 of the 9 devices. Alone, going to 7 would save 10 - 10/7 s; there are devices for 2 only.
    groups = (single(10.0), single(4.0, 7, c=1, beta=1.0))
    assert replan(Scene(groups, free=1, epsilon=4.9)) == [WidthChange(10, 2.0)]
    assert replan(Scene(groups, free=1, epsilon=5.0)) == []
    assert replan(Scene((single(10.0), single(4.0)), free=7, epsilon=5.0)) == [WidthChange(10, 6.0)]


def test_d_caps_the_target() -> None:
    assert replan(Scene((single(20.0, d=2), single(10.0, d=1)), free=4)) == [WidthChange(10, 2.0)]


def test_a_scale_up_must_end_the_trial_sooner() -> None:
    assert replan(Scene((single(10.0),), free=1, epsilon=4.9)) == [WidthChange(10, 2.0)]
    assert replan(Scene((single(10.0),), free=1, epsilon=5.0)) == []


def test_a_sharer_counts_with_the_company_it_has() -> None:
    # Beside another, 10 s take up to 12.5 s; by itself on a device of its own 10 s, plus epsilon.
    assert replan(Scene((packed(10.0, 10.0, alpha=1.25),), free=1, epsilon=2.4)) == [WidthChange(10, 1.0)]
    assert replan(Scene((packed(10.0, 10.0, alpha=1.25),), free=1, epsilon=2.5)) == []
    # Without company it already runs at full speed.
    assert replan(Scene((packed(10.0, alpha=1.25), packed(10.0)), free=0)) == []


def test_a_sharer_leaves_for_a_whole_target_and_one_alone_builds_on_its_device() -> None:
    # Share 3 of 3 devices. Two are idle: beside another that is all it can get, by itself it keeps its own too.
    assert replan(Scene((packed(90.0, 1.0, alpha=1.1),), free=2)) == [WidthChange(10, 2.0)]
    assert replan(Scene((packed(90.0, alpha=1.1),), free=2)) == [WidthChange(10, 3.0)]


# --- Scaling down


def test_a_scale_down_must_take_fewer_device_seconds() -> None:
    # 4 devices at beta = 1.1 take 12 * 1.1^3 = 15.97 device-seconds, 2 take 13.2 and twice epsilon.
    groups = (single(12.0, 4, beta=1.1), single(24.0, 2, beta=1.1, d=2))
    assert replan(Scene(groups, free=0, epsilon=1.38)) == [WidthChange(10, 2.0)]
    assert replan(Scene(groups, free=0, epsilon=1.39)) == []


@pytest.mark.parametrize("width", [3, 5, 6, 7])
@given(remaining=st.integers(1, 200), other=st.integers(1, 400))
def test_where_widening_is_free_nothing_is_narrowed_to_a_whole_width(width: int, remaining: int, other: int) -> None:
    # beta = 1: w h(w) is h(1) at any width, so the strict comparison fails, whatever the rounding.
    scene = Scene((single(remaining / 4, width, c=1), single(other / 4, d=1, c=1)), free=0)
    assert replan(scene) == []


def test_freed_devices_are_handed_out_at_once() -> None:
    scene = Scene((single(6.0, 4, beta=1.1, c=1), single(60.0, 1, beta=1.1, d=4)), free=0)
    assert replan(scene) == [WidthChange(10, 1.0), WidthChange(13, 4.0)]


def test_a_scale_down_below_one_device_takes_an_open_slot() -> None:
    # The share of the first is a quarter of a device; a slot beside the second frees its own one for the third.
    short, long = single(1.0), single(30.0)
    assert replan(Scene((short, packed(2.0), long), free=0)) == [WidthChange(10, 0.25), WidthChange(16, 2.0)]
    # No slot: no trial is packed, or all slots are taken.
    assert replan(Scene((short, single(2.0, c=1), long), free=0)) == []
    assert replan(Scene((short, packed(0.5, 0.5, 0.5, 0.5), long), free=0)) == []
    # Three on the device are company enough for one that tolerates two.
    assert replan(Scene((single(1.0, c=2), packed(0.5, 0.5, 0.5), long), free=0)) == []
    # c = 1: never packed.
    assert replan(Scene((single(1.0, c=1), packed(2.0), long), free=0)) == []


def test_each_slot_is_taken_once() -> None:
    scene = Scene((single(1.0), single(1.5), packed(0.5, 0.5, 0.5), single(60.0)), free=0)
    assert replan(scene) == [WidthChange(13, 0.25), WidthChange(25, 2.0)]


def test_slots_are_counted_as_they_will_be_filled() -> None:
    # Placement fills the most idle device first. That one takes the first trial, and then holds three: too many for
    # the second, which tolerates three with itself.
    groups = (packed(0.5, 0.5, 0.5), packed(0.5, 0.5), single(2.0, c=4), single(1.0, c=3), single(60.0))
    assert replan(Scene(groups, free=0)) == [WidthChange(25, 0.25), WidthChange(31, 2.0)]
    # One that tolerates two joins another; from then on there is no room beside them for a third.
    groups = (packed(0.5), single(2.0, c=2), single(1.0, c=4), single(60.0))
    assert replan(Scene(groups, free=0)) == [WidthChange(13, 0.5), WidthChange(19, 2.0)]


def test_who_gets_company_no_longer_has_its_device_to_itself() -> None:
    # The packed trial is due two devices, and could widen to them from its own but for the one that joins it.
    instance = Instance.build([0.25, 0.75, 0.25, 0.25], 4, c=[2, 2, 1, 1], d=[1, 2, 1, 1])
    rollout = started(instance, replace(StaticFluid().arrange(instance), widths=np.array([1.0, 0.5, 1.0, 1.0])))
    for row, width in ReallocateByShare().replan(rollout.snapshot()):
        assert rollout.resize(row, width)
    assert replan(Scene((single(0.25, c=2, d=1), packed(0.75, c=2, d=2), single(0.25, c=1), single(0.25, c=1)), 0)) == [
        WidthChange(10, 0.5)
    ]


def test_a_scale_down_below_one_device_without_a_slot_must_release_one() -> None:
    # From three devices it keeps one, where others may join it, and two are free for the long trial.
    assert replan(Scene((single(1.0, 3), single(60.0)), free=0)) == [WidthChange(10, 0.25), WidthChange(13, 3.0)]
    assert replan(Scene((single(1.0, 1), single(60.0)), free=0)) == []


def test_epsilon_counts_in_a_scale_down_below_one_device() -> None:
    # w'(h' + eps) < w h: (1 + eps) / 4 < 1.
    groups = (single(1.0), packed(2.0), single(30.0))
    assert replan(Scene(groups, free=0, epsilon=2.9))[0] == WidthChange(10, 0.25)
    assert WidthChange(10, 0.25) not in replan(Scene(groups, free=0, epsilon=3.1))


def test_sharers_are_not_moved_to_other_slots() -> None:
    # A share below a half, at c = 2: no trial of width 1/2 goes to 1/4.
    assert replan(Scene((packed(1.0, c=2), packed(1.0, c=4), single(60.0, 2, d=2)), free=0)) == []


def test_speed_divides_heights() -> None:
    # 10 s at speed 2 are 5 s, and half of that on two devices.
    assert replan(Scene((single(10.0, speed=2.0),), free=1, epsilon=2.4)) == [WidthChange(10, 2.0)]
    assert replan(Scene((single(10.0, speed=2.0),), free=1, epsilon=2.5)) == []


# --- The planner


@given(case=cases(priorities=True))
def test_dynamic_starts_as_static_does(case: Case) -> None:
    instance = case.instance
    dynamic, static = DynamicFluid().arrange(instance), StaticFluid().arrange(instance)
    assert dynamic.widths.tolist() == static.widths.tolist()
    assert dynamic.order.tolist() == static.order.tolist()
    assert not dynamic.replan_at_start
    assert isinstance(dynamic.replanner, ReallocateByShare)
    assert isinstance(DynamicFluid().replanner(), ReallocateByShare)


def test_make_room_is_the_common_one() -> None:
    scene = Scene((single(60.0, 4),), free=0)
    waiting = np.array([60.0, 60.0])
    assert ReallocateByShare().make_room(scene.running, waiting) == make_room(scene.running, waiting) != []
