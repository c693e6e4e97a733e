"""The planners against makespans worked out by brute_force.py, and brute_force.py against examples by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from brute_force import Job, Tiny, best_orders, least_latest_finish, optimum, outcome, packed, simulate, single
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import CLOSE, UNEQUAL, Case, cases, jobs, makespan, plan

from fluid.measure.runtime_model import packing_limit, width_limit
from fluid.planners.bounds import malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.planners.portfolio import candidates
from fluid.planners.rollout import roll_out

# --- The helper itself


def test_simulate_by_hand() -> None:
    assert simulate([Job(10.0, 0.5, alpha=1.25), Job(4.0, 0.5, alpha=1.25)], [1.0]) == pytest.approx([11.0, 5.0])
    # The wide one waits for both devices; a narrow one passes it.
    wide_waits = [Job(3.0), Job(8.0, 2.0, beta=1.5, priority=0.0), Job(4.0)]
    assert simulate(wide_waits, [1.0, 1.0]) == pytest.approx([3.0, 4.0 + 8.0 / 2 * 1.5, 4.0])
    assert simulate([Job(6.0), Job(6.0)], [1.0, 3.0]) == pytest.approx([2.0, 6.0])
    # One tolerates two on a device, so that the third goes elsewhere although it tolerates four.
    mixed = [Job(5.0, 1 / 2), Job(5.0, 1 / 2), Job(5.0, 1 / 4), Job(5.0, 1 / 4)]
    assert simulate(mixed, [1.0]) == pytest.approx([5.0, 5.0, 10.0, 10.0])


def test_optimum_by_hand() -> None:
    assert optimum(Tiny((3.0, 3.0, 3.0), 1, c=1)) == pytest.approx(9.0)
    assert optimum(Tiny((3.0, 3.0, 3.0), 1, c=4)) == pytest.approx(3.0)
    assert optimum(Tiny((3.0, 3.0, 3.0), 1, alpha=1.2, c=2)) == pytest.approx(3.6 + 3.0)
    assert optimum(Tiny((12.0,), 3, beta=1.1, d=3)) == pytest.approx(12 / 3 * 1.21)
    assert optimum(Tiny((12.0,), 3, beta=1.1, d=1)) == pytest.approx(12.0)
    # Acceptance case 2 without one of its trials: three devices for the long one, the others on the fourth.
    assert optimum(Tiny((100.0, 26.0, 25.0, 25.0), 4, d=4)) == pytest.approx(100 / 3)
    # One after the other over both devices: waiting on purpose.
    assert optimum(Tiny((6.0, 6.0, 2.0), 2, c=1, d=2)) == pytest.approx(7.0)


def test_outcome_by_hand() -> None:
    pair = packed(4.0, 10.0, alpha=1.25)
    assert outcome(pair, (None, None), 0.5) == (pytest.approx(11.0), 0)
    assert outcome(pair, (None, 2), 0.5) == (pytest.approx(5.5), 2)
    assert outcome(pair, (2, None), 0.5) == (pytest.approx(10.0), 2)
    assert outcome(pair, (2, 2), 0.5) == (pytest.approx(5.5), 3)
    assert outcome(single(12.0, 2, speed=2.0), (None,), 0.5) == (pytest.approx(3.0), 0)
    assert outcome(single(12.0, 2, speed=2.0), (3,), 0.5) == (pytest.approx(2.5), 1)
    assert outcome(single(12.0, 2), (1,), 0.5) == (pytest.approx(12.5), -1)
    assert best_orders(pair, 3, 0.0) == pytest.approx([11.0, 10.0, 5.0, 4.0])
    assert best_orders(pair, 1, 0.5, longest_first=True) == pytest.approx([11.0, 10.5])
    assert least_latest_finish([[4.0, 2.0, 1.0], [3.0, 1.0]], 2) == 2.0
    assert least_latest_finish([[4.0, 2.0, 1.0], [3.0]], 5) == 3.0


# --- The simulation of plans


@given(case=cases(speeds=UNEQUAL, priorities=True, most_trials=14), name=st.sampled_from(["static", "fifo"]))
def test_plans_run_as_an_independent_simulation_says(case: Case, name: str) -> None:
    instance = case.instance
    made = plan(name, instance)
    order = made.arrangement.order.tolist()
    ends = simulate(jobs(instance, made.arrangement), case.speeds)
    assert [made.schedule.finished[row] for row in order] == pytest.approx(ends)
    assert made.makespan == pytest.approx(max(ends))


@given(case=cases(speeds=UNEQUAL, priorities=True), data=st.data())
def test_any_widths_run_as_an_independent_simulation_says(case: Case, data: st.DataObject) -> None:
    instance = case.instance
    made = plan("static", instance).arrangement
    model = instance.model
    widths = [
        data.draw(st.sampled_from([*(1.0 / p for p in range(2, c + 1)), *range(1, d + 1)]))
        for c, d in zip(model.c.tolist(), model.d.tolist(), strict=True)
    ]
    made.widths[:] = widths
    made.order[:] = data.draw(st.permutations(range(len(instance))))
    run = roll_out(instance, made)
    assert [run.finished[row] for row in made.order.tolist()] == pytest.approx(
        simulate(jobs(instance, made), case.speeds)
    )


@given(case=cases(most_trials=6), share=st.floats(0.1, 1.5))
def test_giving_up_changes_nothing_but_the_end(case: Case, share: float) -> None:
    instance = case.instance
    for arrangement in candidates(instance):
        whole = roll_out(instance, arrangement).now
        early = roll_out(instance, arrangement, give_up_after=share * whole).now
        assert early == (whole if share >= 1.0 else math.inf)


# --- The optimum of fixed widths


def tiny_instances(count: int, *, ideal: bool) -> list[Tiny]:
    """The same every time: up to 4 trials on up to 3 devices, with limits as the planners would lower them."""
    random = np.random.default_rng(20240 + ideal)
    made = []
    for _ in range(count):
        k, n, c, d = (int(random.integers(low, high)) for low, high in ((2, 5), (1, 4), (1, 5), (1, 4)))
        alpha, beta = (1.0, 1.0) if ideal else (1 + 0.05 * int(x) for x in random.integers(0, 9, 2))
        made.append(
            Tiny(
                tuple(np.round(random.lognormal(1.0, 1.0, k), 2) + 0.1),
                n,
                alpha,
                beta,
                packing_limit(alpha, c_max=c),
                width_limit(beta, n=n, d_max=d),
            )
        )
    return made


def instance_of(tiny: Tiny) -> Instance:
    return Instance.build(tiny.heights, tiny.n, alpha=tiny.alpha, beta=tiny.beta, c=tiny.c, d=tiny.d)


@pytest.mark.parametrize("ideal", [True, False])
def test_planners_against_the_optimum_of_fixed_widths(ideal: bool) -> None:
    ratios: dict[str, list[float]] = {"fifo": [], "static": [], "dynamic": [], "portfolio": []}
    for tiny in tiny_instances(100, ideal=ideal):
        instance = instance_of(tiny)
        best = optimum(tiny)
        assert malleable_lower_bound(instance) <= best * (1 + CLOSE), tiny
        for name, all_ratios in ratios.items():
            all_ratios.append(makespan(name, instance) / best)
        assert ratios["fifo"][-1] >= 1 - CLOSE, tiny
        assert ratios["static"][-1] >= 1 - CLOSE, tiny
    mean = {name: float(np.mean(all_ratios)) for name, all_ratios in ratios.items()}
    # Re-planning gets below 1, which fixed widths cannot.
    assert mean["portfolio"] <= 1.0
    assert max(ratios["portfolio"]) <= 1.05
    assert mean["dynamic"] <= 1.05
    assert mean["portfolio"] <= mean["dynamic"] <= mean["static"] <= mean["fifo"]


@given(case=cases(most_trials=4, most_devices=3, alike=True, eps=st.just(0.0)))
def test_no_fixed_widths_beat_the_optimum_and_it_respects_the_bound(case: Case) -> None:
    instance = case.instance
    model = instance.model
    best = optimum(
        Tiny(case.heights, instance.n, float(model.alpha[0]), float(model.beta[0]), int(model.c[0]), int(model.d[0]))
    )
    assert malleable_lower_bound(instance) <= best * (1 + CLOSE)
    for arrangement in candidates(instance):
        fixed = max(simulate(jobs(instance, arrangement), case.speeds))
        assert best <= fixed * (1 + CLOSE), arrangement.name
