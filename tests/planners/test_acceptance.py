"""Nine worked examples with known widths, makespans and lower bounds, for every planner and by both ways to plan.

Case 10, the limits c(alpha) and d(beta, n), is in test_runtime_model.py. Every number here is exact; where it is not
obvious, a comment says how it comes about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from planning_helpers import fixed_width_lower_bound

from fluid import Cluster, DynamicFluid, Fifo, Instance, Portfolio, Profile, StaticFluid, Trial, TrialGroup
from fluid.measure.profile import MIN_OBSERVATIONS
from fluid.planners.bounds import malleable_lower_bound
from fluid.planners.planner import Plan, Planner

REL = 1e-6


@dataclass(frozen=True)
class Example:
    """One case; makespans in seconds, ``None`` where the case says nothing about one."""

    case: str
    n: int
    heights: list[float]
    #: seconds per iteration by which every height is a whole number of iterations.
    pace: float
    c: int = 4
    d: int = 8
    alpha: float = 1.0
    beta: float = 1.0
    epsilon: float = 0.0
    widths: list[float] = field(default_factory=list)
    fifo: float | None = None
    static: float | None = None
    dynamic: float | None = None
    #: the portfolio's makespan is at most this.
    portfolio: float | None = None
    lower_bound: float | None = None


#: alpha = 1.1, beta = 1.05, c = 4, d >= 4: the envelope of width against rate goes on from (0, 0) through
#: (1.1^-3, 1/4) and (1.1^-2, 1/3) straight to (4 / 1.05^3, 4), so that a trial with area on its last edge takes
#: T/3 + SLOPE (h - T / 1.1^2) device-seconds, and one with h/T below 1.1^-3 takes h 1.1^3 / 4.
SLOPE = (4 - 1 / 3) / (4 / 1.05**3 - 1 / 1.1**2)

EXAMPLES = [
    Example(
        "1: figure 3.5 of the paper",
        n=5,
        heights=[4, 4, 12, 30],
        pace=0.5,
        c=2,
        d=5,
        widths=[1 / 2, 1 / 2, 1, 3],
        fifo=30,
        static=12,  # the third trial, on one device
        # At 4 s the shared device falls idle and no trial's share has grown by a device; at 10 s the long trial
        # ends, and the last 2 s of work are spread over 5 devices.
        dynamic=10.4,
        portfolio=10,
        # Both short trials take half a device each; the others lie on the edge from (1, 1/2) to (5, 5), of slope 9/8:
        # 4 + 9/8 * 42 + 2 * T (1/2 - 9/8) = 5 T.
        lower_bound=8.2,
    ),
    Example(
        "2: no 2-approximation",
        n=4,
        heights=[100, 26, 25, 25, 25],
        pace=1.0,
        c=4,
        d=4,
        widths=[1, 1 / 4, 1 / 4, 1 / 4, 1 / 4],
        static=100,
        # Two devices fall idle at 25 s and the last at 26 s, of 75 s left three do 3: 26 + 72 / 4.
        dynamic=44,
        portfolio=33.4,
        # 101 / 4 + T / 4 + 5/4 (100 - T) = 4 T.
        lower_bound=30.05,
    ),
    Example("3: floor trap", n=8, heights=[0.1] * 8, pace=0.05, widths=[1] * 8, fifo=0.1, static=0.1, dynamic=0.1),
    Example(
        "4: four share one device",
        n=1,
        heights=[10] * 4,
        pace=0.1,
        alpha=1.1,
        widths=[1 / 4] * 4,
        fifo=40,
        static=10 * 1.1**3,
        dynamic=13.31,
        portfolio=13.31,
        lower_bound=13.31,
    ),
    Example(
        "5: a lone resident runs at full speed",
        n=1,
        heights=[10, 4],
        pace=0.1,
        c=2,
        alpha=1.25,
        widths=[1 / 2, 1 / 2],
        fifo=14,
        static=4 * 1.25 + (10 - 4),
        dynamic=11,
        portfolio=11,
    ),
    Example(
        "6: one trial, beta 1.05",
        n=8,
        heights=[100],
        pace=0.1,
        beta=1.05,
        widths=[8],
        fifo=100,
        static=100 / 8 * 1.05**7,  # 17.58876
        dynamic=100 / 8 * 1.05**7,
        portfolio=100 / 8 * 1.05**7,
        lower_bound=100 / 8 * 1.05**7,
    ),
    Example(
        "6: one trial, beta 1.3",
        n=8,
        heights=[100],
        pace=0.1,
        beta=1.3,
        widths=[4],
        static=54.925,
        dynamic=54.925,
        portfolio=100 / 4 * 1.3**3,
        lower_bound=54.925,
    ),
    Example(
        "7: at most two to a device",
        n=16,
        heights=[3] * 27,
        pace=0.5,
        alpha=1.2,
        widths=[1 / 4] * 27,
        fifo=6,
        static=3 * 1.2,
        portfolio=3.6,
    ),
    Example(
        "8: resizes cost 0.1 s",
        n=8,
        heights=[9, 8, 7, 6, 5, 4, 3, 2, 1],
        pace=0.5,
        alpha=1.1,
        beta=1.05,
        epsilon=0.1,
        widths=[1, 1, 1, 1, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 4],
        static=9,
        # The first trial widens to 2 at 3 s, when 6 s of it are left: 3 + 0.1 + 6 / 2 * 1.05.
        dynamic=6.25,
        portfolio=6.0,
        # The trials of 1, 2 and 3 s are packed, the others lie on the last edge: 4.366.
        lower_bound=(6 * 1.1**3 / 4 + 39 * SLOPE) / (8 - 6 / 3 + 6 * SLOPE / 1.1**2),
    ),
    Example(
        "9: one long trial",
        n=4,
        heights=[40, 10, 8, 6, 4, 2],
        pace=0.5,
        c=4,
        d=4,
        alpha=1.1,
        beta=1.05,
        widths=[2, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 4],
        static=40 / 2 * 1.05,
        # 2 devices until the third one falls idle at 8.4 = 4 * 1.1 + 4, three until 2.42 + 4.4 + 4 = 10.82, then 4.
        dynamic=10.82 + (40 - 8.4 * 2 / 1.05 - 2.42 * 3 / 1.05**2) / 4 * 1.05**3,
        portfolio=14.7,
        # 30 s of packed work, and 40 s on the last edge: 13.6476.
        lower_bound=(30 * 1.1**3 / 4 + 40 * SLOPE) / (4 - 1 / 3 + SLOPE / 1.1**2),
    ),
]

PLANNERS: list[type[Planner]] = [Fifo, StaticFluid, DynamicFluid, Portfolio]


def by_instance(example: Example, planner: type[Planner]) -> Plan:
    instance = Instance.build(
        example.heights,
        example.n,
        alpha=example.alpha,
        beta=example.beta,
        c=example.c,
        d=example.d,
        epsilon=example.epsilon,
        trial_ids=[f"t{row}" for row in range(len(example.heights))],
    )
    return Plan(planner.name, instance, planner(c=example.c, d=example.d).arrange(instance))


def by_group(example: Example, planner: type[Planner]) -> Plan:
    """Through the public names, with a profile that has seen every co-residency and width of two profile keys."""
    profile = Profile()
    for key, pace in (("fast", example.pace), ("slow", 2 * example.pace)):
        for _ in range(MIN_OBSERVATIONS):
            for p in range(1, example.c + 1):
                profile.observe(key, pace * example.alpha ** (p - 1), co_residents=p)
            for w in range(2, example.d + 1):
                profile.observe(key, pace / w * example.beta ** (w - 1), width=w)
    if example.epsilon:
        profile.observe_resize(example.epsilon)
    trials = []
    for row, height in enumerate(example.heights):
        iterations = round(height / example.pace)
        assert iterations * example.pace == pytest.approx(height)
        slow = iterations % 2 == 0
        budget = iterations // 2 if slow else iterations
        key = "slow" if slow else "fast"
        trials.append(Trial(print, {}, budget=budget, trial_id=f"t{row}", profile_key=key))
    return planner(c=example.c, d=example.d).plan(TrialGroup(trials), Cluster.of(example.n), profile)


routes = pytest.mark.parametrize("make", [by_instance, by_group])
examples = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.case)
Route = Callable[[Example, type[Planner]], Plan]


@routes
@examples
def test_static_widths(example: Example, make: Route) -> None:
    plan = make(example, StaticFluid)
    assert plan.planner == "static"
    expected = {f"t{row}": width for row, width in enumerate(example.widths)}
    assert plan.widths == pytest.approx(expected, rel=REL)


@routes
@pytest.mark.parametrize("planner", [Fifo, StaticFluid, DynamicFluid])
@examples
def test_makespan(example: Example, planner: type[Planner], make: Route) -> None:
    expected = getattr(example, planner.name)
    if expected is not None:
        assert make(example, planner).makespan == pytest.approx(expected, rel=REL)


@routes
@examples
def test_portfolio(example: Example, make: Route) -> None:
    makespan = make(example, Portfolio).makespan
    for bound in (example.portfolio, example.fifo, example.static, example.dynamic):
        assert bound is None or makespan <= bound * (1 + REL)


@routes
@examples
def test_lower_bound(example: Example, make: Route) -> None:
    plan = make(example, Portfolio)
    if example.lower_bound is not None:
        assert plan.lower_bound == pytest.approx(example.lower_bound, rel=REL)
    assert malleable_lower_bound(plan.instance) == plan.lower_bound
    for planner in PLANNERS:
        assert plan.lower_bound <= make(example, planner).makespan * (1 + REL)


@routes
@examples
def test_the_group_gives_the_heights(example: Example, make: Route) -> None:
    instance = make(example, Fifo).instance
    assert instance.heights.tolist() == pytest.approx(example.heights, rel=REL)
    assert instance.epsilon == pytest.approx(example.epsilon)


def test_the_formulas_come_to_these_numbers() -> None:
    bounds = {example.case: example.lower_bound for example in EXAMPLES}
    assert bounds["6: one trial, beta 1.05"] == pytest.approx(17.58876, abs=5e-6)
    assert bounds["8: resizes cost 0.1 s"] == pytest.approx(4.366, abs=5e-4)
    assert bounds["9: one long trial"] == pytest.approx(13.6476, abs=5e-5)
    assert EXAMPLES[-1].dynamic == pytest.approx(15.86, abs=5e-3)


def test_case_1_in_full() -> None:
    plan = by_instance(EXAMPLES[0], DynamicFluid)
    ended = {f"t{row}": end for row, end in plan.schedule.finished.items()}
    assert ended == pytest.approx({"t0": 4.0, "t1": 4.0, "t2": 10.4, "t3": 10.0})
    assert plan.queue == []
    held = {trial: placement.device_ids for trial, placement in plan.placements.items()}
    assert held == {"t3": (0, 1, 2), "t2": (3,), "t0": (4,), "t1": (4,)}


def test_case_2_refutes_the_papers_theorem() -> None:
    # Three devices for the long trial and the rest packed on one: what a 2-approximation would have to be within 2 of.
    optimum = 100 / 3
    assert by_instance(EXAMPLES[1], StaticFluid).makespan > 2 * optimum
    assert by_instance(EXAMPLES[1], Portfolio).makespan <= optimum * (1 + REL)


def test_case_7_fills_no_device_beyond_two() -> None:
    plan = by_instance(EXAMPLES[7], StaticFluid)
    per_device = [0] * 16
    for placement in plan.placements.values():
        per_device[placement.device_ids[0]] += 1
    assert sorted(per_device) == [1] * 5 + [2] * 11
    assert plan.queue == []


def test_case_5_shows_what_fixed_widths_bound() -> None:
    # T* takes both trials to share the device to the end: 10 * 1.25. The longer one is alone for its last 6 s.
    plan = by_instance(EXAMPLES[4], StaticFluid)
    assert fixed_width_lower_bound(plan.instance) == pytest.approx(12.5)
    assert plan.makespan == pytest.approx(11.0)
