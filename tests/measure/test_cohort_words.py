"""The conditions of cohorts in words: they are profile keys, so that they must be short, exact and unlike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.measure.cohorts.nodes import NameSets, Threshold, between, features_of, number_of, words

OPTIMIZER = NameSets("optimizer", (frozenset({"sgd"}), frozenset({"lamb", "adam"})))


def test_conditions_read_as_people_write_them() -> None:
    assert words([]) == ""
    assert words([(Threshold("batch_size", 96.0), 1)]) == "batch_size > 96"
    assert words([(Threshold("batch_size", 96.0), 0)]) == "batch_size <= 96"
    assert words([(Threshold("batch_size", 96.0), 0), (Threshold("batch_size", 16.0), 1)]) == "16 < batch_size <= 96"
    assert words([(OPTIMIZER, 0), (Threshold("model.width", 0.003), 1)]) == "optimizer = sgd, model.width > 0.003"
    assert words([(OPTIMIZER, 1)]) == "optimizer in {adam, lamb}"
    inner = NameSets("optimizer", (frozenset({"adam"}), frozenset({"lamb"})))
    assert words([(OPTIMIZER, 1), (inner, 0)]) == "optimizer = adam"
    assert words([(Threshold("x", 96.0), 1), (Threshold("x", 128.0), 1)]) == "x > 128"


def test_long_names_are_short_in_words() -> None:
    lines = "a list\n  of values " + "9" * 80
    text = words([(NameSets("layers", (frozenset({lines}), frozenset({"b"}))), 0)])
    assert len(text) < 60 and "\n" not in text and text.endswith("...")


@pytest.mark.parametrize(
    ("low", "high", "at"),
    [(64, 128, 96.0), (16, 512, 91.0), (1, 2, 1.0), (2, 3, 2.0), (-4, 4, 0.0), (0, 10, 5.0), (1e-5, 1e-1, 0.001)],
)
def test_a_threshold_is_a_round_number_near_the_middle(low: float, high: float, at: float) -> None:
    assert between(low, high) == at


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_a_threshold_tells_the_two_values_apart(one: float, other: float) -> None:
    low, high = sorted((one, other))
    if low < high:
        assert low <= between(low, high) < high


@given(st.integers(-(10**7), 10**7), st.integers(1, 10**5))
def test_a_threshold_between_integers_is_an_integer(low: int, gap: int) -> None:
    at = between(float(low), float(low + gap))
    assert at == int(at) and low <= at < low + gap


def test_numbers_and_names_are_told_apart() -> None:
    assert [number_of(text) for text in ("8", "1e-4", "-2.5", "True", "None", "inf", "nan", "[1]", "")] == [
        8.0, 1e-4, -2.5, None, None, None, None, None, None,
    ]  # fmt: skip
    configs = [
        {"size": "8", "flag": "True", "drop": "None", "only": "x", "same": "1", "name": "a"},
        {"size": "16", "flag": "False", "drop": "0.5", "same": "1", "name": "3"},
        {"size": "32", "flag": "False", "drop": "0.1", "same": "1", "name": "b"},
    ]
    found = {feature.name: feature for feature in features_of(configs)}
    assert set(found) == {"size", "flag", "drop", "name"}  # the others do not vary
    assert found["size"].names == () and list(found["size"].numbers) == [8.0, 16.0, 32.0]
    assert found["flag"].names == ("False", "True") and list(found["flag"].numbers) == [1.0, 0.0, 0.0]
    assert found["drop"].names == () and str(found["drop"].numbers[0]) == "nan"
    assert found["name"].names == ("3", "a", "b")


def test_a_config_without_the_value_is_on_no_side() -> None:
    threshold = Threshold("size", 8.0)
    assert [threshold.side(values) for values in ({"size": "8"}, {"size": "9.5"}, {"size": "large"}, {})] == [
        0, 1, None, None,
    ]  # fmt: skip
