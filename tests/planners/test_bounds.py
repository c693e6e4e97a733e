"""The lower bounds against slow computations of the same numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from brute_force import rate
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import CLOSE, UNEQUAL, Case, cases, fixed_width_lower_bound, heights, overheads

import fluid.planners.bounds
from fluid.planners.bounds import distinct_kinds, envelope, malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.resources import Cluster, Device

Point = tuple[float, float]


def points(alpha: float, beta: float, c: int, d: int) -> list[Point]:
    """(rate, width) of every width, and of waiting."""
    packed = [(rate(alpha, beta, 1, p), 1.0 / p) for p in range(1, c + 1)]
    return [(0.0, 0.0), *packed, *((rate(alpha, beta, w, 1), float(w)) for w in range(2, d + 1))]


def least_width(options: Sequence[Point], at_rate: float) -> float:
    """Devices held on average, at least, by a trial of that average rate: the best mix of two options."""
    best = min((width for speed, width in options if speed >= at_rate), default=math.inf)
    for (slow, a), (fast, b) in itertools.permutations(options, 2):
        if slow <= at_rate <= fast and slow < fast:
            best = min(best, a + (b - a) * (at_rate - slow) / (fast - slow))
    return best


def plain_lower_bound(heights: Sequence[float], options: Sequence[Sequence[Point]], capacity: float) -> float:
    """The least T at which the least widths sum to at most ``capacity``, found by halving."""

    def fits(within: float) -> bool:
        return sum(least_width(o, h / within) for h, o in zip(heights, options, strict=True)) <= capacity

    low, high = 0.0, sum(heights)
    while not fits(high):
        high *= 2.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def plain_lower_bound_of(instance: Instance, heights: Sequence[float] | None = None, capacity: float = 0.0) -> float:
    model = instance.model
    columns = zip(*(column.tolist() for column in (model.alpha, model.beta, model.c, model.d)), strict=True)
    options = [points(a, b, c, d) for a, b, c, d in columns]
    return plain_lower_bound(heights or instance.heights.tolist(), options, capacity or instance.n)


# --- The envelope


hundredths = st.integers(100, 250).map(lambda percent: percent / 100)


@given(alpha=hundredths, beta=hundredths, c=st.integers(1, 8), d=st.integers(1, 12))
def test_envelope_is_the_lower_convex_hull(alpha: float, beta: float, c: int, d: int) -> None:
    rates, widths = envelope(alpha, beta, c, d)
    options = points(alpha, beta, c, d)
    assert (rates[0], widths[0]) == (0.0, 0.0)
    corners = set(zip(rates.tolist(), widths.tolist(), strict=True))
    assert all(any(corner == pytest.approx(option) for option in options) for corner in corners)
    assert (np.diff(rates) > 0).all()
    slopes = np.diff(widths) / np.diff(rates)
    assert (np.diff(slopes) > -CLOSE * np.abs(slopes[1:])).all(), "convex"
    # No option lies below it, and no mix of two options either.
    for speed, width in options:
        assert width >= np.interp(speed, rates, widths) - CLOSE
    for speed in (np.arange(23) + 0.5) / 23 * max(speed for speed, _ in options):
        assert np.interp(speed, rates, widths) == pytest.approx(least_width(options, speed), rel=1e-6)


def test_envelope_by_hand() -> None:
    rates, widths = envelope(1.0, 1.0, 4, 3)  # four for the price of one, then the widest
    assert rates.tolist() == [0.0, 1.0, 3.0]
    assert widths.tolist() == [0.0, 0.25, 3.0]
    rates, widths = envelope(1.0, 1.0, 1, 1)
    assert (rates.tolist(), widths.tolist()) == ([0.0, 1.0], [0.0, 1.0])
    # alpha = 1.5: two share at rate 2/3, four at 1/1.5^3 = 0.296 and a quarter of a device is no bargain any more.
    rates, widths = envelope(1.5, 2.0, 4, 1)
    assert rates.tolist() == pytest.approx([0.0, 1 / 1.5, 1.0])
    assert widths.tolist() == [0.0, 0.5, 1.0]


# --- mLB


@given(case=cases(most_trials=6))
def test_malleable_lower_bound_is_its_definition(case: Case) -> None:
    instance = case.instance
    assert malleable_lower_bound(instance) == pytest.approx(plain_lower_bound_of(instance), rel=1e-9)


@given(case=cases(most_trials=5))
def test_malleable_lower_bound_parts_the_times_that_fit_from_those_that_do_not(case: Case) -> None:
    instance = case.instance
    bound, model = malleable_lower_bound(instance), instance.model
    for share in np.linspace(0.5, 1.5, 41):
        within = bound * share * (1 + 1e-7)
        area = sum(
            within * least_width(points(*columns), h / within)
            for h, *columns in zip(
                instance.heights.tolist(), model.alpha, model.beta, model.c.tolist(), model.d.tolist(), strict=True
            )
        )
        assert (area <= instance.n * within) == (share >= 1.0)


@given(case=cases(most_trials=6, speeds=UNEQUAL))
def test_unequal_devices_count_by_their_speed(case: Case) -> None:
    # Anything done by devices of speeds s could be done by sum(s)/max(s) devices of the greatest speed.
    instance = case.instance
    fastest = max(case.speeds)
    shorter = [h / fastest for h in case.heights]
    expected = plain_lower_bound_of(instance, shorter, sum(case.speeds) / fastest)
    assert malleable_lower_bound(instance) == pytest.approx(expected, rel=1e-9)


@given(case=cases(), speed=st.sampled_from([0.25, 2.0, 3.0]))
def test_devices_that_are_all_faster_divide_it(case: Case, speed: float) -> None:
    faster = replace(case, speeds=tuple(speed for _ in case.speeds)).instance
    assert malleable_lower_bound(faster) == pytest.approx(malleable_lower_bound(case.instance) / speed)


def test_unequal_speeds_by_hand() -> None:
    devices = Cluster.of([Device(0, speed=3.0), Device(1, speed=1.0)])
    # One trial that cannot spread ends no sooner than on the fast device.
    assert malleable_lower_bound(Instance.build([6.0], devices, d=1)) == pytest.approx(2.0)
    # Many: 12 s of work over a speed of 4.
    assert malleable_lower_bound(Instance.build([1.0] * 12, devices, c=1, d=1)) == pytest.approx(3.0)


@given(case=cases(), longer=heights)
def test_more_work_or_fewer_devices_never_lower_a_bound(case: Case, longer: float) -> None:
    instance = case.instance
    more = Instance.build([*case.heights, longer], instance.n, d=[*case.d, 3], c=[*case.c, 2], alpha=[*case.alpha, 1.1])
    fewer = Instance.build(case.heights, instance.n, d=case.d, c=case.c, alpha=case.alpha)
    for bound in (malleable_lower_bound, fixed_width_lower_bound):
        assert bound(more) >= bound(fewer) * (1 - 2 * CLOSE)
        slower = Instance.build(np.array(case.heights) * 1.5, instance.n, d=case.d, c=case.c, alpha=case.alpha)
        assert bound(slower) >= bound(fewer) * (1 - 2 * CLOSE)
        if instance.n > 1:
            narrow = Instance.build(case.heights, instance.n - 1, d=case.d, c=case.c, alpha=case.alpha)
            assert bound(narrow) >= bound(fewer) * (1 - 2 * CLOSE)


# --- Very many kinds of trial


def many_kinds(seed: int, k: int = 160, n: int = 24, d: int = 6) -> Instance:
    random = np.random.default_rng(seed)
    return Instance.build(
        random.lognormal(1.0, 1.0, k), n, alpha=random.uniform(1, 1.6, k), beta=random.uniform(1, 1.4, k), d=d
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bound", [malleable_lower_bound, fixed_width_lower_bound])
def test_rounding_many_kinds_only_loosens_a_bound(bound: object, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(bound)
    instance = many_kinds(seed)
    assert len({*instance.model.alpha.tolist()}) > 64
    rounded = bound(instance)
    monkeypatch.setattr(fluid.planners.bounds, "_MAX_KINDS", 10**9)
    exact = bound(instance)
    assert rounded <= exact
    # Rounding raises no rate by more than this, so that a schedule at the rounded rates, stretched by it, is one at
    # the true rates.
    model = instance.model
    packing = (model.alpha / np.maximum(1.0, model.alpha - 0.01)) ** (model.c - 1)
    scaling = (model.beta / np.maximum(1.0, model.beta - 0.01)) ** (model.d - 1)
    assert exact <= rounded * max(packing.max(), scaling.max())
    assert rounded > 0.95 * exact


def test_many_kinds_kind_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = many_kinds(99, k=70, n=8, d=3)
    plain = plain_lower_bound_of(instance)
    assert 0.95 * plain < malleable_lower_bound(instance) <= plain
    monkeypatch.setattr(fluid.planners.bounds, "_MAX_KINDS", 10**9)
    assert malleable_lower_bound(instance) == pytest.approx(plain)


@pytest.mark.parametrize("rounding", [np.floor, np.ceil])
@given(k=st.integers(1, 100), overhead=st.lists(overheads, min_size=1, max_size=100))
def test_kinds_cover_every_trial_once(rounding: np.ufunc, k: int, overhead: list[float]) -> None:
    column = np.resize(np.array(overhead) + np.arange(len(overhead)) / 1000, k)
    model = Instance.build(np.ones(k), 4, alpha=column, beta=column[::-1]).model
    kinds = distinct_kinds(model, rounding)
    assert sorted(row for *_, rows in kinds for row in rows.tolist()) == list(range(k))
    assert len({kind[:5] for kind in kinds}) == len(kinds)
    grid = 0.01 if len(set(zip(model.alpha, model.beta, model.c, model.d, strict=True))) > 64 else 0.0
    for alpha, beta, c, d, fused, rows in kinds:
        assert fused is None
        assert (model.c[rows] == c).all()
        assert (model.d[rows] == d).all()
        for value, exact in ((alpha, model.alpha[rows]), (beta, model.beta[rows])):
            assert (np.abs(value - exact) <= grid + 1e-12).all()
            assert ((value - exact) * (1 if rounding is np.ceil else -1) >= -1e-12).all()
