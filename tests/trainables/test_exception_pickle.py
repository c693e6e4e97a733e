"""Exceptions that cross processes."""

from __future__ import annotations

import builtins
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from fluid.trainables.exception_pickle import dump_exception, load_any_exception, load_exception, with_lane_cause

needs_groups = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no groups of exceptions")
ExceptionGroup: Any = getattr(builtins, "ExceptionGroup", None)


class TwoArguments(Exception):
    """Its message is not its argument."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code, self.where = code, where


class Defaulted(Exception):
    """Pickle makes it, with another message."""

    def __init__(self, code: object = 0) -> None:
        super().__init__(f"code {code}")


class WithLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()
        self.retries = 3


class Large(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, bytes(2_000_000))


class Slotted(OSError):
    __slots__ = ("host",)

    def __init__(self, host: str) -> None:
        super().__init__(5, "lost", "file.txt")
        self.host = host


class Strange(ValueError):
    """Refuses all that pickle and Python may ask of it."""

    def __reduce__(self) -> Any:
        raise SystemExit(3)

    def __str__(self) -> str:
        raise SystemExit(4)


def _crossed(error: BaseException) -> Any:
    data = dump_exception(error)
    assert len(data) < 1 << 21
    return load_exception(data)


def _raised(error: BaseException, *, source: BaseException | None = None) -> BaseException:
    try:
        raise error from source
    except BaseException as raised:
        return raised


def test_a_class_that_pickle_cannot_make_again_arrives_with_its_attributes() -> None:
    error = _crossed(_raised(TwoArguments(3, "loader")))
    assert type(error) is TwoArguments
    assert (str(error), error.args, error.code, error.where) == ("code 3 at loader", ("code 3 at loader",), 3, "loader")
    assert str(_crossed(Defaulted(5))) == "code 5"


def test_what_cannot_be_pickled_arrives_as_its_text() -> None:
    error = _crossed(WithLock("lost"))
    assert type(error) is WithLock and error.args == ("lost",) and error.retries == 3
    assert "lock object at" in repr(error.lock)
    large = _crossed(Large("lost"))
    assert type(large) is Large and large.args[0] == "lost" and repr(large.args[1]).endswith("...")
    assert str(_crossed(ValueError("x" * 2_000_000))).startswith("xxx")
    assert type(_crossed(Strange("why"))) is Strange


def test_slots_and_attributes_of_built_in_classes_arrive() -> None:
    error = _crossed(Slotted("node1"))
    assert type(error) is Slotted
    assert (error.errno, error.strerror, error.filename, error.host) == (5, "lost", "file.txt", "node1")
    decoding = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")
    assert str(_crossed(decoding)) == str(decoding)
    assert _crossed(SystemExit(3)).code == 3
    assert type(_crossed(RecursionError("too deep"))) is RecursionError


def test_causes_contexts_and_notes_arrive() -> None:
    source = _raised(WithLock("first"), source=KeyError("k"))
    error = _raised(TwoArguments(1, "x"), source=source)
    error.__notes__ = ["at step 3"]  # type: ignore[attr-defined]
    crossed = _crossed(error)
    assert crossed.__notes__ == ["at step 3"] and crossed.__suppress_context__
    assert type(crossed.__cause__) is WithLock and crossed.__cause__.args == ("first",)
    assert repr(crossed.__cause__.__cause__) == "KeyError('k')"
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise TwoArguments(2, "y")  # noqa: B904
    except TwoArguments as implicit:
        crossed = _crossed(implicit)
    assert crossed.__cause__ is None and repr(crossed.__context__) == "KeyError('inner')"
    assert not crossed.__suppress_context__


def test_what_tells_the_traceback_is_the_first_of_the_causes() -> None:
    crossed = _crossed(_raised(TwoArguments(1, "x"), source=KeyError("k")))
    trace = RuntimeError("Traceback ...")
    assert with_lane_cause(crossed, trace) is crossed
    assert isinstance(crossed.__cause__, KeyError) and crossed.__cause__.__cause__ is trace
    ring = ValueError("a")
    ring.__cause__ = KeyError("b")
    ring.__cause__.__cause__ = ring
    with_lane_cause(_crossed(ring), trace)


@needs_groups
def test_groups_arrive_with_their_members() -> None:
    member = _raised(TwoArguments(1, "x"), source=KeyError("k"))
    group = ExceptionGroup("several", [member, ExceptionGroup("inner", [WithLock("y")])])
    crossed = _crossed(group)
    assert type(crossed) is ExceptionGroup and crossed.message == "several"
    first, inner = crossed.exceptions
    assert type(first) is TwoArguments and isinstance(first.__cause__, KeyError)
    assert type(inner.exceptions[0]) is WithLock


def test_an_exception_that_holds_itself_arrives() -> None:
    error = TwoArguments(1, "x")
    error.parts = [error]  # type: ignore[attr-defined]
    assert type(_crossed(error)) is TwoArguments


def test_of_a_class_that_the_receiver_lacks_the_nearest_base_is_made(tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text(
        textwrap.dedent("""
        class Lost(RuntimeError):
            pass
        class Plain(Exception):
            pass
        """)
    )
    program = """
        import pickle, sys, only_there
        from fluid.trainables.exception_pickle import dump_exception
        errors = [only_there.Lost("why"), only_there.Plain("what"), KeyError([only_there.Plain("in")])]
        sys.stdout.buffer.write(pickle.dumps([dump_exception(error) for error in errors]))
    """
    path = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{textwrap.dedent(program)}"],
        capture_output=True,
        check=True,
    )
    lost, plain, holder = pickle.loads(done.stdout)
    assert repr(load_exception(lost)) == "RuntimeError('Lost: why')"
    assert load_exception(plain) is None
    assert repr(load_any_exception(plain)) == "LackingClassError('Plain: what')"
    assert repr(pickle.loads(holder)) == "KeyError([LackingClassError('Plain: in')])"


def test_a_class_of_a_function_arrives_with_a_class_of_its_own() -> None:
    class Local(KeyError):
        pass

    with pytest.raises(Local):
        raise _crossed(Local("k"))
