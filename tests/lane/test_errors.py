"""Reading the exceptions that trials raise."""

from __future__ import annotations

import pytest

from fluid.lane.errors import causes, is_out_of_memory, one_line


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
