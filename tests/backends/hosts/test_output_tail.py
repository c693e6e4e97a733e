from __future__ import annotations

from pathlib import Path

import pytest

from fluid.backends.base import LaneText
from fluid.backends.hosts.output import OutputTail


class Logs:
    """The output of lanes in a run folder, and what reads it."""

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir()
        self.folder = folder
        self.tail = OutputTail(str(folder))

    def write(self, lane_id: int, data: bytes, *, is_error: bool = False) -> None:
        name = f"lane-{lane_id}.{'log' if is_error else 'out'}"
        with (self.folder / "logs" / name).open("ab") as file:
            file.write(data)


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def test_what_is_new_is_read_once(logs: Logs) -> None:
    logs.write(3, b"of an earlier session\n")
    logs.tail.follow(3)
    assert logs.tail.read() == []
    logs.write(3, b"one\ntw")
    logs.write(3, b"error\n", is_error=True)
    assert logs.tail.read() == [LaneText(3, False, b"one\ntw"), LaneText(3, True, b"error\n")]
    logs.write(3, b"o\n")
    assert logs.tail.read() == [LaneText(3, False, b"o\n")]
    assert logs.tail.read() == []


def test_a_lane_that_has_ended_is_read_to_the_end_and_no_more(logs: Logs) -> None:
    logs.tail.follow(0)
    logs.write(0, b"last words\n")
    logs.tail.lane_ended(0)
    assert logs.tail.read() == [LaneText(0, False, b"last words\n")]
    assert logs.tail.read() == []
    logs.write(0, b"of another lane of that number\n")
    assert logs.tail.read() == []


def test_a_loud_lane_does_not_keep_others_waiting(logs: Logs) -> None:
    for lane_id in range(3):
        logs.tail.follow(lane_id)
    logs.write(0, b"loud\n" * 200_000)
    logs.write(1, b"one\n")
    logs.write(2, b"two\n")
    texts = logs.tail.read()
    assert {text.lane_id for text in texts} == {0, 1, 2}
    assert sum(len(text.data) for text in texts) <= 1 << 17
    assert {text.lane_id for text in texts if text.has_more} == {0}


def test_of_more_than_can_be_shown_the_oldest_is_skipped(logs: Logs) -> None:
    logs.tail.follow(0)
    lines = [b"line %d\n" % number for number in range(1_000_000)]
    logs.write(0, b"".join(lines))
    read, skipped = [], 0
    while texts := logs.tail.read():
        for text in texts:
            read.append(text.data)
            skipped += text.skipped
    shown = b"".join(read).splitlines(keepends=True)
    assert shown == lines[-len(shown) :]  # The newest, in whole lines.
    assert skipped == sum(map(len, lines)) - sum(map(len, shown)) > 0


def test_the_rest_is_read_at_the_end_and_can_be_had_when_the_folder_is_gone(logs: Logs) -> None:
    logs.tail.follow(0)
    logs.write(0, b"rest\n" * 100_000)
    logs.write(0, b"the end\n")
    logs.tail.close()
    for path in (logs.folder / "logs").iterdir():
        path.unlink()
    (text,) = logs.tail.read()
    assert text.data.endswith(b"rest\nthe end\n") and text.skipped + len(text.data) == 500_008
    assert logs.tail.read() == []
