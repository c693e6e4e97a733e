"""Which trials are preempted; schedules are checked by running them iteration by iteration."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.policies.preemption import Demand, Preemption, PreemptionPlan, choose_preemptions


def run(budgets: list[int], n: int, *, preempting: bool) -> tuple[int, int]:
    """Runs trials of iterations of 1 s each, longest first; returns the makespan and the number of preemptions."""
    left = dict(enumerate(budgets))
    waiting = sorted(left, key=lambda row: -left[row])
    running: list[int] = []
    now = swapped = 0
    pending: list[Preemption] = []
    while waiting or running:
        while waiting and len(running) < n:
            running.append(waiting.pop(0))
        if preempting:
            demands = ([Demand(row, left[row], 0.0, 1.0) for row in rows] for rows in (running, waiting))
            pending = choose_preemptions(*demands, n).preemptions
        now += 1
        for row in running:
            left[row] -= 1
        running = [row for row in running if left[row]]
        for swap in pending:
            if swap.running in running and swap.waiting in waiting:
                running.remove(swap.running)
                waiting.remove(swap.waiting)
                running.append(swap.waiting)
                waiting.insert(0, swap.running)
                swapped += 1
    return now, swapped


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 5))
@settings(max_examples=300)
def test_all_end_within_an_iteration_or_two_of_the_bound(budgets: list[int], n: int) -> None:
    makespan, preemptions = run(budgets, n, preempting=True)
    assert makespan <= math.ceil(max(*budgets, sum(budgets) / n)) + 2
    assert makespan <= run(budgets, n, preempting=False)[0] + 1
    assert preemptions <= 4 * n


@pytest.mark.parametrize(("trials", "n", "most"), [(3, 2, 1), (9, 2, 1), (9, 8, 12), (7, 3, 4)])
def test_equal_trials_are_interrupted_rarely(trials: int, n: int, most: int) -> None:
    makespan, preemptions = run([24] * trials, n, preempting=True)
    assert makespan <= 24 * trials / n + 1.5
    assert 0 < preemptions <= most


def test_nobody_makes_way_before_the_one_that_waits_is_pressed() -> None:
    running = [Demand(0, 9.0, 0.0, 1.0), Demand(1, 9.0, 0.0, 1.0)]
    early = choose_preemptions(running, [Demand(2, 9.0, 0.0, 1.0)], 2)
    assert early.preemptions == []
    assert 1.0 < early.again_in < 4.5
    later = [Demand(0, 5.0, 0.0, 1.0), Demand(1, 5.0, 0.0, 1.0)]
    assert choose_preemptions(later, [Demand(2, 9.0, 0.0, 1.0)], 2).preemptions == [Preemption(0, 2)]


def test_a_trial_behind_another_gets_the_device_that_becomes_idle_second() -> None:
    running = [Demand(0, 1.0, 0.0, 1.0), Demand(1, 30.0, 0.0, 1.0)]
    waiting = [Demand(2, 11.0, 0.0, 1.0), Demand(3, 40.0, 0.0, 1.0)]
    assert choose_preemptions(running, waiting, 2).preemptions == [Preemption(1, 3)], "the first one would do"


def test_work_after_a_trial_counts_as_part_of_it() -> None:
    running = [Demand(0, 6.0, 0.0, 1.0), Demand(1, 2.0, 6.0, 1.0)]
    assert choose_preemptions(running, [Demand(2, 2.0, 0.0, 1.0)], 2).preemptions == []
    assert choose_preemptions(running, [Demand(2, 2.0, 6.0, 1.0)], 2).preemptions == [Preemption(0, 2)]


@pytest.mark.parametrize(
    ("running", "waiting"),
    [
        pytest.param([], [Demand(0, 9.0, 0.0, 1.0)], id="no trial runs"),
        pytest.param([Demand(0, 9.0, 0.0, 1.0)], [], id="no trial waits"),
        pytest.param([Demand(0, 3.0, 0.0, 1.0, yields=False)] * 2, [Demand(2, 9.0, 0.0, 1.0)], id="none may"),
        pytest.param([Demand(0, 3.0, 0.0, 1.0)] * 2, [Demand(2, 9.0, 0.0, 1.0, yields=False)], id="cannot step in"),
        pytest.param([Demand(0, 1.0, 0.0, 1.0)] * 2, [Demand(2, 9.0, 0.0, 1.0)], id="they end anyway"),
        pytest.param([Demand(0, 9.0, 0.0, 1.0)] * 2, [Demand(2, 1.0, 0.0, 1.0)] * 2, id="short ones fit in behind"),
    ],
)
def test_no_trial_is_preempted_if_it_would_not_help(running: list[Demand], waiting: list[Demand]) -> None:
    assert choose_preemptions(running, waiting, 2).preemptions == []


def test_a_preemption_that_costs_more_than_it_gains_is_not_made() -> None:
    waiting = [Demand(2, 9.0, 0.0, 1.0)]
    for cost, pays in ((1.0, True), (5.0, False)):
        plan = choose_preemptions([Demand(row, 5.0, 0.0, 1.0, cost=cost) for row in range(2)], waiting, 2)
        assert bool(plan.preemptions) is pays
    assert plan == PreemptionPlan([], math.inf)


def test_the_running_trial_with_most_slack_is_preempted() -> None:
    running = [Demand(0, 5.0, 0.0, 1.0), Demand(1, 3.0, 0.0, 1.0), Demand(2, 6.0, 0.0, 1.0)]
    assert choose_preemptions(running, [Demand(3, 7.0, 0.0, 1.0)], 3).preemptions == [Preemption(1, 3)]
