"""Metrics as they travel: what JSON holds of them, their numbers, and that they come back as they were."""

from __future__ import annotations

import json
import math
import pickle
import sys
import threading
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest

from fluid.keeping import number_of, value_of
from fluid.results.records import Result
from fluid.trainables.encoded_metrics import EncodedMetrics, IterationRun, encode_metrics, numbers_in


class Hostile:
    """Raises whatever is asked of it."""

    ndim = 0

    def item(self) -> Any:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise SystemExit("no")


class Unreadable:
    """Cannot be read again."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


class Half:
    """A number of the user's own."""

    def __float__(self) -> float:
        return 0.5

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Half)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CYCLE: dict[str, Any] = {"a": 1}
CYCLE["self"] = CYCLE


def test_what_json_gives_back_is_not_pickled() -> None:
    plain = {"i": 1, "f": -0.0, "s": "\ud800", "n": None, "b": True, "l": [1, {"a": []}], "big": 10**400}
    encoded = encode_metrics(plain)
    assert encoded.payload is None and encoded.decode() == plain and json.loads(encoded.text) == plain
    assert math.copysign(1.0, encoded.decode()["f"]) == -1.0
    assert math.isnan(encode_metrics({"x": math.nan}).decode()["x"])


@pytest.mark.parametrize(
    "value",
    [
        *((1, 2), {1, 2}, b"x", 1 + 2j, {1: 2}, [(1,)], {"a": (1, [2])}, OrderedDict(a=1)),
        *(Decimal("0.1"), Fraction(1, 3), Half(), [numpy.float32(0.5)], {"n": numpy.int64(3)}),
    ],
)
def test_what_json_cannot_give_back_comes_back_with_its_type(value: Any) -> None:
    encoded = encode_metrics({"x": value, "y": 1})
    found = encoded.decode()
    assert found == {"x": value, "y": 1} and type(found["x"]) is type(value)
    assert encoded.decode()["x"] is not encoded.decode()["x"] or isinstance(value, (int, str, bytes))
    assert (
        [type(inner) for inner in found["x"]] == [type(inner) for inner in value] if isinstance(value, list) else True
    )


def test_scalars_of_other_libraries_become_plain_numbers() -> None:
    encoded = encode_metrics({"scalar": numpy.int64(3), "zero": numpy.array(0.5), "bool": numpy.bool_(True)})
    assert encoded == EncodedMetrics('{"scalar": 3, "zero": 0.5, "bool": true}', {"scalar": 3.0, "zero": 0.5})


def test_what_is_reported_is_what_it_was_then() -> None:
    curve, array = [1], numpy.arange(2)
    encoded = encode_metrics({"curve": curve, "array": array})
    curve.append(2)
    array[0] = 7
    assert encoded.decode()["curve"] == [1] and list(encoded.decode()["array"]) == [0, 1]
    assert encoded.plain() == {"curve": [1], "array": "array([0, 1])"}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((1, 1.0), (0.5, 0.5), (math.inf, math.inf), (2**60, 2.0**60), (numpy.float32(0.5), 0.5), (Half(), 0.5)),
        *((Decimal("0.5"), 0.5), (Fraction(1, 2), 0.5), (numpy.array([0.5]), 0.5), (numpy.array([[2]]), 2.0)),
        *((True, None), (numpy.bool_(True), None), ("1", None), (None, None), ([1.0], None), (b"1", None)),
        (bytearray(b"1"), None),
        *((numpy.arange(2), None), (1j, None), (Hostile(), None)),
    ],
)
def test_all_read_the_same_number(value: Any, number: float | None) -> None:
    """Of the value itself, of its JSON form, and of what the lane tells."""
    encoded = encode_metrics({"x": value, "in": {"x": value}})
    assert number_of(value) == number == number_of(encoded.plain()["x"])
    assert encoded.numbers.get("x") == encoded.numbers.get("in/x") == number


@pytest.mark.parametrize(
    "metrics",
    [
        {"accuracy": {0: 0.5, 1: 0.25}, 3: 0.75, ("a", 1): 2},
        {"x": 2**5000, "y": 10**400, "in": {"z": Decimal("0.5"), "array": numpy.array([1.5])}},
        {"x": OrderedDict(y=1), "x/y": True, "z": {"x": 1}, "t": (1, 2)},
    ],
)
def test_a_result_has_the_same_numbers_before_and_after_its_metrics_are_read(metrics: dict[Any, Any]) -> None:
    encoded = encode_metrics(metrics)
    result = Result(trial_id="a", iteration=1, metrics=encoded, seconds=1.0, width=1.0, device_ids=(0,), config={})
    names = [*encoded.numbers, "accuracy", "accuracy/2", "x", "x/y", "t"]
    before = [result.number(name) for name in names]
    assert result.metrics == metrics
    assert str([result.number(name) for name in names]) == str(before)  # As text, as NaN equals nothing.


def test_a_number_that_no_float_holds_is_not_a_number() -> None:
    assert math.isnan(encode_metrics({"x": 10**400}).numbers["x"]) and math.isnan(number_of(10**400) or 0.0)


@pytest.mark.parametrize(
    "metrics",
    [
        {"a": {"b": {"c": 1, "d": "x"}}, "a/b": {"e": 2}, "f/g": 3},
        {"a/b": "text", "a": {"b": 1}},
        {"a/b": None, "a": {"b": 1}},
        {"a": {"b": None, "c": 2}, "x": [1]},
        {"b": 1, "a": {"a": {"a": 3}}},
    ],
)
def test_names_of_nested_numbers(metrics: dict[str, Any]) -> None:
    numbers = numbers_in(metrics)
    names = {"a", "b", "a/b", "a/b/c", "a/b/d", "a/b/e", "f", "f/g", "a/c", "x", "a/a/a", *numbers}
    assert numbers == {name: found for name in names if (found := number_of(value_of(metrics, name))) is not None}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({(0, 1): 5, None: True}, {"(0, 1)": 5, "None": True}),
        ([numpy.float32(0.5), numpy.array([2]), float("inf")], [0.5, 2, float("inf")]),
        (numpy.str_("x"), "x"),
        (Hostile(), "<Hostile>"),
        ({"a": [Hostile()]}, {"a": ["<Hostile>"]}),
        (10**400, 10**400),
        pytest.param(10**5000, "<int>", id="too long to print"),
        (b"\xff", "b'\\xff'"),
        ((1, (2,)), [1, [2]]),
    ],
)
def test_any_metric_has_a_form_in_json(value: Any, written: Any) -> None:
    assert encode_metrics({"x": value}).plain() == {"x": written}
    named = encode_metrics({"y": 1, (1, "x"): value})
    assert named.plain() == {"y": 1, "(1, 'x')": written} and list(named.decode()) == ["y", (1, "x")]


@pytest.mark.parametrize("value", [Unreadable(), CYCLE, nested(100), {numpy.int64(3): 0.9}])
def test_whatever_a_metric_is_the_driver_can_write_it(value: Any) -> None:
    encoded = encode_metrics({"plain": 1, "x": value})
    assert encoded.plain().keys() == {"plain", "x"}
    assert encoded.decode()["plain"] == 1


def test_what_cannot_be_unpickled_is_given_as_json_has_it(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"plain": 1, "x": Unreadable()}
    found = encode_metrics(metrics).decode()
    assert found["plain"] == 1 and "Unreadable" in found["x"] and "cannot be unpickled" in caplog.text


def test_what_cannot_be_encoded_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="cannot be pickled: x: "):
        encode_metrics({"good": (1,), "x": nested(100_000)})
    with pytest.raises(TypeError, match="cannot be pickled: bad: "):
        encode_metrics({"good": 1, "bad": threading.Lock()})


def test_the_end_of_a_run() -> None:
    metrics = tuple(encode_metrics({"n": n}) for n in range(3))
    run = IterationRun((1.0, 2.0, 3.0), (0.5, 1.0, 1.0), metrics)
    assert run.last(3) is run
    assert run.last(1) == IterationRun((3.0,), (1.0,), metrics[2:])
    assert pickle.loads(pickle.dumps(run)) == run
