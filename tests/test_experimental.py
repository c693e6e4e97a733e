"""Tests of fluid._experimental."""

from __future__ import annotations

import dataclasses
import pickle
import warnings

import pytest

from fluid._experimental import ExperimentalWarning, experimental


@experimental("0.2")
@dataclasses.dataclass(frozen=True)
class Point:
    x: int


def test_a_function_warns_on_its_first_call_only() -> None:
    @experimental("0.2")
    def double(x: int) -> int:
        return 2 * x

    with pytest.warns(ExperimentalWarning, match=r"double is experimental since 0\.2"):
        assert double(2) == 4
    assert double(3) == 6  # Warnings are errors here, so a second one would fail the test.


def test_the_warning_points_at_the_caller() -> None:
    @experimental("0.2")
    def f() -> None: ...

    with pytest.warns(ExperimentalWarning) as caught:
        f()
    assert caught[0].filename == __file__


def test_two_functions_warn_separately() -> None:
    def f() -> None: ...

    for _ in range(2):
        with pytest.warns(ExperimentalWarning):
            experimental("0.2")(f)()


def test_where_warnings_are_errors_every_call_fails() -> None:
    @experimental("0.2")
    def f() -> None: ...

    for _ in range(2):
        with pytest.raises(ExperimentalWarning):
            f()


def test_a_class_warns_on_its_first_instance_only() -> None:
    @experimental("0.3")
    class Thing:
        def __init__(self, x: int) -> None:
            self.x = x

    with pytest.warns(ExperimentalWarning, match=r"Thing is experimental since 0\.3"):
        assert Thing(1).x == 1
    assert Thing(x=2).x == 2


def test_a_class_stays_a_class() -> None:
    assert isinstance(Point, type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        point = Point(1)
    assert isinstance(point, Point)
    assert pickle.loads(pickle.dumps(point)) == point
    assert dataclasses.replace(point, x=2).x == 2


def test_a_class_without_init() -> None:
    @experimental("0.2")
    class Empty: ...

    with pytest.warns(ExperimentalWarning):
        assert isinstance(Empty(), Empty)


def test_defining_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @experimental("0.2")
        def f() -> None: ...


def test_the_docstring_says_so() -> None:
    @experimental("0.2")
    def documented() -> None:
        """Does a thing.

        Indented text.
        """

    @experimental("0.2")
    def bare() -> None: ...

    assert documented.__name__ == "documented"
    note = "Note:\n    Experimental since 0.2: it may change in any release."
    assert documented.__doc__ == f"Does a thing.\n\nIndented text.\n\n{note}"
    assert bare.__doc__ == note
    assert Point.__doc__ is not None
    assert "Experimental since 0.2" in Point.__doc__
