"""What holds for every planner on every instance."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_helpers import (
    CLOSE,
    UNEQUAL,
    Case,
    cases,
    fixed_width_lower_bound,
    makespan,
    plan,
    planner_names,
    started,
)

from fluid.dynamic_fluid import ReallocateByShare
from fluid.errors import InvalidFieldError
from fluid.planners.arrangement import Arrangement
from fluid.planners.bounds import malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.planners.portfolio import PLANNERS, Portfolio, candidates, make_planner
from fluid.planners.rollout import Rollout
from fluid.planners.water_fill import Concentrate, WaterFill
from fluid.resources import Cluster, Device, MemoryNeed
from fluid.static_fluid import StaticFluid

anything = cases(speeds=UNEQUAL, priorities=True)

# --- Makespans against bounds and against each other


@given(case=anything, name=planner_names)
def test_no_planner_beats_the_lower_bound(case: Case, name: str) -> None:
    assert malleable_lower_bound(case.instance) <= makespan(name, case.instance) * (1 + CLOSE)


@given(case=cases(most_trials=24, most_devices=6, alike=True), name=planner_names)
def test_no_planner_beats_the_lower_bound_with_many_alike_trials(case: Case, name: str) -> None:
    assert malleable_lower_bound(case.instance) <= makespan(name, case.instance) * (1 + CLOSE)


@example(  # Unlike trials, of which some are resized, on devices of four speeds.
    case=Case(
        heights=(3.0, 9.25, 1.25, 0.25, 8.5, 7.0, 5.5, 4.0, 2.75, 10.25),
        speeds=(0.5, 1.0, 1.0, 2.0, 2.0, 4.0),
        alpha=(1.0,) * 10,
        beta=(1.0,) * 10,
        c=(4, 1, 2, 3, 1, 2, 3, 1, 3, 1),
        d=(3, 1, 1, 1, 1, 2, 1, 1, 1, 1),
        priority=(0.0,) * 10,
        epsilon=0.1,
    )
)
@given(case=anything)
def test_the_portfolio_is_no_worse_than_any_other_planner(case: Case) -> None:
    instance = case.instance
    best = makespan("portfolio", instance)
    for name in ("static", "dynamic", "fifo"):
        assert best <= makespan(name, instance) * (1 + 2 * CLOSE), name


@given(case=cases(ideal=True, most_trials=20))
def test_static_is_below_twice_the_mean_load_when_ideal(case: Case) -> None:
    assert makespan("static", case.instance) < 2 * sum(case.heights) / len(case.speeds)


@given(case=anything)
def test_static_widths_beyond_the_packed_ones_start_together(case: Case) -> None:
    instance = case.instance
    arrangement = StaticFluid().arrange(instance)
    wide = arrangement.widths > 1.0 / instance.model.c
    assert arrangement.widths[wide].sum() <= instance.n
    if len(set(case.priority)) == 1:  # others may otherwise come first
        assert set(np.flatnonzero(wide).tolist()) <= set(started(instance, arrangement).running)


@given(case=cases())
def test_the_fixed_width_bound_is_at_least_the_malleable_one(case: Case) -> None:
    # A trial's area is least on the envelope, on which its narrowest width may lie; a slower rate costs no more there.
    instance = case.instance
    assert fixed_width_lower_bound(instance) >= malleable_lower_bound(instance) * (1 - 2 * CLOSE)


@given(case=cases())
def test_the_fixed_width_bound_bounds_fifo(case: Case) -> None:
    assert fixed_width_lower_bound(case.instance) <= makespan("fifo", case.instance) * (1 + CLOSE)


@given(case=cases())
def test_the_fixed_width_bound_bounds_static_where_packing_is_free(case: Case) -> None:
    # With alpha > 1 it does not: T* takes a packed trial to share its device for good (acceptance case 5).
    instance = replace(case, alpha=(1.0,) * len(case.heights)).instance
    assert fixed_width_lower_bound(instance) <= makespan("static", instance) * (1 + CLOSE)


# --- Invariance


@given(case=cases(speeds=UNEQUAL, distinct=True, priorities=True), data=st.data())
def test_static_does_not_depend_on_the_order_of_submission(case: Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(case.heights))))
    assert makespan("static", case.permuted(order).instance) == pytest.approx(makespan("static", case.instance))


@given(case=anything, name=planner_names, factor=st.sampled_from([1 / 64, 0.5, 2.0, 8.0, 4096.0]))
def test_makespans_scale_with_time(case: Case, name: str, factor: float) -> None:
    # Powers of two scale without rounding, so that ties fall the same way.
    assert makespan(name, case.scaled(factor).instance) == pytest.approx(factor * makespan(name, case.instance))


@given(case=anything, name=st.sampled_from(["static", "fifo"]), factor=st.sampled_from([1 / 3, 0.1, 60.0, 1e-6]))
def test_makespans_without_replanning_scale_by_any_factor(case: Case, name: str, factor: float) -> None:
    assert makespan(name, case.scaled(factor).instance) == pytest.approx(factor * makespan(name, case.instance))


@given(case=anything, name=planner_names)
def test_the_same_input_gives_the_same_plan(case: Case, name: str) -> None:
    first, second = plan(name, case.instance), plan(name, case.instance)
    assert (first.widths, first.placements, first.queue) == (second.widths, second.placements, second.queue)
    assert first.schedule.segments == second.schedule.segments


# --- What a plan says


@given(case=anything, name=planner_names)
def test_a_plan_places_or_queues_every_trial_once(case: Case, name: str) -> None:
    made = plan(name, case.instance)
    assert Counter([*made.placements, *made.queue]) == Counter(case.instance.trial_ids)
    assert made.placements, "the devices are idle"
    assert list(made.widths) == list(case.instance.trial_ids)


@given(case=anything, name=planner_names)
def test_placements_respect_widths_and_limits(case: Case, name: str) -> None:
    instance = case.instance
    made = plan(name, instance)
    limits = {
        trial_id: (int(c), int(d))
        for trial_id, c, d in zip(instance.trial_ids, instance.model.c, instance.model.d, strict=True)
    }
    on_device: dict[int, list[float]] = {}
    for trial_id, placement in made.placements.items():
        c, d = limits[trial_id]
        width = placement.width
        assert width == made.widths[trial_id]
        assert 1 / c <= width <= d
        assert float(width).is_integer() or float(1 / width).is_integer()
        assert len(set(placement.device_ids)) == len(placement.device_ids) == max(1, width)
        for device in placement.device_ids:
            on_device.setdefault(device, []).append(width)
    assert set(on_device) <= set(range(instance.n))
    for device, widths in on_device.items():
        assert len(widths) <= min(round(1 / width) if width < 1 else 1 for width in widths), device


@given(case=anything, name=planner_names)
def test_the_schedule_never_overfills_a_device_and_loses_no_work(case: Case, name: str) -> None:
    instance = case.instance
    schedule = plan(name, instance).schedule
    for instant in {segment.start for segment in schedule.segments}:
        on_device: dict[int, list[float]] = {}
        for segment in schedule.segments:
            if segment.start <= instant < segment.end:
                for device in segment.devices:
                    on_device.setdefault(device, []).append(segment.width)
        for widths in on_device.values():
            assert len(widths) <= min(max(1, round(1 / width)) for width in widths)
    for row in range(len(instance)):
        mine = sorted((s for s in schedule.segments if s.row == row), key=lambda segment: segment.start)
        assert mine[-1].end == schedule.finished[row]
        assert all(before.end == after.start for before, after in itertools.pairwise(mine))


@given(case=anything, name=planner_names)
def test_a_higher_priority_never_starts_after_a_lower_one_of_the_same_width(case: Case, name: str) -> None:
    made = plan(name, case.instance)
    widths, began = made.arrangement.widths, made.schedule.started
    for a in range(len(widths)):
        for b in range(len(widths)):
            if widths[a] == widths[b] and case.priority[a] > case.priority[b]:
                assert began[a] <= began[b]


def test_a_higher_priority_comes_first_whatever_the_width() -> None:
    instance = Instance.build([1, 1, 1, 9], 1, c=2, priority=[1, 5, 1, 1])
    for name in PLANNERS:
        assert plan(name, instance).schedule.started[1] == 0.0


@given(case=cases(), which=st.integers(0, 20), replanner=st.sampled_from([ReallocateByShare, WaterFill, Concentrate]))
def test_every_resize_can_be_carried_out(case: Case, which: int, replanner: type) -> None:
    """Re-planners count devices themselves; what they hand out must be there, from any widths to start with."""
    instance = case.instance
    proposals = list(candidates(instance))
    arrangement = proposals[which % len(proposals)]
    rollout = started(instance, arrangement)
    if not rollout.queued:
        _carry_out(rollout, replace(arrangement, replanner=replanner()))
    while rollout.running:
        rollout.advance(math.inf)
        rollout.dispatch()
        if not rollout.queued and rollout.running:
            _carry_out(rollout, replace(arrangement, replanner=replanner()))
    assert len(rollout.finished) == len(instance)


def _carry_out(rollout: Rollout, arrangement: Arrangement) -> None:
    snapshot = rollout.snapshot()
    resizes = arrangement.replanner.replan(snapshot)
    assert len({row for row, _ in resizes}) == len(resizes), "one order a trial"
    for row, width in resizes:
        assert width != rollout.width(row)
        assert rollout.resize(row, width), f"{resizes} for {snapshot}"


# --- Memory, names and bad input


@given(case=cases(most_trials=6, most_devices=4), name=planner_names, data=st.data())
def test_trials_that_fit_somewhere_end(case: Case, name: str, data: st.DataObject) -> None:
    k, n = len(case.heights), len(case.speeds)
    rooms = data.draw(st.lists(st.sampled_from([10.0, 40.0]), min_size=n, max_size=n))
    needs = data.draw(st.lists(st.sampled_from([None, 3.0, 20.0]), min_size=k, max_size=k))
    if max(rooms) < 40.0:
        needs = [3.0 if need else None for need in needs]
    instance = Instance.build(
        case.heights,
        Cluster(tuple(Device(index, memory_bytes=room) for index, room in enumerate(rooms)), memory_watermark=1.0),
        alpha=case.alpha,
        beta=case.beta,
        c=case.c,
        d=case.d,
        needs=[None if need is None else MemoryNeed(need, 0.0) for need in needs],
    )
    assert makespan(name, instance) >= malleable_lower_bound(instance) * (1 - CLOSE)


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_go_by_their_names(name: str) -> None:
    planner = make_planner(name, c=3, d=2)
    assert (planner.name, planner.c, planner.d) == (name, 3, 2)
    assert planner.arrange(Instance.build([1.0], 1)).name


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="planner='best'"):
        make_planner("best")
    with pytest.raises(InvalidFieldError, match="c=0"):
        StaticFluid(c=0)
    with pytest.raises(InvalidFieldError, match="d=0"):
        make_planner("fifo", d=0)
    with pytest.raises(InvalidFieldError, match="simulate_up_to=-1"):
        Portfolio(simulate_up_to=-1)
