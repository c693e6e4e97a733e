"""Words for names, counts and widths; those for numbers are tested in ``tests/display/test_format.py``."""

from __future__ import annotations

import pytest

from fluid.display.format import clock_time, count, printable, shortened, width_name, widths_name


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0:00"),
        (59.6, "1:00"),
        (750.0, "12:30"),
        (3723.0, "1:02:03"),
        (2 * 86400.0 + 11045.0, "2 d 03:04:05"),
        (-1.0, "0:00"),
        (float("inf"), "never"),
    ],
)
def test_clock_time(seconds: float, said: str) -> None:
    assert clock_time(seconds) == said


def test_shortened_keeps_both_ends() -> None:
    assert shortened("trial-1", 7) == "trial-1"
    assert shortened("resnet-trial-00017", 12) == "resnet…00017"
    assert shortened("resnet-trial-00017", 12, "~") == "resnet~00017"
    assert shortened("resnet-trial-00017", 4) == "0017"
    assert shortened("resnet", 0) == ""


def test_printable_has_one_line_and_no_commands() -> None:
    assert printable("größe 日本") == "größe 日本"
    assert printable("a\nb\x1b[2J\u2028") == "a?b?[2J?"


def test_counts() -> None:
    assert (count(0, "trial"), count(1, "trial"), count(4000, "trial")) == ("0 trials", "1 trial", "4,000 trials")


def test_widths() -> None:
    assert [width_name(width) for width in (0.25, 1.0, 3.0)] == ["1/4", "1", "x3"]
    assert widths_name([]) == ""
    assert widths_name([0.5, 1.0, 2.0]) == "1/2, 1, x2"
    assert widths_name([1.0, 0.5, 4.0, 2.0]) == "1/2 to x4"
