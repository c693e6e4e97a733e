"""Planning by the measured rates of fused packs: the same plans as by alpha where the rates are a power law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import fixed_width_lower_bound

from fluid.measure.runtime_model import FusedColumn, FusedRates
from fluid.planners.bounds import malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.planners.planner import Plan
from fluid.planners.portfolio import PLANNERS, Portfolio, make_planner, nominal_makespan
from fluid.planners.rollout import roll_out, start
from fluid.planners.water_fill import Concentrate, WaterFill


def rates_of(alpha: float, most: int) -> FusedRates:
    """Rates that follow the power law of processes at every p."""
    return FusedRates.of({p: alpha ** (p - 1.0) for p in range(2, most + 1)})


def pair(heights: Any, n: int, alphas: list[float], most: int, **options: Any) -> tuple[Instance, Instance]:
    """The same trials, planned by alpha and by equal rates."""
    alpha = np.resize(alphas, len(heights)).tolist()
    by_alpha = Instance.build(heights, n, alpha=alpha, c=most, **options)
    fused = [rates_of(each, most) for each in alpha]
    # alpha does not matter where there are rates.
    by_rates = Instance.build(heights, n, alpha=3.0, c=by_alpha.model.c, fused=fused, **options)
    return by_alpha, by_rates


# Heights of one decimal and more than a rounding error apart, as ties could be broken either way.
heights = st.lists(st.integers(1, 400).map(lambda tenths: tenths / 10 + 0.0123), min_size=1, max_size=24)
alphas = st.lists(st.sampled_from([1.02, 1.05, 1.1, 1.2]), min_size=1, max_size=3)


@pytest.mark.parametrize("name", PLANNERS)
@given(heights=heights, n=st.integers(1, 6), alphas=alphas, most=st.integers(1, 8), epsilon=st.sampled_from([0.0, 0.3]))
def test_rates_of_a_power_law_give_the_plans_of_alpha(
    name: str, heights: list[float], n: int, alphas: list[float], most: int, epsilon: float
) -> None:
    distinct = [height + 1e-3 * row for row, height in enumerate(heights)]
    by_alpha, by_rates = pair(distinct, n, alphas, most, beta=1.05, d=4, epsilon=epsilon)
    one, other = (Plan(name, each, make_planner(name).arrange(each)) for each in (by_alpha, by_rates))
    assert other.arrangement.name == one.arrangement.name
    assert other.widths == one.widths
    assert other.queue == one.queue
    assert other.makespan == pytest.approx(one.makespan, rel=1e-9)
    assert malleable_lower_bound(by_rates) == pytest.approx(malleable_lower_bound(by_alpha), rel=1e-9)
    assert fixed_width_lower_bound(by_rates) == pytest.approx(fixed_width_lower_bound(by_alpha), rel=1e-9)


@pytest.mark.parametrize("replanner", [WaterFill(), Concentrate()])
@given(heights=heights, n=st.integers(2, 5), alphas=alphas, idle=st.integers(1, 4))
def test_rates_of_a_power_law_give_the_width_changes_of_alpha(
    replanner: Any, heights: list[float], n: int, alphas: list[float], idle: int
) -> None:
    distinct = [height + 1e-3 * row for row, height in enumerate(heights)]
    changes = []
    for instance in pair(distinct, n, alphas, 8, beta=1.05, d=4, epsilon=0.1):
        # The devices that come are idle, so there is something to change.
        rollout = start(instance, Plan("static", instance, make_planner("static").arrange(instance)).arrangement)
        running = rollout.snapshot()
        changes.append(replanner.replan(replace(running, free=running.free + idle, n=running.n + idle)))
    assert changes[0] == changes[1]


def mixed(k: int, n: int) -> Instance:
    """Trials of which every third is fused, by one of two tables, in packs of up to 64."""
    tables = [FusedRates.of({2: 1.1, 4: 1.4, 8: 2.0, 64: 8.0}), None, FusedRates.of({2: 2.2, 4: 2.4, 64: 20.0})]
    fused = [tables[row % 3] for row in range(k)]
    c = [4 if rates is None else 64 for rates in fused]
    heights = np.exp(np.random.default_rng(k).standard_normal(k))
    return Instance.build(heights, n, alpha=1.2, beta=1.05, c=c, d=4, fused=fused, epsilon=0.01)


@pytest.mark.parametrize(("k", "n"), [(5, 2), (40, 1), (40, 4), (90, 9)])
def test_the_portfolio_is_no_worse_than_the_others_and_no_plan_beats_the_bound(k: int, n: int) -> None:
    instance = mixed(k, n)
    makespans = {name: roll_out(instance, make_planner(name).arrange(instance)).now for name in PLANNERS}
    assert makespans["portfolio"] <= min(makespans.values()) * (1 + 1e-9)
    assert malleable_lower_bound(instance) <= min(makespans.values()) * (1 + 1e-9)


def test_a_pack_of_64_takes_as_long_as_was_measured() -> None:
    rates = FusedRates.of({2: 1.2, 4: 1.5, 64: 9.0})
    instance = Instance.build([10.0] * 64, 1, c=64, d=1, fused=[rates] * 64)
    plan = Plan("portfolio", instance, Portfolio().arrange(instance))
    assert set(plan.widths.values()) == {1 / 64}
    assert plan.makespan == pytest.approx(90.0)
    assert plan.lower_bound == pytest.approx(90.0)


def test_rows_that_leave_speed_up_the_others() -> None:
    rates = FusedRates.of({2: 1.5, 4: 2.0})
    instance = Instance.build([4.0, 6.0, 10.0], 1, c=4, d=1, fused=[rates] * 3)
    # 4 s of work in a pack of three, 2 s in one of two, 4 s alone; T(3) lies on the line between log T(2) and log T(4).
    makespan = roll_out(instance, make_planner("static").arrange(instance)).now
    assert makespan == pytest.approx(4.0 * rates.stretch(3) + 2.0 * 1.5 + 4.0)


def test_large_groups_are_compared_by_the_rows_that_a_pack_can_have() -> None:
    rates = FusedRates.of({2: 1.0, 64: 32.0})
    instance = Instance.build([1.0] * 20, 10, c=64, d=1, fused=[rates] * 20)
    arrangement = make_planner("static").arrange(instance)
    assert arrangement.widths.tolist() == [1.0 / 64] * 20
    assert nominal_makespan(instance, arrangement) == pytest.approx(1.0), "two rows on each of the ten devices"


def test_wide_packs_are_not_rolled_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rolled_out: list[int] = []

    def count(instance: Instance, *arguments: Any, **options: Any) -> Any:
        rolled_out.append(len(instance))
        return roll_out(instance, *arguments, **options)

    monkeypatch.setattr("fluid.planners.portfolio.roll_out", count)
    rates = FusedRates.of({2: 1.1, 64: 8.0})
    for k, n, expected in ((40, 1, True), (41, 1, False), (256, 1, False), (256, 64, True), (300, 4, False)):
        rolled_out.clear()
        Portfolio().arrange(Instance.build(np.arange(1.0, k + 1), n, c=64, d=1, fused=[rates] * k))
        assert bool(rolled_out) is expected, (k, n)


def test_a_column_shares_its_tables() -> None:
    one, same, other = (FusedRates.of({2: stretch}) for stretch in (1.1, 1.1, 1.3))
    column = FusedColumn.of([one, None, other, same])
    assert column is not None
    assert len(column.rates) == 3
    assert [column[row] for row in range(4)] == [one, None, other, one]
    assert column.fuses.tolist() == [True, False, True, True]
    assert column.take(np.array([3, 1])).kind.tolist() == [0, 1]
    alpha = np.array([9.0, 1.2, 9.0, 9.0])
    assert column.stretches(alpha, 1).tolist() == pytest.approx([1.1, 1.2, 1.3, 1.1])
    assert column.stretches(alpha, np.array([0, 2, 3, 1])).tolist() == pytest.approx([1.0, 1.44, 2.6, 1.1])
    assert FusedColumn.of([None, None]) is None
    assert FusedColumn.of([]) is None
