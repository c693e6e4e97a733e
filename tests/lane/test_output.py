from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fluid.lane.output import MARK, LaneStreams, has_text, lane_output, printable_name


class Lane:
    """The streams of a lane whose own output are files."""

    def __init__(self, folder: Path, *, echo: bool) -> None:
        self.folder = folder
        self.paths = [folder / "own.out", folder / "own.err"]
        own = [path.open("a", buffering=1, encoding="utf-8") for path in self.paths]
        self.own = own
        self.streams = LaneStreams(*own, echo=echo)

    def switch(self, trial: str | None, name: str = "") -> None:
        self.streams.switch(None if trial is None else str(self.folder / trial / "output.log"), name)

    def log(self, trial: str) -> str:
        return (self.folder / trial / "output.log").read_text(encoding="utf-8")

    def written(self, stream: int = 0) -> str:
        """What a stream of the lane's own has received, with marks as ``<name>``."""
        data = self.paths[stream].read_bytes()
        return MARK.sub(lambda found: b"<%s>" % found[1], data).decode("utf-8")


@pytest.fixture
def make_lane(tmp_path: Path) -> Iterator[Callable[..., Lane]]:
    made: list[Lane] = []

    def make(*, echo: bool = True) -> Lane:
        made.append(Lane(tmp_path, echo=echo))
        return made[-1]

    yield make
    for lane in made:
        lane.streams.switch(None)
        for own in lane.own:
            own.close()


@pytest.fixture
def lane(make_lane: Callable[..., Lane]) -> Lane:
    return make_lane()


def test_a_trial_prints_to_its_log_and_to_the_lanes_own_output(lane: Lane) -> None:
    lane.switch("a", "train")
    print("one", file=lane.streams.stdout)
    print("two", file=lane.streams.stderr)
    print("three", file=lane.streams.stdout)
    assert lane.log("a") == "one\ntwo\nthree\n"
    assert lane.written(0) == "<train>one\nthree\n"
    assert lane.written(1) == "<train>two\n"


def test_without_echo_the_lanes_own_output_is_for_what_belongs_to_no_trial(make_lane: Callable[..., Lane]) -> None:
    lane = make_lane(echo=False)
    print("between trials", file=lane.streams.stdout)
    lane.switch("a", "train")
    lane.streams.mark()
    print("one", file=lane.streams.stdout)
    lane.streams.stdout.buffer.write(b"two\n")
    lane.switch(None)
    print("after", file=lane.streams.stdout)
    assert lane.written() == "between trials\nafter\n"
    assert lane.log("a") == "one\ntwo\n"


def test_marks_are_written_where_the_name_changes(lane: Lane) -> None:
    for trial, name in (("a", "train"), ("b", "train"), ("c", "other"), ("a", "train")):
        lane.switch(trial, name)
        print(trial, file=lane.streams.stdout)
    assert lane.written() == "<train>a\nb\n<other>c\n<train>a\n"
    assert lane.written(1) == ""  # A stream that is not used has none.
    lane.streams.mark()
    assert lane.written(1) == "<train>"


def test_a_mark_divides_the_unfinished_line_of_one_trial_from_the_next(lane: Lane) -> None:
    lane.switch("a", "train")
    print("50 %", end="", file=lane.streams.stdout)
    lane.switch("b", "train")
    print("begins", file=lane.streams.stdout)
    assert lane.written() == "<train>50 %<train>begins\n"


def test_bytes_come_in_order_with_text(lane: Lane) -> None:
    lane.switch("a", "train")
    lane.streams.stdout.write("text ")
    assert lane.streams.stdout.buffer.write(b"\xff\n") == 2
    wrapped = io.TextIOWrapper(lane.streams.stdout.buffer, encoding="utf-8", write_through=True)
    wrapped.write("wrapped\n")
    wrapped.close()
    print("after", file=lane.streams.stdout)
    assert lane.paths[0].read_bytes().endswith(b"text \xff\nwrapped\nafter\n")
    assert (lane.folder / "a" / "output.log").read_bytes() == b"text \xff\nwrapped\nafter\n"


def test_a_stream_that_cannot_be_written_fails_no_trial(lane: Lane) -> None:
    lane.switch("a", "train")
    for own in lane.own:
        own.close()
    print("one", file=lane.streams.stdout)
    lane.streams.mark()
    assert lane.log("a") == "one\n"
    (lane.folder / "file").touch()
    lane.switch("file/below", "train")
    print("two", file=lane.streams.stdout)


def test_a_log_is_closed_at_the_switch_and_kept_at_the_next_visit(lane: Lane) -> None:
    lane.switch("a", "train")
    writer = threading.Thread(target=print, args=("from a thread",), kwargs={"file": lane.streams.stdout})
    writer.start()
    writer.join()
    lane.switch("b", "train")
    lane.switch("a", "train")
    print("again", file=lane.streams.stdout)
    assert lane.log("a") == "from a thread\nagain\n"
    assert not (lane.folder / "b").exists()  # Silent trials have no log.


@pytest.mark.parametrize("echo", [True, False])
def test_what_others_write_goes_to_the_log_of_the_trial_that_ran(make_lane: Callable[..., Lane], echo: bool) -> None:
    lane = make_lane(echo=echo)

    def by_another(text: str) -> None:
        with lane.paths[0].open("a") as file:
            file.write(text)

    by_another("before\n")
    lane.switch("a", "train")
    for turn in range(3):
        print("by the trial", turn, file=lane.streams.stdout)
        by_another(f"by a child {turn}\n")
        if turn == 1:
            lane.streams.collect()
    lane.switch("b", "train")
    print("by the next", file=lane.streams.stdout)
    lane.switch(None)
    by_another("after\n")
    lane.switch("b", "train")
    lane.streams.collect()
    assert sorted(lane.log("a").splitlines()) == [
        f"by {who} {turn}" for who in ("a child", "the trial") for turn in range(3)
    ]
    assert lane.log("b") == "by the next\n"


def test_a_forked_process_writes_as_any_child_does(lane: Lane) -> None:
    lane.switch("a", "train")
    lane.streams.stdout.write("half of ")
    if (child := os.fork()) == 0:
        lane.streams.begin_in_child()
        print("by a fork", file=lane.streams.stdout)
        os._exit(0)
    os.waitpid(child, 0)
    print("a line", file=lane.streams.stdout)
    lane.streams.collect()
    assert sorted(lane.log("a").splitlines()) == ["by a fork", "half of a line"]


def test_marks_alone_are_no_text(lane: Lane) -> None:
    lane.switch("a", "train")
    lane.streams.mark()
    assert lane.paths[0].stat().st_size and not has_text(str(lane.paths[0]))
    print("text", file=lane.streams.stdout)
    assert has_text(str(lane.paths[0]))
    assert not has_text(str(lane.folder / "missing"))


def test_names() -> None:
    def train(config: object) -> None: ...

    class Model: ...

    assert printable_name(train) == "train"
    assert printable_name(functools.partial(functools.partial(train), 1)) == "train"
    assert printable_name(Model) == printable_name(Model()) == "Model"
    train.__name__ = "a\x1eb\n" + "c" * 200
    assert printable_name(train) == "ab" + "c" * 78
    assert lane_output("run", 3) == ("run/logs/lane-3.out", "run/logs/lane-3.log")
