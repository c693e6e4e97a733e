from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.display.format import (
    duration,
    durations,
    figures,
    index_ranges,
    number,
    percent,
    placement_name,
    tick_label,
    tick_step,
    times,
)
from fluid.display.palette import colour, ink, mark


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 s"),
        (0.0042, "4.2 ms"),
        (0.1, "0.1 s"),
        (9.2, "9.2 s"),
        (17.58876, "17.6 s"),
        (150.0, "150 s"),
        (300.1, "5 min"),
        (750.0, "12.5 min"),
        (5508.0, "91.8 min"),
        (36000.0, "10 h"),
        (3.6e7, "10,000 h"),
        (math.inf, "never"),
    ],
)
def test_duration(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_duration_beside_another() -> None:
    assert duration(90.0, like=600.0) == "1.5 min"


def test_a_column_has_one_unit() -> None:
    assert durations([4.0, 12.0]) == ["4 s", "12 s"]
    assert durations([4.0, 9.2]) == ["4.00 s", "9.20 s"]
    assert durations([30.0, 720.0]) == ["0.50 min", "12.00 min"]
    assert durations([0.01, 0.05]) == ["10 ms", "50 ms"]
    assert durations([]) == []
    assert figures([0.114, 2.9131]) == ["0.114", "2.913"]
    assert figures([1234.5, 0.0]) == ["1,234", "0"]


def test_numbers_and_shares() -> None:
    assert [number(value) for value in (0.0, 0.00001, 0.114, 2.0, 99.96, 1234.5)] == [
        "0",
        "1e-05",
        "0.114",
        "2",
        "100",
        "1,234",
    ]
    assert [percent(share) for share in (0.0, 0.505, 0.996, 1.0)] == ["0 %", "50 %", "99 %", "100 %"]
    assert times(3.2) == "3.20x"
    assert times(math.nan) == times(math.inf) == "-"


@pytest.mark.parametrize(
    ("width", "devices", "said"),
    [
        (0.5, (4,), "1/2 of device 4"),
        (1 / 3, (0,), "1/3 of device 0"),
        (1.0, (3,), "device 3"),
        (3.0, (2, 0, 1), "3 devices: 0,1,2"),
        (6.0, (0, 4, 5, 6, 7, 9), "6 devices: 0,4-7,9"),
    ],
)
def test_width_and_place(width: float, devices: tuple[int, ...], said: str) -> None:
    assert placement_name(width, devices) == said


def test_index_ranges_of_nothing() -> None:
    assert index_ranges(()) == ""


@given(st.floats(1e-6, 1e9), st.integers(1, 40))
def test_ticks_fit_and_are_not_too_few(span: float, most: int) -> None:
    step = tick_step(span, most)
    assert span / step <= most * (1.0 + 1e-9)
    assert span / step >= most / 6.0 or most < 6


def test_ticks_people_count_by() -> None:
    assert tick_step(9.2, 5) == 2.0
    assert tick_step(100.0, 7) == 15.0
    assert tick_step(3600.0, 7) == 600.0
    assert tick_step(86400.0, 8) == 3.0 * 3600.0
    assert tick_step(0.0, 8) == 1.0
    assert tick_label(600.0, 3600.0) == "10"


def test_marks() -> None:
    assert [mark(trial) for trial in (0, 25, 26, 51, 52, 999)] == ["a", "z", "A", "Z", "53", "1000"]


def test_colours_differ_and_are_legible() -> None:
    assert len({colour(trial) for trial in range(24)}) == 24
    assert colour(24) == colour(0)
    assert ink("#ffffff") == "#000000"
    assert ink("#000000") == "#ffffff"
