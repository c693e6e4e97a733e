"""The order of units by what it costs if they end late."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.policies.owners.lateness import (
    FreeDevices,
    Pause,
    RunningPart,
    Unit,
    end_alone,
    ends_of,
    expected_cost,
    gain_of_pauses,
    order_units,
)

DEVICES = 4.0


def unit(owner: int, seconds: float, due: float | None = None, **more: object) -> Unit:
    """One that takes so many seconds on all devices."""
    steps = () if due is None else ((due, 1.0),)
    return Unit(owner, seconds * DEVICES, trials=4, devices=DEVICES, longest=seconds, steps=steps, **more)  # type: ignore[arg-type]


def owners(units: list[Unit]) -> list[int]:
    return [each.owner for each in order_units(units, DEVICES)]


def met(order: list[Unit]) -> int:
    ends = ends_of(order, DEVICES)
    return sum(end.late(each.ahead[0][0]) < 0.5 for each, end in zip(order, ends, strict=True) if each.ahead)


@st.composite
def with_deadlines(draw: st.DrawFn) -> list[Unit]:
    seconds = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    return [unit(owner, float(each), draw(st.integers(1, 60)) + 0.5) for owner, each in enumerate(seconds)]


@given(with_deadlines())
def test_as_many_deadlines_are_met_as_can_be(units: list[Unit]) -> None:
    """With known times and all devices for each, this is Moore's problem, whose optimum is found."""
    best = max(met(list(order)) for order in itertools.permutations(units))
    assert met(order_units(units, DEVICES)) == best


@given(with_deadlines(), st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_every_unit_has_a_place_and_the_order_of_the_input_does_not_matter(
    units: list[Unit], further: list[int]
) -> None:
    units += [unit(100 + number, float(each)) for number, each in enumerate(further)]
    order = order_units(units, DEVICES)
    assert sorted(order) == sorted(units)
    assert order_units(units[::-1], DEVICES) == order


@given(with_deadlines(), st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_it_costs_no_more_than_the_least_work_first_or_the_earliest_due_first(
    units: list[Unit], further: list[int]
) -> None:
    """Where all deadlines can be met beside each other, so that the two costs are not weighed."""
    units = [each for each in units if each.steps[0][0] > sum(other.work for other in units) / DEVICES]
    units += [unit(100 + number, float(each)) for number, each in enumerate(further)]
    found = order_units(units, DEVICES)
    cost = expected_cost(found, ends_of(found, DEVICES))
    due = sorted(units, key=lambda each: (each.steps or ((1e9, 0.0),))[0][0])
    assert cost <= expected_cost(due, ends_of(due, DEVICES)) + 1e-6


def test_units_are_ordered_while_there_is_no_device() -> None:
    units = [unit(0, 10.0), unit(1, 5.0, 20.0), unit(2, 5.0, 10.0)]
    assert [each.owner for each in order_units(units, 0.0)] == [each.owner for each in order_units(units, 1.0)]


def test_two_that_can_both_be_met_are_whatever_their_work() -> None:
    tight, loose = unit(0, 400.0, 460.0), unit(1, 75.0, 2000.0)
    assert owners([tight, loose]) == [0, 1], "the least work first would make the tight one late"


def test_what_cannot_be_met_falls_behind_all_that_can() -> None:
    hopeless, tight, plain = unit(0, 50.0, 20.0), unit(1, 100.0, 110.0), unit(2, 300.0)
    assert owners([hopeless, tight, plain]) == [1, 2, 0]


def test_a_missed_one_comes_last_with_the_least_work_first_and_like_others_once_it_was_late_for_as_long() -> None:
    late, later, plain = unit(0, 9.0, 20.0, age=21.0), unit(1, 5.0, 20.0, age=25.0), unit(2, 300.0)
    assert owners([late, later, plain]) == [2, 1, 0]
    assert owners([late._replace(age=41.0), later, plain]) == [0, 2, 1], "it is not passed over for ever"


def test_one_without_a_deadline_goes_before_deadlines_as_far_as_their_slack_allows() -> None:
    assert owners([unit(0, 50.0, 100.0), unit(1, 40.0)]) == [1, 0]
    assert owners([unit(0, 50.0, 80.0), unit(1, 40.0)]) == [0, 1]
    first, second = unit(0, 50.0, 200.0), unit(1, 50.0, 85.0)
    assert owners([first, second, unit(2, 40.0)]) == [1, 2, 0], "after the first of them there is slack"


@pytest.mark.parametrize(("weight", "expected"), [(0.25, [0, 1]), (0.125, [1, 0])])
def test_a_deadline_costs_as_much_as_waiting_for_four_times_its_seconds(weight: float, expected: list[int]) -> None:
    """It is missed by going second, and costs 80 s then, or 40 s; the other would wait for 50 s more, or go first."""
    assert owners([unit(0, 50.0, 80.0, weight=weight), unit(1, 45.0)]) == expected


def test_without_deadlines_the_least_work_by_weight_is_first() -> None:
    assert owners([unit(0, 10.0), unit(1, 30.0), unit(2, 20.0, weight=4.0)]) == [2, 0, 1]


def test_a_missed_step_is_followed_by_the_next() -> None:
    """Its first step cannot be met beside the other; its second can, after it."""
    steps = Unit(0, 200.0 * DEVICES, trials=4, devices=DEVICES, steps=((210.0, 1.0), (320.0, 2.0)))
    assert owners([steps, unit(1, 100.0, 110.0), unit(2, 50.0)]) == [1, 0, 2], "the third would make it late again"
    assert owners([steps._replace(age=330.0), unit(1, 100.0, 110.0), unit(2, 50.0)]) == [1, 2, 0]
    assert steps._replace(age=220.0).ahead == ((100.0, 1.0),)


def test_a_higher_priority_comes_first_whatever_it_costs() -> None:
    assert owners([unit(0, 50.0, 60.0), unit(1, 500.0, priority=2.0)]) == [1, 0]


def test_spreads_decide_where_means_do_not() -> None:
    """The plain one would be first for its slack, if the other were sure to take 50 s."""
    plain = unit(1, 40.0)
    sure = unit(0, 50.0, 100.0, weight=2.0)
    assert owners([sure, plain]) == [1, 0]
    assert owners([sure._replace(spread=20.0 * DEVICES), plain]) == [0, 1]


def test_ends_count_trials_that_run_and_rounds() -> None:
    """Four run for 30 s more; then five of 10 s take two rounds, and leave the rest to the next."""
    running = tuple(RunningPart(30.0, 0.0, 1.0, row) for row in range(4))
    first = Unit(0, 0.0, trials=0, devices=0.0, running=running)
    second = Unit(1, 50.0, trials=5, devices=4.0, longest=10.0)
    third = Unit(2, 10.0, trials=1, devices=1.0, longest=10.0)
    ends = ends_of([first, second, third], DEVICES)
    assert [end.mean for end in ends[:2]] == pytest.approx([30.0, 50.0])
    assert 40.0 <= ends[2].mean <= 55.0
    assert end_alone(second, DEVICES).mean == pytest.approx(20.0)


@pytest.mark.parametrize(("trials", "wide", "seconds"), [(1, 2, 10.0), (2, 2, 10.0), (3, 2, 20.0), (2, 3, 20.0)])
def test_ends_of_gangs_count_how_many_fit_side_by_side(trials: int, wide: int, seconds: float) -> None:
    """Each takes 10 s on its devices."""
    devices = min(DEVICES, trials * wide)
    gangs = Unit(0, 10.0 * trials * wide, trials=trials, devices=devices, wide=wide, longest=10.0)
    assert end_alone(gangs, DEVICES).mean == pytest.approx(seconds)


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(1, 2)), max_size=4),
    st.lists(st.tuples(st.floats(0.5, 9.0), st.floats(1.0, 200.0)), min_size=1, max_size=6),
)
def test_fluid_takes_what_there_is(held: list[tuple[float, int]], taken: list[tuple[float, float]]) -> None:
    """No more work is done by any time than devices allow, and none idles that a later one could use."""
    free = FreeDevices(8.0, [RunningPart(seconds, 0.0, float(devices)) for seconds, devices in held])
    ends = [free.take(devices, work) for devices, work in taken]
    assert all(end >= work / min(8.0, devices) * (1 - 1e-9) for end, (devices, work) in zip(ends, taken, strict=True))
    done = sum(work for _, work in taken) + sum(seconds * devices for seconds, devices in held)
    assert 8.0 * max(*ends, *(seconds for seconds, _ in held), 0.0) >= done * (1 - 1e-9)
    assert 100.0 * (1 - 1e-9) <= free.take(8.0, 800.0) <= (100.0 + done / 0.5) * (1 + 1e-9)


def test_a_pause_gains_what_is_then_met_and_costs_what_it_delays() -> None:
    running = tuple(RunningPart(1200.0, 0.0, 1.0, row, 10.0) for row in range(4))
    loose = Unit(1, 0.0, trials=0, devices=0.0, running=running)
    tight = unit(0, 50.0, 100.0)
    pauses = [Pause(1, part, 5.0) for part in running]
    # The deadline is worth 400 s; the others end 55 s later, as they run on for 10.
    assert gain_of_pauses([tight, loose], DEVICES, pauses) == pytest.approx(400.0 - 55.0)
    assert gain_of_pauses([tight, loose._replace(weight=9.0)], DEVICES, pauses) < 0.0
    assert gain_of_pauses([tight, loose], DEVICES, pauses[:1]) < 0.0, "one device is too little for it"


def test_trials_that_can_pause_do_not_make_a_deadline_hopeless() -> None:
    """Its rank is what they pause for."""
    tight, plain = unit(0, 50.0, 100.0), Unit(1, 0.0, trials=0, devices=0.0)
    for rest, expected in ((10.0, [0, 1]), (float("inf"), [1, 0])):
        running = tuple(RunningPart(1200.0, 0.0, 1.0, row, rest) for row in range(4))
        assert owners([tight, plain._replace(running=running)]) == expected
