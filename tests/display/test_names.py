from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.display.names import config_text, metric_text, shortened_apart

PREFIX = "2026-11-22_convnext_base_imagenet_"
CUT = [
    (["short", "other"], ["short", "other"]),
    (["one very long name, the first of two", "another"], ["one very lo…irst of two", "another"]),
    (
        ["group number 0 with a long name", "group number 1 with a long name"],
        ["group number 0 with a …", "group number 1 with a …"],
    ),
    (
        ["a group with a long name, number 0", "a group with a long name, number 1"],
        ["a group wit…e, number 0", "a group wit…e, number 1"],
    ),
    (
        [f"{PREFIX}seed_{k}_of_the_second_attempt_after_the_fix" for k in range(2)],
        ["…seed_0_of_the_second_…", "…seed_1_of_the_second_…"],
    ),
]


@pytest.mark.parametrize(("names", "shown"), CUT)
def test_names_are_shortened_so_that_they_differ(names: list[str], shown: list[str]) -> None:
    assert [len(name) <= 23 for name in shown] == [True] * len(shown)
    found = shortened_apart(names, 23)
    assert len(set(found)) == len(names)
    assert found == shown


@given(st.lists(st.text(max_size=60), max_size=6), st.integers(0, 40))
def test_shortened_names_fit(names: list[str], most: int) -> None:
    found = shortened_apart(names, most)
    assert len(found) == len(names)
    assert all(len(name) <= most and name.isprintable() for name in found)


def test_a_config_is_cut_between_hyperparameters() -> None:
    config = {"lr": 1e-4, "optimizer": {"name": "adamw", "betas": [0.9, 0.999]}, "on": True, "f": len, "n": 3}
    assert config_text(config, 200) == (
        "lr=0.0001, optimizer/name=adamw, optimizer/betas=[0.9, 0.999], on=True, f=len, n=3"
    )
    assert config_text(config, 36) == "lr=0.0001, optimizer/name=adamw, +4"
    assert config_text(config, 5) == ""
    assert config_text({}, 80) == ""


def test_values_cannot_move_the_cursor() -> None:
    assert config_text({"a\x1b[2J": "b\nc"}, 80) == "a?[2J=b?c"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "0.1235"), (12345.678, "12,346"), (1e-7, "1e-07"), (3.0, "3"), (1e300, "1e+300"), (-0.5, "-0.5")],
)
def test_metrics_have_four_digits(value: float, text: str) -> None:
    assert metric_text(value) == text


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), -(10**12), 1e308])
def test_any_number_can_be_shown(value: float) -> None:
    assert config_text({"x": value}, 80).startswith("x=")
