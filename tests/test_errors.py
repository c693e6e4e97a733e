"""Tests of fluid.errors."""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluid
from fluid.engine.events import Failure
from fluid.errors import (
    FluidError,
    InvalidFieldError,
    MissingDependencyError,
    require_integer,
    require_number,
    require_one_of,
)

NOT_NUMBERS = ["3", None, True, False, np.bool_(True), [1], (1,), {}, ..., 1j, Decimal(1), np.array([1.0]), b"1"]


def refused(field: str, value: object, reason: str, call: Any, **options: Any) -> None:
    """Asserts that ``call`` refuses ``value`` with an error that names the field, the value and the reason."""
    with pytest.raises(InvalidFieldError) as caught:
        call(field, value, **options)
    assert caught.value.field == field
    assert caught.value.value is value
    assert str(caught.value) == f"{field}={value!r}: {caught.value.reason}"
    assert reason in caught.value.reason


# --- The errors themselves


def test_values_of_many_lines_are_shown_on_one() -> None:
    assert str(InvalidFieldError("data", np.eye(2), "is none")) == "data=array([[1., 0.], [0., 1.]]): is none"
    assert str(InvalidFieldError("name", "a\n  b", "is none")) == r"name='a\n  b': is none"


def test_an_invalid_field_is_a_value_error_and_a_fluid_error() -> None:
    error = InvalidFieldError("budget", -3, "must be at least 1")
    assert isinstance(error, FluidError)
    assert isinstance(error, ValueError)
    assert (error.field, error.value, error.reason) == ("budget", -3, "must be at least 1")
    assert str(error) == "budget=-3: must be at least 1"


def test_a_missing_dependency_is_an_import_error_and_a_fluid_error() -> None:
    assert issubclass(MissingDependencyError, FluidError)
    assert issubclass(MissingDependencyError, ImportError)


@pytest.mark.parametrize(
    "error",
    [
        FluidError("what went wrong"),
        InvalidFieldError("budget", -3, "must be at least 1"),
        InvalidFieldError("config", {"lr": [0.1]}, "must be something else"),
        MissingDependencyError("install it"),
    ],
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_cross_processes(error: FluidError, protocol: int) -> None:
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.args == error.args
        if isinstance(error, InvalidFieldError):
            assert (twin.field, twin.value, twin.reason) == (error.field, error.value, error.reason)


def test_a_subclass_crosses_processes_as_itself() -> None:
    twin = pickle.loads(pickle.dumps(_Narrower("c", 0, "must be at least 1")))
    assert type(twin) is _Narrower
    assert str(twin) == "c=0: must be at least 1"


class _Narrower(InvalidFieldError):
    pass


# --- Numbers


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
@pytest.mark.parametrize("require", [require_number, require_integer])
def test_what_is_no_number_is_refused(require: Any, value: object) -> None:
    refused("epsilon", value, "must be a number", require, at_least=0)


@pytest.mark.parametrize("value", [math.nan, np.float64("nan"), np.float32("nan")])
@pytest.mark.parametrize("require", [require_number, require_integer])
def test_nan_is_refused(require: Any, value: float) -> None:
    refused("epsilon", value, "NaN", require, at_least=0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, np.float32("inf")])
@pytest.mark.parametrize("require", [require_number, require_integer])
def test_infinity_is_refused(require: Any, value: float) -> None:
    refused("epsilon", value, "must be finite", require, at_least=0)


def test_infinity_passes_where_it_means_no_bound() -> None:
    assert require_number("timeout", math.inf, at_least=0.0, finite=False) == math.inf
    refused("timeout", -math.inf, "at least 0", require_number, at_least=0.0, finite=False)
    refused("timeout", math.nan, "NaN", require_number, at_least=0.0, finite=False)


@pytest.mark.parametrize("value", [-1, -0.001, 0.999, np.int64(0), Fraction(1, 2)])
@pytest.mark.parametrize("require", [require_number, require_integer])
def test_what_is_too_small_is_refused(require: Any, value: Any) -> None:
    refused("c", value, "must be at least 1", require, at_least=1)


@pytest.mark.parametrize("value", [9, 8.5 + 0.5, np.int64(10**12), 10**300])
def test_what_is_too_large_is_refused(value: Any) -> None:
    refused("devices", value, "must be at most 8", require_integer, at_least=1, at_most=8)
    assert require_integer("devices", 8, at_least=1, at_most=8) == 8


@pytest.mark.parametrize("value", [10**400, -(10**400), Fraction(10**400)])
@pytest.mark.parametrize("require", [require_number, require_integer])
def test_what_no_float_can_hold_is_refused(require: Any, value: Any) -> None:
    refused("budget", value, "too large", require, at_least=1)


@pytest.mark.parametrize("value", [2.5, 1.0000001, np.float32(1.5), Fraction(7, 2)])
def test_what_is_not_whole_is_no_integer(value: Any) -> None:
    refused("budget", value, "must be a whole number", require_integer, at_least=1)


@pytest.mark.parametrize(
    "value",
    [3, 3.0, Fraction(3), *(kind(3) for kind in (np.int8, np.uint16, np.int64, np.float16, np.float32, np.float64))],
)
def test_numbers_of_every_kind_are_taken(value: Any) -> None:
    number, whole = require_number("c", value, at_least=1), require_integer("c", value, at_least=1)
    assert number == whole == 3
    assert type(number) is float
    assert type(whole) is int


@given(value=st.floats(allow_nan=False, allow_infinity=False), at_least=st.floats(-1e300, 1e300))
def test_a_number_is_returned_unchanged_or_refused(value: float, at_least: float) -> None:
    if value >= at_least:
        assert require_number("x", value, at_least=at_least) == value
    else:
        refused("x", value, "at least", require_number, at_least=at_least)


@given(value=st.integers(0, 10**30))
def test_an_integer_is_returned_exactly(value: int) -> None:
    assert require_integer("seed", value, at_least=0) == value


def test_a_number_too_long_to_print_is_refused_by_name() -> None:
    # Python refuses to print an int of more than 4,300 digits.
    with pytest.raises(InvalidFieldError, match="budget"):
        require_integer("budget", 10**5000, at_least=1)


# --- Words


@pytest.mark.parametrize("value", ["GPU", "", "gp", None, 1, ["gpu"]], ids=repr)
def test_what_is_not_one_of_the_words_is_refused(value: object) -> None:
    refused("kind", value, "must be one of cpu, gpu", require_one_of, allowed=("gpu", "cpu"))


def test_one_of_the_words_is_returned() -> None:
    assert require_one_of("kind", "gpu", {"gpu": 1, "cpu": 2}) == "gpu"


# --- Errors that cross a process

FAILURE = Failure("error", "ValueError: too low", "Traceback", pickle.dumps(ValueError("too low")))
#: One of each public error, with all that it can hold.
PUBLIC: dict[str, BaseException] = {
    "CallFailedError": fluid.CallFailedError("a", "method", FAILURE),
    "FluidError": FluidError("text", 3),
    "Infeasible": fluid.Infeasible("too wide"),
    "InvalidFieldError": InvalidFieldError("budget", -1, "must be at least 1"),
    "LimitReachedError": fluid.LimitReachedError("the deadline has come", "runs/1", unfinished=5, unsaved=["a"]),
    "MissingDependencyError": MissingDependencyError("pip install x"),
    "SweepFailedError": fluid.SweepFailedError("all failed", {"the": "result"}),
    "SweepInterrupted": fluid.SweepInterrupted(130, {"the": "result"}, ["a", "b"]),
    "TrialFailedError": fluid.TrialFailedError("a", FAILURE),
}


def test_each_public_error_is_here() -> None:
    public = (getattr(fluid, name) for name in fluid.__all__)
    errors = {each.__name__ for each in public if isinstance(each, type) and issubclass(each, BaseException)}
    assert errors == PUBLIC.keys()


def _raise(error: BaseException) -> None:
    raise error


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as made:
        yield made


@pytest.mark.parametrize("name", PUBLIC)
def test_errors_survive_pickle_copy_and_a_pool(name: str, pool: ProcessPoolExecutor) -> None:
    error = PUBLIC[name]
    crossed = pool.submit(_raise, error).exception() if isinstance(error, Exception) else None
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error), crossed or error):
        assert type(other) is type(error)
        assert str(other) == str(error) and other.args == error.args
        shown, expected = (
            {key: value for key, value in vars(each).items() if not key.startswith("__")} for each in (other, error)
        )
        assert shown == expected


def test_an_error_about_what_cannot_be_pickled_crosses_a_process() -> None:
    error = InvalidFieldError("trainable", lambda: 0, "cannot be pickled")
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == str(error) and repr(other.value) == repr(error.value)
