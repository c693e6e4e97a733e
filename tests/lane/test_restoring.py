"""What a lane does when a checkpoint cannot be used: messages in, messages out."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest

from fluid.backends.hosts.checkpoints.server import CheckpointServer, ServedFolders
from fluid.engine.events import (
    Checkpoint,
    IterationDone,
    LaneReady,
    TrialFailed,
    TrialSaved,
    TrialSetBack,
    TrialStarted,
)
from fluid.lane.checkpoints.ledger import StoreLedger


class Walk:
    """A random walk, whose state is in memory and in the process's random numbers."""

    def setup(self, config: dict[str, Any]) -> None:
        assert not hasattr(self, "steps"), "what could not be loaded is not used again"
        random.seed(7)
        self.config = config
        self.steps: list[float] = []

    def step(self) -> dict[str, Any]:
        self.steps.append(random.random())
        return {"at": sum(self.steps), "done": len(self.steps) == self.config.get("last")}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "steps").write_text(json.dumps(self.steps), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        self.steps = json.loads(Path(folder, "steps").read_text(encoding="utf-8"))
        random.random()
        if len(self.steps) in self.config.get("fails_at", []):
            raise {"value": ValueError, "memory": MemoryError, "stop": StopIteration}[self.config["how"]]


def walk(count: int) -> list[float]:
    generator = random.Random(7)
    steps = [generator.random() for _ in range(count)]
    return [sum(steps[: number + 1]) for number in range(count)]


@pytest.fixture
def make_lane(make_server: Callable[..., Any], fork: Callable[..., Any]) -> Callable[..., Any]:
    server = make_server()

    def make(lane_id: int = 0, **options: Any) -> Any:
        lane = fork(server, lane_id, **options)
        lane.receive(LaneReady)
        return lane

    return make


def saved_at(lane: Any, *iterations: int, **config: Any) -> list[Checkpoint]:
    """Runs a trial, and saves it after these iterations."""
    lane.start("a", Walk, config, 0)
    saved = []
    for before, after in zip((0, *iterations), iterations, strict=False):
        lane.send(to.run("a", after - before))
        for _ in range(after - before):
            lane.receive(IterationDone)
        lane.send(to.save("a", False))
        saved.append(lane.receive(TrialSaved).checkpoint)
    return saved


def place(back: TrialSetBack | None) -> tuple[int, str | None]:
    """From where a trial goes on that was set back: the iteration, and the checkpoint's folder."""
    assert back is not None
    return (0, None) if back.checkpoint is None else (back.checkpoint.iteration, back.checkpoint.path)


def go_on(
    lane: Any, wanted: Checkpoint, until: int, source: tuple[str, int] | None = None, **config: Any
) -> TrialSetBack | None:
    """Starts the trial from a checkpoint, in a fresh lane; it must go on as if nothing had happened."""
    lane.start("a", Walk, config, 1, wanted, source=source)
    begun = lane.receive(TrialStarted).iteration
    set_back = next((message for message in lane.messages if isinstance(message, TrialSetBack)), None)
    assert begun == (wanted.iteration if set_back is None else place(set_back)[0])
    if until > begun + 1:
        lane.send(to.run("a", until - begun - 1))
    done = [lane.receive(IterationDone) for _ in range(until - begun)]
    assert [one.iteration for one in done] == list(range(begun + 1, until + 1))
    assert [one.metrics["at"] for one in done] == walk(until)[begun:]
    return set_back


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path / "state/steps", 3),
    "flipped": lambda path: (path / "state/steps").write_text((path / "state/steps").read_text().replace(".", ",", 1)),
    "file deleted": lambda path: (path / "lane.pkl").unlink(),
    "emptied": lambda path: (shutil.rmtree(path), path.mkdir()),
    "deleted": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_one_before_is_used_where_the_newest_is_damaged(
    make_lane: Callable[..., Any], tmp_path: Path, damage: str
) -> None:
    first, second = saved_at(make_lane(0), 2, 5)
    assert go_on(make_lane(1), second, 8) is None
    DAMAGE[damage](Path(second.path))
    lane = make_lane(2)
    back = go_on(lane, second, 8)
    assert back is not None and (*place(back), back.cannot_load) == (2, first.path, False)
    what = "gone" if damage == "deleted" else "damaged: "
    assert f"the checkpoint of iteration 5 is {what}" in back.reason
    log = (tmp_path / "trials/a/output.log").read_text(encoding="utf-8")
    assert log == f"Fluid: this trial goes on from iteration 2 instead of going on from iteration 5: {back.reason}\n"
    lane.send(to.save("a", False))
    assert go_on(make_lane(3), lane.receive(TrialSaved).checkpoint, 10) is None


def test_without_any_the_trial_begins_afresh(make_lane: Callable[..., Any]) -> None:
    first, second = saved_at(make_lane(0), 2, 5)
    shutil.rmtree(first.path)
    DAMAGE["truncated"](Path(second.path))
    back = go_on(make_lane(1), second, 6)
    assert back is not None and (*place(back), back.cannot_load) == (0, None, False)


def test_host_memory_that_was_emptied_costs_no_more_than_what_was_only_there(
    make_lane: Callable[..., Any], tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    StoreLedger(str(memory)).create(10**6, 10**6)
    first, second = saved_at(make_lane(0, memory_folder=str(memory)), 2, 5)
    assert first.in_memory and second.in_memory
    spilled = tmp_path / "trials/a/checkpoints"
    spilled.mkdir(parents=True)
    shutil.move(first.path, spilled)
    shutil.rmtree(memory)
    back = go_on(make_lane(1, memory_folder=str(memory)), second, 6)
    assert back is not None and back.checkpoint is not None
    assert (back.checkpoint.iteration, back.checkpoint.in_memory) == (2, False)
    shutil.rmtree(spilled)
    back = go_on(make_lane(2, memory_folder=str(memory)), second, 6)
    assert place(back) == (0, None)


class OtherMachine:
    """Has what a lane of it has saved in host memory, and serves it; nothing of that is at its path here."""

    def __init__(self, make_lane: Callable[..., Any], folder: Path) -> None:
        written = folder / "fluid-0123456789abcdef-10.0.0.7"
        written.mkdir()
        StoreLedger(str(written)).create(10**6, 10**6)
        self.first, self.second = saved_at(make_lane(0, memory_folder=str(written)), 2, 5)
        self.memory_folder = folder / "memory of the other machine"
        written.rename(self.memory_folder)
        run_folder = str(folder / "run folder of the other machine")
        self.server = CheckpointServer(
            "127.0.0.1", b"key", ServedFolders(run_folder, run_folder, str(self.memory_folder))
        )


@pytest.fixture
def other(make_lane: Callable[..., Any], tmp_path: Path) -> Iterator[OtherMachine]:
    made = OtherMachine(make_lane, tmp_path)
    yield made
    made.server.close()


def test_a_checkpoint_is_fetched_from_the_machine_that_has_it(
    make_lane: Callable[..., Any], tmp_path: Path, other: OtherMachine
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    StoreLedger(str(memory)).create(10**6, 10**6)
    options = {"memory_folder": str(memory), "session_key": b"key"}
    lane = make_lane(1, **options)
    assert go_on(lane, other.second, 8, other.server.address) is None
    other.server.close()
    assert go_on(make_lane(2, **options), other.second, 8, other.server.address) is None, "it was fetched before"
    lane.send(to.save("a", False), to.save("a", False))
    first, again = (lane.receive(TrialSaved).checkpoint for _ in range(2))
    assert first.path == again.path, "the state is the same"
    assert sorted(path.name.split("-")[0] for path in (memory / "a").iterdir()) == ["00000005", "00000008"]


def test_the_one_before_is_fetched_where_the_newest_is_damaged(
    make_lane: Callable[..., Any], other: OtherMachine
) -> None:
    DAMAGE["flipped"](other.memory_folder / "a" / Path(other.second.path).name)
    back = go_on(make_lane(1, session_key=b"key"), other.second, 8, other.server.address)
    assert back is not None and back.checkpoint is not None and not back.cannot_load
    assert (back.checkpoint.iteration, Path(back.checkpoint.path).name) == (2, Path(other.first.path).name)
    assert back.reason == "the checkpoint of iteration 5 is damaged: state/steps has changed since it was written"


def test_where_none_can_be_fetched_the_best_here_is_used(
    make_lane: Callable[..., Any], tmp_path: Path, other: OtherMachine
) -> None:
    here = tmp_path / "trials/a/checkpoints"
    here.mkdir(parents=True)
    shutil.copytree(other.memory_folder / "a" / Path(other.first.path).name, here / Path(other.first.path).name)
    other.server.close()
    back = go_on(make_lane(1, session_key=b"key"), other.second, 8, other.server.address)
    assert back is not None and place(back) == (2, str(here / Path(other.first.path).name))
    wanted = "the checkpoint of iteration 5 could not be fetched from 127.0.0.1: ConnectionRefusedError"
    assert back.reason.startswith(wanted)
    shutil.rmtree(here)
    back = go_on(make_lane(2, session_key=b"key"), other.second, 8, other.server.address)
    assert back is not None and place(back) == (0, None)
    assert back.reason.startswith(wanted)


def test_one_that_cannot_be_loaded_is_passed_over_and_leaves_no_trace(make_lane: Callable[..., Any]) -> None:
    first, second = saved_at(make_lane(0), 2, 5)
    for how, name in (("value", "ValueError"), ("stop", "RuntimeError: load_checkpoint() raised StopIteration")):
        back = go_on(make_lane(len(how)), second, 7, fails_at=[5], how=how)
        assert back is not None and (*place(back), back.cannot_load) == (2, first.path, False)
        assert f"loading the checkpoint of iteration 5 raised {name}" in back.reason


def test_a_trial_whose_code_cannot_load_anything_begins_afresh_and_says_so(
    make_lane: Callable[..., Any], tmp_path: Path
) -> None:
    _, second = saved_at(make_lane(0), 2, 5)
    back = go_on(make_lane(1), second, 6, fails_at=[2, 5], how="value")
    assert back is not None and (*place(back), back.cannot_load) == (0, None, True)
    assert "iteration 5 raised ValueError; loading the checkpoint of iteration 2 raised ValueError" in back.reason
    log = (tmp_path / "trials/a/output.log").read_text(encoding="utf-8")
    assert log.count("Traceback") == 2 and "in load_checkpoint" in log and "this trial begins afresh" in log


def test_a_lack_of_memory_says_nothing_about_a_checkpoint(make_lane: Callable[..., Any]) -> None:
    _, second = saved_at(make_lane(0), 2, 5)
    lane = make_lane(1)
    lane.start("a", Walk, {"fails_at": [5], "how": "memory"}, 1, second)
    assert lane.receive(TrialFailed).failure.kind == "out_of_memory"
    assert go_on(lane, second, 6) is None


def test_a_trial_that_was_done_is_not_done_in_an_earlier_state(make_lane: Callable[..., Any]) -> None:
    _, second = saved_at(make_lane(0), 2, 4, last=4)
    lane = make_lane(1)
    lane.start("a", Walk, {"last": 4}, 1, second)
    assert lane.receive(IterationDone).finished, "it is done and runs no further"
    DAMAGE["truncated"](Path(second.path))
    assert go_on(make_lane(2), second, 4, last=4) is not None


# -- what cannot be saved ---------------------------------------------------------------------------------------------


class Strained(Walk):
    """Cannot be saved after some of its iterations, for want of what its config names."""

    def step(self) -> dict[str, Any]:
        metrics = super().step()
        bad = len(self.steps) in self.config["bad"]
        if self.config["lacks"] == "descriptors":
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest if bad else hard, hard))
        return metrics

    def save_checkpoint(self, folder: str) -> None:
        if self.config["lacks"] == "space" and len(self.steps) in self.config["bad"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().save_checkpoint(folder)


@pytest.mark.parametrize("lacks", ["space", "descriptors"])
def test_a_trial_that_cannot_be_saved_for_a_while_is_saved_again_later(
    make_lane: Callable[..., Any], tmp_path: Path, lacks: str
) -> None:
    (tmp_path / "memory").mkdir()
    StoreLedger(str(tmp_path / "memory")).create(10**6, 10**6)
    memory = {"memory_folder": str(tmp_path / "memory")}
    lane = make_lane(0, save_after=0.0, save_ratio=0.0, **memory)
    lane.start("a", Strained, {"lacks": lacks, "bad": [2, 3]}, 5)
    done = [lane.receive(IterationDone) for _ in range(5)]
    assert [one.metrics["at"] for one in done] == walk(5)
    saved = [lane.receive(TrialSaved).checkpoint for _ in range(3)]
    assert [one.iteration for one in saved] == [1, 4, 5]
    assert [Path(one.path).exists() for one in saved] == [False, True, True]
    assert not any(path.name.startswith(".0") for path in tmp_path.rglob("*")), "no draft is left"


def test_one_that_is_to_leave_and_cannot_be_saved_for_want_of_space_is_told_apart(
    make_lane: Callable[..., Any],
) -> None:
    lane = make_lane(0)
    lane.start("a", Strained, {"lacks": "space", "bad": [1]}, 1)
    lane.receive(IterationDone)
    lane.send(to.save("a", True))
    assert lane.receive(TrialFailed).failure.kind == "not_saved"


def test_a_lane_starts_without_a_note_where_there_is_no_room_for_one(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(0, note="/proc/no/room")
    saved_at(lane, 2)
