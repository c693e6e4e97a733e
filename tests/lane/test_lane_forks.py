"""A lane saves a trial's state for others to start from: messages in, messages out."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest

import fluid
from fluid.engine.events import (
    Checkpoint,
    IterationDone,
    LaneReady,
    TrialFailed,
    TrialForked,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialStarted,
)
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.paths import own_folder
from fluid.lane.checkpoints.seal import damage_of, is_shared


class Walk:
    """A random walk, which notes its steps in its folder, counts its saves, and may spoil what it is restored from."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.at, self.steps = config, 0.0, 0

    def step(self) -> dict[str, Any]:
        self.steps += 1
        self.at += random.random()
        with open(fluid.trial_dir() / "walk", "a") as file:
            file.write(f"{self.at}\n")
        return {"at": self.at, "done": self.steps == self.config.get("done_at")}

    def save_checkpoint(self, folder: str) -> None:
        with open(self.config["saves"], "a") as file:
            file.write("x")
        Path(folder, "walk").write_text(f"{self.steps} {self.at!r}")

    def load_checkpoint(self, folder: str) -> None:
        steps, at = Path(folder, "walk").read_text().split()
        self.steps, self.at = int(steps), float(at)
        with open(Path(folder, "walk"), "r+") as file:
            file.write("spoiled")


class Reports:
    """Reports a state every third iteration."""

    fluid_reports_states = True

    def setup(self, config: dict[str, Any]) -> None:
        self.count, self.reported = 0, None

    def step(self) -> dict[str, Any]:
        self.count += 1
        self.reported = self.count if self.count % 3 == 0 else self.reported
        return {"count": self.count}

    def unsaved_iterations(self) -> int | None:
        return None if self.reported is None else self.count - self.reported

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "count").write_text(str(self.reported))

    def load_checkpoint(self, folder: str) -> None:
        self.count = self.reported = int(Path(folder, "count").read_text())


def counting(config: dict[str, Any], state: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Counts; its state cannot be pickled from an iteration on."""
    state = state or {"count": 0}
    while True:
        state["count"] += 1
        if state["count"] == config.get("lock_at"):
            state["lock"] = threading.Lock()
        yield {"count": state["count"]}, state


class Returns:
    """Counts; returns its state, and leaves its folder empty."""

    def setup(self, config: dict[str, Any]) -> None:
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"count": self.count}

    def save_checkpoint(self, folder: str) -> Any:
        return {"count": self.count}

    def load_checkpoint(self, state: Any) -> None:
        self.count = state["count"]


def stateless(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while True:
        yield {"loss": 1.0}


@pytest.fixture
def make_lane(make_server: Callable[..., Any], fork: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    server = make_server()
    memory = tmp_path / "memory"
    memory.mkdir()
    StoreLedger(str(memory)).create(10**9, 10**9)

    def make(lane_id: int = 0, **options: Any) -> Any:
        lane = fork(server, lane_id, memory_folder=str(memory), save_after=1e9, idle_save_after=1e9, **options)
        lane.receive(LaneReady)
        return lane

    return make


@pytest.fixture
def walk(tmp_path: Path) -> dict[str, Any]:
    return {"saves": str(tmp_path / "saves")}


def saves(config: dict[str, Any]) -> int:
    path = Path(config["saves"])
    return len(path.read_text()) if path.exists() else 0


def done(lane: Any, count: int) -> list[Any]:
    return [lane.receive(IterationDone) for _ in range(count)]


def forked(lane: Any) -> TrialForked:
    answer: TrialForked = lane.receive(TrialForked)
    return answer


def place(answer: TrialForked) -> Checkpoint:
    assert answer.checkpoint is not None, answer
    return answer.checkpoint


def test_forks_of_one_state_take_one_save_and_go_on_as_the_parent_does(
    make_lane: Callable[..., Any], walk: dict[str, Any], tmp_path: Path
) -> None:
    lane, other = make_lane(0), make_lane(1)
    lane.start("a", Walk, walk, 3)
    done(lane, 3)
    lane.send(to.fork("a", "b"), to.fork("a", "c", at=3), to.fork("a", "d", at=5), to.run("a", 4))
    answers = [forked(lane) for _ in range(3)]
    assert [(answer.trial_id, place(answer).iteration) for answer in answers] == [("b", 3), ("c", 3), ("d", 5)]
    assert saves(walk) == 2, "one for two of iteration 3, one for that of iteration 5"
    parent = [one.metrics["at"] for one in done(lane, 4)]
    saved = lane.receive(TrialSaved).checkpoint
    assert saved.iteration == 3, "the driver is told of what others have in common with the parent"
    for answer in answers:
        child, at = answer.trial_id, place(answer).iteration
        assert Path(own_folder(str(tmp_path), child), "walk").read_text().count("\n") == at
        other.start(child, Walk, walk, 2, place(answer))
        assert other.receive(TrialStarted).iteration == at
        assert [one.metrics["at"] for one in done(other, 2)] == parent[at - 3 : at - 1]
    assert damage_of(place(answers[0]).path) is not None and damage_of(saved.path) is None, "b spoiled its own only"


@pytest.mark.parametrize("trainable", [counting, Returns])
def test_a_state_that_only_fluid_reads_stays_in_common(
    make_lane: Callable[..., Any], tmp_path: Path, trainable: Any
) -> None:
    lane = make_lane(0)
    lane.start("a", trainable, {}, 2)
    done(lane, 2)
    lane.send(to.fork("a", "b"), to.fork("a", "c"))
    first, second = forked(lane), forked(lane)
    assert is_shared(place(first).path) and place(first).in_memory
    used = StoreLedger(str(tmp_path / "memory")).read().used
    lane.start("b", trainable, {}, 1, place(first))
    assert done(lane, 1)[0].metrics["count"] == 3
    assert is_shared(place(second).path) and StoreLedger(str(tmp_path / "memory")).read().used == used


def test_what_has_no_state_to_give_says_so_and_goes_on(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(0)
    lane.start("a", counting, {"lock_at": 2}, 2)
    lane.start("s", stateless, {}, 1)
    done(lane, 3)
    lane.send(to.fork("a", "b"), to.fork("a", "c"), to.fork("s", "d"))
    answers = [forked(lane) for _ in range(3)]
    assert all(answer.cannot and answer.checkpoint is None and not answer.is_past for answer in answers)
    assert "lock" in answers[0].problem and "state" in answers[2].problem
    lane.send(to.run("a", 1), to.run("s", 1))
    assert len(done(lane, 2)) == 2


def test_the_states_of_what_reports_them_are_its_newest(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(0)
    lane.start("a", Reports, {}, 2)
    done(lane, 2)
    lane.send(to.fork("a", "b"))
    assert forked(lane).cannot, "it has none yet"
    lane.send(to.fork("a", "c", at=4), to.run("a", 2))
    answer = forked(lane)
    assert "3 iterations" in answer.problem and answer.checkpoint is None and not (answer.cannot or answer.is_past)
    lane.send(to.fork("a", "d"), to.fork("a", "e", at=3), to.fork("a", "f", at=2))
    assert [place(forked(lane)).iteration for _ in range(2)] == [3, 3]
    assert forked(lane).is_past


def test_a_trial_that_has_ended_comes_to_no_later_state(make_lane: Callable[..., Any], walk: dict[str, Any]) -> None:
    lane = make_lane(0)
    lane.start("a", Walk, {**walk, "done_at": 2}, 5)
    lane.send(to.fork("a", "b", at=4))
    answer = forked(lane)
    assert answer.checkpoint is None and "has ended" in answer.problem and not answer.is_past


def test_what_leaves_its_lane_answers_no_more(make_lane: Callable[..., Any], walk: dict[str, Any]) -> None:
    lane = make_lane(0)
    lane.start("a", Walk, walk, 1)
    done(lane, 1)
    lane.send(to.fork("a", "b", at=9), to.release("a"))
    lane.receive(TrialReleased)
    lane.start("a", Walk, walk, 10)
    done(lane, 10)
    lane.send(to.fork("a", "c"), to.release("a"), to.fork("a", "d"), to.pause("a"))
    assert forked(lane).trial_id == "c", "what was asked before it left is done"
    lane.receive(TrialReleased)
    assert not [message for message in lane.messages if isinstance(message, TrialForked) and message.trial_id != "c"]


def test_what_cannot_be_copied_ends_nothing(
    make_lane: Callable[..., Any], walk: dict[str, Any], tmp_path: Path
) -> None:
    lane = make_lane(0)
    lane.start("a", Walk, walk, 1)
    done(lane, 1)
    folder = Path(own_folder(str(tmp_path), "b")).parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("in the way")
    lane.send(to.fork("a", "b"), to.run("a", 1))
    answer = forked(lane)
    assert answer.checkpoint is None and answer.problem and not answer.cannot
    assert done(lane, 1)[0].iteration == 2
    assert not (tmp_path / "memory" / "b").exists(), "half of a start is none"


def test_a_fork_whose_state_is_gone_fails_and_does_not_begin_afresh(
    make_lane: Callable[..., Any], walk: dict[str, Any]
) -> None:
    lane, other = make_lane(0), make_lane(1)
    lane.start("a", Walk, walk, 2)
    done(lane, 2)
    lane.send(to.fork("a", "b"))
    start = place(forked(lane))
    os.truncate(Path(start.path, "state", "walk"), 1)
    for checkpoint in (start, None):
        other.start("b", Walk, walk, 1, checkpoint, must_restore=True)
        failure = other.receive(TrialFailed).failure
        assert failure.kind == "error" and "cannot begin afresh" in failure.message
        assert checkpoint is None or ("2 iterations" in failure.message and "damaged" in failure.message)
    assert not [message for message in other.messages if isinstance(message, (TrialStarted, IterationDone))]


def test_seconds_of_a_fork_are_not_those_of_an_iteration(
    make_lane: Callable[..., Any], walk: dict[str, Any], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lane = make_lane(0)
    lane.start("a", Walk, {**walk, "saves": str(pipe)}, 1)
    done(lane, 1)
    lane.send(to.fork("a", "b", at=2), to.run("a", 2))
    threading.Timer(0.3, lambda: pipe.read_bytes()).start()
    assert forked(lane).seconds > 0.2
    assert all(one.seconds < 0.1 for one in done(lane, 2))
    lane.send(to.pause("a"))
    assert lane.receive(TrialPaused).iteration == 3
