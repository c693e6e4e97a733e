from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.measure.runtime_model import (
    RuntimeModel,
    marginal_benefit,
    packing_limit,
    packing_limit_from_seconds,
    residents_at,
    stretch_of,
    width_limit,
)

overheads = st.floats(1.0, 3.0)

# --- Limits


@pytest.mark.parametrize(("alpha", "c"), [(1.0, 4), (1.1, 4), (1.2, 4), (1.3, 3), (1.6, 2), (2.0, 1), (10.0, 1)])
def test_packing_limit(alpha: float, c: int) -> None:
    assert packing_limit(alpha, c_max=4, threshold=0.05) == c


@pytest.mark.parametrize(("beta", "n", "d"), [(1.05, 16, 16), (1.1, 16, 10), (1.15, 8, 7), (1.2, 8, 5), (1.3, 8, 4)])
def test_width_limit(beta: float, n: int, d: int) -> None:
    assert width_limit(beta, n=n, d_max=16) == d


@pytest.mark.parametrize("w", range(2, 30))
def test_width_limit_is_strict_where_beta_meets_its_bound(w: int) -> None:
    # beta = w/(w-1) makes h(w) = h(w-1): w devices do not help, w-1 do.
    assert width_limit(w / (w - 1), n=100, d_max=100) == w - 1


def test_width_limit_is_bounded_by_devices_and_d_max() -> None:
    assert width_limit(1.0, n=3, d_max=8) == 3
    assert width_limit(1.0, n=8, d_max=2) == 2
    assert width_limit(5.0, n=8, d_max=8) == 1


@given(beta=st.floats(1.001, 3.0), bound=st.integers(1, 64))
def test_width_limit_is_its_definition(beta: float, bound: int) -> None:
    # Away from the rounding tolerance at the bound itself.
    assume(abs(beta / (beta - 1.0) - round(beta / (beta - 1.0))) > 1e-6)
    helpful = [w for w in range(2, bound + 1) if beta < w / (w - 1)]
    assert width_limit(beta, n=bound, d_max=bound) == max(helpful, default=1)


@given(alpha=overheads, c_max=st.integers(1, 30), threshold=st.floats(0.0, 0.6))
def test_packing_limit_agrees_with_measured_seconds(alpha: float, c_max: int, threshold: float) -> None:
    seconds = [7.0 * alpha**p for p in range(c_max)]
    c = packing_limit(alpha, c_max=c_max, threshold=threshold)
    margins = [1 - alpha * (p - 1) / p - threshold for p in range(2, c_max + 1)]
    assume(all(abs(margin) > 1e-8 for margin in margins))
    assert packing_limit_from_seconds(seconds, threshold=threshold) == c
    assert c == 1 + sum(margin > 0 for margin in margins), "O^p falls with p where alpha is constant"


@given(alpha=overheads, larger=overheads, c_max=st.integers(1, 16))
def test_a_larger_overhead_never_raises_a_limit(alpha: float, larger: float, c_max: int) -> None:
    alpha, larger = sorted((alpha, larger))
    assert packing_limit(larger, c_max=c_max) <= packing_limit(alpha, c_max=c_max) <= c_max
    assert width_limit(larger, n=c_max, d_max=c_max) <= width_limit(alpha, n=c_max, d_max=c_max) <= c_max


def test_measured_packing_is_not_the_literal_argmax() -> None:
    # O^2 = 0.475 is the largest, and still the third and the fourth trial are worth having.
    assert packing_limit_from_seconds([1.0, 1.05, 1.4, 1.42]) == 4
    # O^3 is below the threshold; that O^4 is above it again does not count.
    assert packing_limit_from_seconds([1.0, 1.0, 1.49, 1.3]) == 2
    assert packing_limit_from_seconds([1.0]) == 1
    assert packing_limit_from_seconds([]) == 1


def test_packing_limit_is_strict_at_the_threshold() -> None:
    assert marginal_benefit(2, 1.9, 1.0) == pytest.approx(0.05)
    assert packing_limit_from_seconds([1.0, 1.9], threshold=0.05) == 1
    assert packing_limit_from_seconds([1.0, 1.89], threshold=0.05) == 2


@pytest.mark.parametrize(
    ("residents", "seconds", "one_fewer", "benefit"),
    [(2, 1.0, 1.0, 0.5), (2, 2.0, 1.0, 0.0), (3, 1.2, 1.0, 0.2), (4, 8.0, 4.0, -0.5)],
)
def test_marginal_benefit(residents: int, seconds: float, one_fewer: float, benefit: float) -> None:
    assert marginal_benefit(residents, seconds, one_fewer) == pytest.approx(benefit)


# --- Heights (eq. 3.2)


@pytest.mark.parametrize(
    ("alpha", "beta", "width", "height"),
    [
        (1.0, 1.0, 1.0, 100.0),
        (1.3, 1.3, 1.0, 100.0),
        (1.0, 1.0, 0.25, 100.0),
        (1.0, 1.0, 4.0, 25.0),
        (1.1, 1.0, 1 / 2, 110.0),
        (1.1, 1.0, 1 / 4, 133.1),
        (1.2, 1.0, 1 / 3, 144.0),
        (1.0, 1.05, 8.0, 17.58876),
        (1.0, 1.3, 4.0, 54.925),
    ],
)
def test_heights(alpha: float, beta: float, width: float, height: float) -> None:
    model = RuntimeModel.build(1, n=8, alpha=alpha, beta=beta)
    assert model.heights([100.0], [width]) == pytest.approx(height, rel=1e-6)


@given(beta=st.floats(1.0, 2.5), n=st.integers(1, 32))
def test_heights_fall_strictly_up_to_d_and_never_beyond(beta: float, n: int) -> None:
    d = width_limit(beta, n=n, d_max=n)
    heights = [stretch_of(1.0, beta, float(w)) for w in range(1, n + 2)]
    assert all(wider < narrower for narrower, wider in itertools.pairwise(heights[:d]))
    if d < n:
        assert heights[d] >= heights[d - 1] * (1 - 1e-9)


@given(beta=overheads, n=st.integers(2, 32))
def test_device_seconds_never_fall_with_width(beta: float, n: int) -> None:
    work = [w * stretch_of(1.0, beta, float(w)) for w in range(1, n + 1)]
    assert all(more >= less * (1 - 1e-12) for less, more in itertools.pairwise(work))


@given(alpha=overheads, c_max=st.integers(2, 16))
def test_throughput_rises_with_co_residents_up_to_c(alpha: float, c_max: int) -> None:
    c = packing_limit(alpha, c_max=c_max)
    throughput = [p / stretch_of(alpha, 1.0, 1 / p) for p in range(1, c + 1)]
    assert all(more > less for less, more in itertools.pairwise(throughput))


@given(
    rows=st.lists(
        st.tuples(
            overheads,
            overheads,
            st.one_of(st.integers(1, 8).map(lambda p: 1 / p), st.integers(1, 8).map(float)),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_stretch_agrees_with_stretch_of(rows: list[tuple[float, float, float]]) -> None:
    alpha, beta, widths = map(list, zip(*rows, strict=True))
    stretch = RuntimeModel.build(len(rows), n=8, alpha=alpha, beta=beta).stretch(widths)
    assert stretch == pytest.approx([stretch_of(*row) for row in rows], rel=1e-12)


@pytest.mark.parametrize("p", range(1, 200))
def test_residents_at_inverts_one_over_p(p: int) -> None:
    assert residents_at(1 / p) == p


def test_a_wide_trial_is_alone_on_its_devices() -> None:
    assert [residents_at(width) for width in (1.0, 2.0, 8.0)] == [1, 1, 1]


# --- Build and take


def test_build_spreads_numbers_and_lowers_limits() -> None:
    model = RuntimeModel.build(4, n=6, alpha=[1.0, 1.3, 1.6, 2.0], beta=[1.0, 1.05, 1.2, 1.3], c=4, d=[8, 2, 8, 8])
    assert len(model) == 4
    assert model.c.tolist() == [4, 3, 2, 1]
    assert model.d.tolist() == [6, 2, 5, 4]
    assert RuntimeModel.build(3, n=6).alpha.tolist() == [1.0, 1.0, 1.0]


@given(
    columns=st.lists(st.tuples(overheads, overheads, st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=6),
    n=st.integers(1, 12),
)
def test_build_keeps_the_overheads_in_their_intervals(columns: list[tuple[float, float, int, int]], n: int) -> None:
    alpha, beta, c, d = map(list, zip(*columns, strict=True))
    model = RuntimeModel.build(len(columns), n=n, alpha=alpha, beta=beta, c=c, d=d)
    assert np.all(model.alpha * (model.c - 1) < model.c)
    assert np.all(model.beta * (model.d - 1) < model.d)
    assert np.all((model.c >= 1) & (model.c <= c))
    assert np.all((model.d >= 1) & (model.d <= np.minimum(d, n)))


def test_build_of_no_trials() -> None:
    assert len(RuntimeModel.build(0, n=2)) == 0


def test_build_does_not_share_the_callers_array() -> None:
    alpha = np.array([1.0, 1.1])
    model = RuntimeModel.build(2, n=2, alpha=alpha)
    alpha[0] = 9.0
    assert model.alpha[0] == 1.0


@pytest.mark.parametrize("field", ["alpha", "beta", "c", "d"])
@pytest.mark.parametrize("value", [0.5, 0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("one_of_many", [False, True])
def test_build_refuses(field: str, value: float, one_of_many: bool) -> None:
    arguments: dict[str, Any] = {field: [1.0, value, 1.0] if one_of_many else value}
    with pytest.raises(InvalidFieldError) as caught:
        RuntimeModel.build(3, n=4, **arguments)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}={value!r}: ")


@pytest.mark.parametrize("field", ["c", "d"])
def test_build_refuses_limits_that_are_not_whole(field: str) -> None:
    limits: dict[str, Any] = {field: [2.5]}
    with pytest.raises(InvalidFieldError, match=rf"{field}=2\.5: must be a whole number"):
        RuntimeModel.build(1, n=4, **limits)


def test_build_refuses_no_devices() -> None:
    with pytest.raises(InvalidFieldError, match="devices=0: must be at least 1"):
        RuntimeModel.build(1, n=0)


@pytest.mark.parametrize("value", [0.99, math.nan, math.inf, "1.1"])
def test_limits_refuse_bad_overheads(value: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"^alpha="):
        packing_limit(value, c_max=4)
    with pytest.raises(InvalidFieldError, match=r"^beta="):
        width_limit(value, n=4, d_max=4)


def test_marginal_benefit_refuses_a_lone_trial() -> None:
    with pytest.raises(InvalidFieldError, match="residents=1: must be at least 2"):
        marginal_benefit(1, 1.0, 1.0)


def test_take() -> None:
    model = RuntimeModel.build(3, n=8, alpha=[1.0, 1.1, 1.2], beta=[1.0, 1.05, 1.3], c=[4, 3, 2], d=[1, 2, 3])
    part = model.take([2, 0])
    assert len(part) == 2
    assert part.alpha.tolist() == [1.2, 1.0]
    assert part.beta.tolist() == [1.3, 1.0]
    assert part.c.tolist() == [2, 4]
    assert part.d.tolist() == [3, 1]
    assert len(model.take([])) == 0
