from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fluid.backends.base import LaneText
from fluid.display.trial_output import LineAssembler


def assembler() -> LineAssembler:
    return LineAssembler(3, "localhost", False)


def fed(lines: LineAssembler, data: bytes, now: float = 0.0, *, skipped: int = 0) -> list[str]:
    return [line.text for line in lines.feed(LaneText(3, False, data, skipped), now)]


def test_lines_come_when_they_are_complete() -> None:
    lines = assembler()
    assert fed(lines, b"one\ntw") == ["one"]
    assert fed(lines, b"o\n\nfour\r\n") == ["two", "", "four"]


def test_marks_say_who_printed() -> None:
    lines = assembler()
    data = b"early\n\x1efluid: train pid=7\x1e\none\nhalf\x1efluid: other pid=8\x1e\ntwo\n"
    shown = [(line.name, line.pid, line.text) for line in lines.feed(LaneText(3, False, data), 0.0)]
    assert shown == [("", 0, "early"), ("train", 7, "one"), ("train", 7, "half"), ("other", 8, "two")]


@given(st.lists(st.integers(1, 60), max_size=8))
def test_it_does_not_matter_how_the_bytes_come(cuts: list[int]) -> None:
    data = "\x1efluid: train pid=7\x1e\nnaïve ✓\nhalf\x1efluid: b pid=8\x1e\n\x1b[31mred\x1b[0m\nend\n".encode()
    whole = assembler().feed(LaneText(3, False, data), 0.0)
    lines, pieces, begin = assembler(), [], 0
    for size in [*cuts, len(data)]:
        pieces += lines.feed(LaneText(3, False, data[begin : begin + size]), 0.0)
        begin += size
    assert pieces == whole


def test_an_unfinished_line_is_shown_after_a_second() -> None:
    lines = assembler()
    fed(lines, b"epoch 1 ", 10.0)
    assert lines.overdue(10.9) == []
    assert [line.text for line in lines.overdue(11.0)] == ["epoch 1 "]
    assert lines.overdue(20.0) == []
    assert fed(lines, b"done\n", 30.0) == ["done"]
    fed(lines, b"all of it", 40.0)
    lines.overdue(41.0)
    assert fed(lines, b"\nnext\n", 42.0) == ["next"]  # Its end alone is no line.


def test_a_line_whose_end_is_only_not_read_yet_is_not_unfinished() -> None:
    lines = assembler()
    lines.feed(LaneText(3, False, b"line 12", has_more=True), 0.0)
    assert lines.overdue(100.0) == []
    assert fed(lines, b"34\n", 100.0) == ["line 1234"]


def test_of_a_progress_bar_the_newest_state_is_shown_now_and_then() -> None:
    lines = assembler()
    fed(lines, b"\r 10%", 0.0)
    fed(lines, b"\r 20%", 1.0)
    assert lines.overdue(4.9) == []
    assert [line.text for line in lines.overdue(5.0)] == [" 20%"]
    assert fed(lines, b"\r 90%\r100%\n", 6.0) == ["100%"]
    assert fed(lines, b"\r 50%\r     \r\n") == []  # A bar that was cleared.


def test_a_mark_that_is_not_complete_is_not_shown() -> None:
    lines = assembler()
    assert fed(lines, b"half\x1efluid: tr") == []
    assert [line.text for line in lines.flush()] == ["half"]
    shown = lines.feed(LaneText(3, False, b"ain pid=7\x1e\none\n"), 0.0)
    assert [(line.name, line.text) for line in shown] == [("train", "one")]


def test_a_line_without_end_takes_bounded_memory() -> None:
    lines = assembler()
    shown = [text for _ in range(20) for text in fed(lines, "ü".encode() * 5_000)]
    assert set("".join(shown)) == {"ü"} and len(shown) >= 10
    bar = [text for _ in range(20) for text in fed(assembler(), b"\r" + b"x" * 30_000)]
    assert max(map(len, shown + bar)) <= 1 << 14


def test_control_sequences_are_left_out_but_for_colours() -> None:
    for data, shown in (
        (b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        (b"\x1b[31mred", "\x1b[31mred\x1b[0m"),
        (b"\x1b[2J\x1b[H\x1b[3Aup\x1b]0;title\x07", "up"),
        (b"bell\x07 nul\x00 tab\t.", "bell nul tab\t."),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ):
        assert fed(assembler(), data + b"\n") == [shown]


def test_what_was_skipped_is_told() -> None:
    lines = assembler()
    fed(lines, b"half")
    assert fed(lines, b"next\n", skipped=2_500_000) == [
        "[2.5 MB not shown, as trials print faster than that; output.log has all]",
        "next",
    ]
