"""Rates of fused packs: as measured, log-linear between measurements, in proportion to the rows beyond them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.measure.runtime_model import FusedRates

RATES = FusedRates((1, 2, 4, 16), (1.0, 1.1, 1.4, 5.6))


def test_measured_rows_have_the_measured_value() -> None:
    assert [RATES.stretch(rows) for rows in (1, 2, 4, 16)] == [1.0, 1.1, 1.4, 5.6]


def test_between_measurements_log_t_is_linear_in_log_rows() -> None:
    # 8 is the middle of 4 and 16 on a logarithmic scale, so T(8) is the geometric mean.
    assert RATES.stretch(8) == pytest.approx((1.4 * 5.6) ** 0.5)
    power = FusedRates((1, 3, 64), (1.0, 3**0.6, 64**0.6))
    assert [power.stretch(rows) for rows in range(1, 65)] == pytest.approx([rows**0.6 for rows in range(1, 65)])


def test_beyond_the_last_measurement_no_gain_is_assumed() -> None:
    assert RATES.stretch(32) == pytest.approx(11.2)
    assert RATES.stretch(512) / 512 == pytest.approx(RATES.stretch(16) / 16)
    assert FusedRates((1,), (1.0,)).stretch(7) == 7.0, "measured alone only"


@given(st.lists(st.floats(1.0, 2.0), min_size=1, max_size=6), st.integers(1, 200))
def test_the_stretch_lies_between_those_of_the_neighbours(factors: list[float], rows: int) -> None:
    table, stretch = {1: 1.0}, 1.0
    for step, factor in enumerate(factors, start=1):
        stretch *= factor
        table[2**step] = stretch
    rates = FusedRates.of(table)
    assert rates.stretch(rows) <= rates.stretch(rows + 1) * (1 + 1e-12)
    assert rates.stretch(rows) <= rows * (1 + 1e-12), "each doubling took at most twice as long"


def test_rows_double_while_it_pays_and_not_beyond_what_was_measured() -> None:
    rates = FusedRates.of({2: 1.1, 4: 1.3, 8: 2.4, 16: 4.8})
    assert [rates.limit(most, 0.05) for most in (1, 3, 4, 8, 64)] == [1, 2, 4, 8, 8]
    assert rates.limit(64, 0.08) == 4, "doubling 4 rows gains 1 - 2.4 / 2.6 = 7.7 %"
    assert FusedRates.of({2: 2.0}).limit(64, 0.05) == 1
    assert FusedRates.of({2: 2.2, 4: 2.4}).limit(64, 0.05) == 4, "the first two doublings together pay"


def test_equal_rates_are_equal_keys() -> None:
    same = FusedRates.of({4: 1.4, 2: 1.1, 16: 5.6})
    assert {RATES: "a"}[same] == "a"
    assert pickle.loads(pickle.dumps(RATES)) == RATES


@pytest.mark.parametrize(
    ("rows", "stretches", "field"),
    [
        ((), (), "rows"),
        ((2, 4), (1.0, 1.4), "rows"),
        ((1, 4, 2), (1.0, 1.4, 1.1), "rows"),
        ((1, 2, 2), (1.0, 1.1, 1.1), "rows"),
        ((1, 2.5), (1.0, 1.1), "rows"),
        ((1, 2), (1.0,), "stretches"),
        ((1, 2), (1.0, 0.0), "stretches"),
        ((1, 2), (1.0, float("nan")), "stretches"),
        ((1, 2), (1.1, 1.2), "stretches"),
    ],
)
def test_what_is_no_table_is_refused(rows: Any, stretches: Any, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        FusedRates(rows, stretches)
    assert caught.value.field == field


def test_there_is_no_pack_of_no_rows() -> None:
    with pytest.raises(InvalidFieldError, match="rows=0: must be at least 1"):
        RATES.stretch(0)
