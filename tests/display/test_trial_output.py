from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fluid.backends.base import LaneText
from fluid.display.trial_output import TrialOutput

MARK = b"\x1efluid: train pid=%d\x1e\n"


class Source:
    """What lanes have written and was not read yet."""

    def __init__(self) -> None:
        self.texts: list[LaneText] = []

    def say(self, text: bytes, pid: int = 7, *, is_error: bool = False, host: str = "localhost") -> None:
        self.texts.append(LaneText(pid, is_error, MARK % pid + text, host=host))

    def read(self) -> list[LaneText]:
        texts, self.texts = self.texts, []
        return texts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def open_output(source: Source) -> Iterator[Callable[..., TrialOutput]]:
    made: list[TrialOutput] = []

    def make(**options: Any) -> TrialOutput:
        made.append(TrialOutput(source.read, **{"environment": {}, **options}))
        return made[-1]

    yield make
    for output in made:
        output.close()


def test_lines_go_to_their_stream_with_who_printed_them(
    source: Source, open_output: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    output = open_output()
    source.say(b"one\nhalf")
    source.say(b"bad\n", is_error=True)
    source.say(b"far\n", pid=8, host="10.0.0.2")
    output.flush()
    captured = capsys.readouterr()
    assert captured.out == "(train pid=7) one\n(train pid=8, ip=10.0.0.2) far\n(train pid=7) half\n"
    assert captured.err == "(train pid=7) bad\n"


def test_lines_are_shown_while_trials_run(source: Source, open_output: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written.set()
            return super().write(text)

    written = threading.Event()
    monkeypatch.setattr("sys.stdout", Stream())
    open_output()
    source.say(b"one\n")
    assert written.wait(90)


def test_before_a_mark_a_line_is_the_lanes(
    source: Source, open_output: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    output = open_output()
    source.texts.append(LaneText(3, False, b"early\n"))
    output.flush()
    assert capsys.readouterr().out == "(lane 3) early\n"


@pytest.mark.parametrize(
    ("environment", "prefix"),
    [
        ({}, "\x1b[36m(train pid=7)\x1b[0m"),
        ({"RAY_COLOR_PREFIX": "0"}, "(train pid=7)"),
        ({"NO_COLOR": "1"}, "(train pid=7)"),
        ({"RAY_COLOR_PREFIX": "1"}, "\x1b[36m(train pid=7)\x1b[0m"),
    ],
)
def test_the_prefix_is_coloured_on_a_terminal(
    source: Source, open_output: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], prefix: str
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    output = open_output(environment=environment)
    source.say(b"one\n")
    output.flush()
    assert terminal.getvalue() == f"{prefix} one\n"


def test_held_back_lines_are_told_at_a_flush(
    source: Source, open_output: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    output = open_output()
    for pid in (1, 2, 3):
        source.say(b"same\n", pid)
    output.flush()
    shown = [line.partition(" (Equal")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["(train pid=1) same", "(train pid=3) same [repeated 2x across cluster]"]


def test_hidden_lines_are_dropped(source: Source, open_output: Any, capsys: pytest.CaptureFixture[str]) -> None:
    output = open_output(is_hidden=lambda: True)
    source.say(b"one\n")
    output.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_of_another_encoding(
    source: Source, open_output: Any, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
    output = open_output()
    source.say("✓\n".encode())
    output.flush()
    assert raw.getvalue() == b"(train pid=7) \\u2713\n"


def test_a_stream_that_is_gone_harms_nothing(source: Source, open_output: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), None):
        if stream is not None:
            stream.close()
        monkeypatch.setattr("sys.stdout", stream)
        output = open_output()
        source.say(b"one\n")
        output.close()


def test_a_view_keeps_its_place_below(source: Source, open_output: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class View:
        def __init__(self) -> None:
            self.written: list[str] = []

        def write_above(self, stream: Any, text: str) -> bool:
            self.written.append(text)
            return "open" in text

    view = View()
    output = open_output(above=view)
    source.say(b"open\n")
    output.flush()
    source.say(b"closed\n")
    output.flush()
    assert view.written == ["(train pid=7) open\n", "(train pid=7) closed\n"]
    assert capsys.readouterr().out == "(train pid=7) closed\n"
