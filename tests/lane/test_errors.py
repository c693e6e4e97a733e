"""Describing the exceptions that trials raise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest

from fluid.errors import Infeasible
from fluid.lane import errors
from fluid.lane.errors import causes, describe, is_out_of_memory, one_line


class OutOfMemoryError(RuntimeError):
    """Stands for PyTorch's."""


def chained(error: Exception) -> Exception:
    try:
        try:
            raise error
        except Exception as inner:
            raise ValueError("wrapped") from inner
    except ValueError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (chained(MemoryError()), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


class TooWide(Infeasible):
    """One of a user's own."""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (Infeasible("too wide"), "infeasible", "too wide"),
        (Infeasible(), "infeasible", "no reason was given"),
        (TooWide("8 > 4"), "infeasible", "TooWide: 8 > 4"),
        (chained(Infeasible("of another try")), "error", "ValueError: wrapped"),
    ],
)
def test_infeasible(error: Exception, kind: str, message: str) -> None:
    described = describe(error)
    assert (described.kind, described.message) == (kind, message)


def test_what_it_was_raised_from_does_not_count() -> None:
    error = Infeasible("too wide for memory")
    error.__cause__ = MemoryError()
    assert describe(error).kind == "infeasible"


def test_causes_of_a_circle_end() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__context__, second.__context__ = second, first
    assert causes(first) == [first, second]


def test_one_line() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert one_line(KeyError()) == "KeyError"
    assert "cannot be shown" in one_line(Mute())
    assert len(one_line(ValueError("x" * 10_000))) == 500


class Ends(RuntimeError):
    """Its message cannot be made."""

    def __str__(self) -> str:
        raise SystemExit


def test_a_message_that_cannot_be_made_is_no_error() -> None:
    assert "cannot be shown" in one_line(Ends())
    assert not is_out_of_memory(Ends())
    assert describe(Ends()).kind == "error"


@dataclass(frozen=True)
class FrozenError(Exception):
    """None of its attributes can be set."""

    code: int


def test_an_exception_may_be_frozen() -> None:
    try:
        raise FrozenError(3)
    except FrozenError as error:
        raised = describe(error)
    assert (raised.kind, raised.message) == ("error", "FrozenError: 3")
    assert "test_an_exception_may_be_frozen" in raised.traceback


def test_the_lanes_own_frames_are_left_out_of_a_traceback() -> None:
    own = compile("def call(function): function()", f"{os.path.dirname(errors.__file__)}/own.py", "exec")
    names: dict[str, Any] = {}
    exec(own, names)

    def fail() -> None:
        raise ValueError("wrong")

    for failing, shown in ((fail, False), (None, True)):
        try:
            names["call"](failing)
        except Exception as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            text = describe(error).traceback
            assert ("own.py" in text) is shown
            assert ("in fail" in text) is not shown
