"""The portfolio planner and the times T it aims at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import CLOSE, UNEQUAL, Case, cases, fixed_width_lower_bound, makespan, plan

import fluid.planners.portfolio
from fluid.dynamic_fluid import DynamicFluid, ReallocateByShare
from fluid.measure.runtime_model import stretch_of
from fluid.planners.arrangement import Arrangement
from fluid.planners.bounds import NarrowestWidths, malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.planners.planner import Plan
from fluid.planners.portfolio import Fifo, Portfolio, candidates, nominal_makespan
from fluid.planners.rollout import roll_out
from fluid.planners.water_fill import Concentrate, WaterFill
from fluid.static_fluid import StaticFluid

# --- gamma(T), T* and T1


def all_widths(c: int, d: int) -> list[float]:
    return [*(1.0 / p for p in range(c, 1, -1)), *map(float, range(1, d + 1))]


def gamma(instance: Instance, within: float) -> list[float]:
    """The narrowest width at which each trial ends in time, or its widest; trial by trial."""
    model = instance.model
    found = []
    columns = (instance.heights, model.alpha, model.beta, model.c, model.d)
    for height, alpha, beta, c, d in zip(*(column.tolist() for column in columns), strict=True):
        widths = all_widths(c, d)
        in_time = [w for w in widths if height * stretch_of(alpha, beta, w) <= within * (1 + 1e-9)]
        found.append(in_time[0] if in_time else widths[-1])
    return found


@given(case=cases(most_trials=16), share=st.floats(0.3, 4.0))
def test_widths_are_the_narrowest_that_end_in_time(case: Case, share: float) -> None:
    instance = case.instance
    narrowest = NarrowestWidths(instance)
    for within in (share * narrowest.shortest, narrowest.shortest, narrowest.fixed_width_bound(), 1e-9, 1e12):
        assert narrowest.widths(within).tolist() == gamma(instance, within)
    # A trial that ends just in time does so whatever the rounding.
    model = instance.model
    for width in all_widths(int(model.c.max()), int(model.d.max())):
        for within in model.heights(instance.heights, np.full(len(instance), width)).tolist():
            assert narrowest.widths(within).tolist() == gamma(instance, within)


@given(case=cases(most_trials=16))
def test_t_star_is_its_definition(case: Case) -> None:
    instance = case.instance
    narrowest = NarrowestWidths(instance)
    bound = narrowest.fixed_width_bound()

    def fits(within: float) -> bool:
        widths = np.array(gamma(instance, within))
        heights = instance.model.heights(instance.heights, widths)
        return bool((heights <= within * (1 + CLOSE)).all() and widths @ heights <= instance.n * within * (1 + CLOSE))

    assert fits(bound)
    assert bound == pytest.approx(narrowest.shortest) or not fits(bound * (1 - 1e-6))
    assert fixed_width_lower_bound(instance) == bound


@given(case=cases(most_trials=16))
def test_t1_is_between_t_star_and_twice_that_and_can_be_laid_out(case: Case) -> None:
    instance = case.instance
    narrowest = NarrowestWidths(instance)
    bound = narrowest.fixed_width_bound()
    target = narrowest.packable(bound)
    assert bound <= target <= 2 * bound
    if target < 2 * bound:
        # Whole devices for all but the narrowest class, whose area fits into the rest.
        c = instance.model.c
        widths = narrowest.widths(target)
        in_narrowest = widths == 1.0 / c
        whole = sum(w for w, narrow in zip(widths, in_narrowest, strict=True) if w >= 1 and not narrow)
        for p in range(2, int(c.max()) + 1):
            whole += -(-int(((widths == 1.0 / p) & ~in_narrowest).sum()) // p)
        area = (instance.model.heights(instance.heights, widths) * widths)[in_narrowest].sum()
        assert whole <= instance.n
        assert area <= (instance.n - whole) * target * (1 + 2 * CLOSE)


@given(case=cases(), longer=st.integers(1, 400))
def test_targets_grow_with_the_work(case: Case, longer: int) -> None:
    before = NarrowestWidths(case.instance)
    heights = np.array(case.heights) + longer / 4
    after = NarrowestWidths(
        Instance.build(heights, case.instance.n, alpha=case.alpha, beta=case.beta, c=case.c, d=case.d)
    )
    assert after.fixed_width_bound() >= before.fixed_width_bound() * (1 - CLOSE)
    assert after.shortest >= before.shortest
    for within in (1.0, 5.0, 25.0):
        assert (after.widths(within) >= before.widths(within)).all()
        assert (before.widths(within) >= before.widths(2 * within)).all()


def test_t_star_by_hand() -> None:
    # Acceptance case 1. Widths 1/2, 1/2, 2 and 4 take 4 / 2 + 4 / 2 + 12 + 30 = 46 = 5 * 9.2 device-seconds.
    narrowest = NarrowestWidths(Instance.build([4, 4, 12, 30], 5, c=2, d=5))
    assert narrowest.fixed_width_bound() == pytest.approx(9.2)
    assert narrowest.widths(9.2).tolist() == [0.5, 0.5, 2.0, 4.0]
    # That is 6 devices and more. From 10 s on 3 + 2 of them do for the long ones, but leave none for the others; from
    # 12 s on the second one is packed as well.
    assert narrowest.packable(9.2) == pytest.approx(12.0)
    assert narrowest.widths(12.0).tolist() == [0.5, 0.5, 0.5, 3.0]


# --- Candidates


@given(case=cases(speeds=UNEQUAL, priorities=True))
def test_candidates_differ_and_include_the_papers(case: Case) -> None:
    instance = case.instance
    model = instance.model
    found = list(candidates(instance))
    # FIFO may be StaticFluid's plan over again: they differ in the order as a rule.
    keys = [(c.widths.tobytes(), type(c.replanner).__name__, c.replan_at_start) for c in found[:-1]]
    assert len(set(keys)) == len(keys)
    assert len({candidate.name for candidate in found}) == len(found)
    for candidate in found:
        assert sorted(candidate.order.tolist()) == list(range(len(instance)))
        assert (candidate.widths >= 1.0 / model.c).all()
        assert (candidate.widths <= model.d).all()
    for planner in (StaticFluid(), DynamicFluid(), Fifo()):
        wanted = planner.arrange(instance)
        assert any(
            candidate.widths.tolist() == wanted.widths.tolist()
            and candidate.order.tolist() == wanted.order.tolist()
            and type(candidate.replanner) is type(wanted.replanner)
            and candidate.replan_at_start == wanted.replan_at_start
            for candidate in found
        ), planner.name


@pytest.mark.slow
@given(case=cases(speeds=UNEQUAL, priorities=True))
def test_the_choice_is_the_first_of_the_shortest(case: Case) -> None:
    instance = case.instance
    chosen = Portfolio().arrange(instance)
    found = list(candidates(instance))
    lengths = [roll_out(instance, candidate).now for candidate in found]
    assert roll_out(instance, chosen).now <= min(lengths) * (1 + 2 * CLOSE)
    names = [candidate.name for candidate in found]
    first = next(i for i, length in enumerate(lengths) if length <= min(lengths) * (1 + 2 * CLOSE))
    assert names.index(chosen.name) == first
    assert chosen.widths.tolist() == found[first].widths.tolist()


def test_ties_go_to_the_candidate_that_r_replans() -> None:
    # Alike trials, a device each: nothing to choose between any of them.
    instance = Instance.build([1.0] * 4, 4, alpha=1.9, d=1)
    chosen = Portfolio().arrange(instance)
    assert chosen.name == "static, re-planned by R"
    for replanner in (chosen.replanner, Portfolio().replanner()):
        assert isinstance(replanner, WaterFill)
    assert {type(candidate.replanner) for candidate in candidates(Instance.build([3.0, 1.0], 4, alpha=1.1))} >= {
        Concentrate,
        ReallocateByShare,
        WaterFill,
    }


# --- Large groups


def is_valid(instance: Instance, arrangement: Arrangement) -> bool:
    model = instance.model
    return bool(
        sorted(arrangement.order.tolist()) == list(range(len(instance)))
        and (arrangement.widths >= 1.0 / model.c).all()
        and (arrangement.widths <= model.d).all()
    )


@pytest.mark.slow
@given(case=cases(speeds=UNEQUAL, priorities=True))
def test_beyond_simulate_up_to_the_nominal_makespan_decides(case: Case) -> None:
    instance = case.instance
    planner = Portfolio(simulate_up_to=len(instance) - 1)
    chosen = planner.arrange(instance)
    assert is_valid(instance, chosen)
    least = min(nominal_makespan(instance, candidate) for candidate in candidates(instance))
    assert nominal_makespan(instance, chosen) == least
    made = Plan("portfolio", instance, chosen)
    assert made.makespan >= malleable_lower_bound(instance) * (1 - CLOSE)
    assert len(made.schedule.finished) == len(instance)


def test_groups_up_to_the_limit_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def counted(instance: Instance, arrangement: Arrangement) -> float:
        looked_at.append(arrangement.name)
        return nominal_makespan(instance, arrangement)

    monkeypatch.setattr(fluid.planners.portfolio, "nominal_makespan", counted)
    instance = Instance.build([3.0, 2.0, 1.0], 2)
    Portfolio(simulate_up_to=3).arrange(instance)
    assert looked_at == []
    Portfolio(simulate_up_to=2).arrange(instance)
    assert len(looked_at) == len(list(candidates(instance)))


def test_nominal_makespan_by_hand() -> None:
    instance = Instance.build([10.0, 4.0], 2, alpha=1.25, c=2)
    fifo = Fifo().arrange(instance)
    assert nominal_makespan(instance, fifo) == 10.0
    wide = Arrangement(np.array([2.0, 0.5]), fifo.order, fifo.replanner, False, "wide")
    assert nominal_makespan(instance, wide) == (2 * 5.0 + 0.5 * 5.0) / 2


@given(case=cases(eps=st.just(0.0)))
def test_nominal_makespans_are_never_below_the_bound(case: Case) -> None:
    instance = case.instance
    for candidate in candidates(instance):
        assert nominal_makespan(instance, candidate) >= malleable_lower_bound(instance) * (1 - 2 * CLOSE)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.15, 1.05)])
def test_two_thousand_trials_on_a_hundred_devices(alpha: float, beta: float) -> None:
    heights = np.random.default_rng(11).lognormal(3.0, 1.0, 2000)
    instance = Instance.build(heights, 100, alpha=alpha, beta=beta)
    made = plan("portfolio", instance)
    assert is_valid(instance, made.arrangement)
    assert len(made.placements) + len(made.queue) == 2000
    assert made.makespan >= made.lower_bound * (1 - CLOSE)
    # So many trials leave little to lose.
    assert made.makespan <= 1.3 * made.lower_bound
    assert made.makespan <= makespan("fifo", instance)


def test_two_thousand_trials_that_all_differ() -> None:
    random = np.random.default_rng(12)
    overheads: Sequence[float] = random.uniform(1.0, 1.4, 2000)
    instance = Instance.build(random.lognormal(3.0, 1.0, 2000), 100, alpha=overheads, beta=overheads[::-1])
    made = plan("portfolio", instance)
    assert is_valid(instance, made.arrangement)
    assert made.lower_bound * (1 - CLOSE) <= made.makespan <= 1.5 * made.lower_bound
