"""A host copies and deletes checkpoints itself: no lane of their trials is there any more."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from waiting import PATIENCE, eventually

from fluid.backends.hosts.checkpoints import jobs as checkpoint_jobs
from fluid.backends.hosts.checkpoints.keeper import CheckpointKeeper, KeeperOptions
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.seal import damage_of
from fluid.lane.checkpoints.store import CheckpointStore
from fluid.lane.protocol import CheckpointForked, CheckpointPersisted

SIZE = 1000


class Machine:
    """A host's folders and its keeper, with host memory or without."""

    def __init__(self, folder: Path, in_memory: bool) -> None:
        self.run, self.memory = folder / "run", folder / "fluid-0123456789abcdef-localhost"
        self.memory.mkdir()
        self.run.mkdir()
        self.place = str(self.memory) if in_memory else ""
        self.woken = threading.Event()
        self.keeper = CheckpointKeeper(KeeperOptions("localhost", self.place, str(self.run), 10**6), self.woken.set)
        if in_memory:  # It counts what is there as it begins: a checkpoint that is written then may count twice.
            eventually(lambda: StoreLedger(self.place).read().turns >= 2)

    def save(self, trial_id: str, *iterations: int) -> list[str]:
        """Saves a trial as a lane does that ends then; returns the paths."""
        store = CheckpointStore(7, str(self.run), self.place)

        def write(folder: str) -> None:
            Path(folder, "data").write_bytes(os.urandom(SIZE))

        return [store.save(trial_id, iteration, write).path for iteration in iterations]

    def persist(self, trial_id: str, path: str, *, keep: bool, host: str = "localhost") -> CheckpointPersisted:
        self.keeper.persist(host, trial_id, path, keep=keep)
        (answer,) = eventually(self.keeper.poll)
        assert isinstance(answer, CheckpointPersisted) and self.woken.is_set()
        return answer

    def found(self) -> list[str]:
        """Where checkpoints are: ``m`` for memory, ``c`` for disk, ``k`` for those that outlive the run."""
        # Unlike Path.glob, os.walk goes on where a folder that it was about to look through is gone.
        folders = [*os.walk(self.memory), *os.walk(self.run / "trials")]
        return sorted(
            f"{'m' if folder.startswith(str(self.memory)) else os.path.basename(folder)[0]}{int(name[:8])}"
            for folder, names, _ in folders
            for name in names
            if name[0].isdigit()
        )

    def used(self) -> int:
        return StoreLedger(str(self.memory)).read().used


@pytest.fixture(params=[True, False], ids=["memory", "no memory"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path, request.param)
    yield machine
    machine.keeper.close()


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path, True)
    yield machine
    machine.keeper.close()


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No copy is made before this is set."""
    goes_on, copied = threading.Event(), shutil.copytree

    def copy(*args: Any, **options: Any) -> Any:
        assert goes_on.wait(PATIENCE)
        return copied(*args, **options)

    monkeypatch.setattr(shutil, "copytree", copy)
    yield goes_on
    goes_on.set()


def test_a_checkpoint_is_copied_from_memory_to_disk_and_stays(in_memory: Machine) -> None:
    (path,) = in_memory.save("a", 3)
    answer = in_memory.persist("a", path, keep=False)
    copy = str(in_memory.run / "trials/a/checkpoints" / Path(path).name)
    assert answer == CheckpointPersisted("a", copy, "localhost", False, answer.bytes, answer.seconds)
    assert answer.problem == "" and answer.seconds >= 0.0 and damage_of(answer.path) is None
    assert in_memory.found() == ["c3", "m3"]


def test_a_checkpoint_is_copied_for_good_wherever_it_is_by_now(here: Machine) -> None:
    (path,) = here.save("a", 3)
    answer = here.persist("a", path, keep=True)
    assert (answer.problem, answer.keep, answer.bytes) == ("", True, SIZE) and damage_of(answer.path) is None
    assert answer.path == str(here.run / "trials/a/kept" / Path(path).name)
    again = here.persist("a", path, keep=True)
    assert structs.replace(again, seconds=answer.seconds) == answer, "it is there"


def test_one_that_is_gone_or_elsewhere_is_answered_too(here: Machine) -> None:
    (path,) = here.save("a", 3)
    shutil.rmtree(path)
    for keep in (False, True):
        answer = here.persist("a", path, keep=keep)
        assert (answer.path, answer.keep) == (path, keep) and Path(path).name in answer.problem
    answer = here.persist("a", path, keep=False, host="10.0.0.7")
    assert (answer.host, answer.problem) == ("10.0.0.7", "10.0.0.7 has no host of this session")


def test_all_of_a_trial_is_deleted_except_what_outlives_the_run(here: Machine) -> None:
    first, second = here.save("a", 3, 4)
    here.save("b", 1)
    here.persist("a", first, keep=True)
    here.keeper.forget("a", keep_newest=False)
    is_left = ["k3", "m1"] if here.place else ["c1", "k3"]
    eventually(lambda: here.found() == is_left)
    assert not Path(second).parent.exists()
    eventually(lambda: here.used() == (SIZE if here.place else 0))  # Its room in memory is free, once it is gone.


def test_the_newest_may_be_left(here: Machine) -> None:
    here.save("a", 3, 4)
    here.keeper.forget("a", keep_newest=True)
    eventually(lambda: here.found() == ["k4"])


def test_nothing_is_deleted_before_the_newest_is_where_it_outlives_the_run(
    here: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    paths = here.save("a", 3, 4)
    (here.run / "trials/a").mkdir(parents=True, exist_ok=True)
    (here.run / "trials/a/kept").touch()  # It takes nothing, as a full disk.
    here.keeper.forget("a", keep_newest=True)
    eventually(lambda: "the last checkpoint of trial 'a' could not be copied to disk" in caplog.text)
    assert all(map(os.path.isdir, paths))


def test_what_a_lane_was_killed_in_the_middle_of_goes_too(here: Machine) -> None:
    (path,) = here.save("a", 3)
    (Path(path).parent / ".00000004-7-2").mkdir()
    here.keeper.forget("a", keep_newest=False)
    eventually(lambda: not Path(path).parent.exists())


@pytest.mark.parametrize(("demote", "is_left"), [(True, ["c3"]), (False, [])])
def test_one_no_longer_outlives_the_run(in_memory: Machine, demote: bool, is_left: list[str]) -> None:
    (path,) = in_memory.save("a", 3)
    kept = in_memory.persist("a", path, keep=True).path
    shutil.rmtree(path)
    in_memory.keeper.discard("10.0.0.7", kept, demote=demote)  # It is that machine's to do.
    in_memory.keeper.discard("localhost", kept, demote=demote)
    eventually(lambda: in_memory.found() == is_left)


def test_nothing_waits_for_a_copy_and_all_is_done_in_order(in_memory: Machine, blocked: threading.Event) -> None:
    paths = in_memory.save("a", 3, 4)
    for path in paths:
        in_memory.keeper.persist("localhost", "a", path, keep=True)
    in_memory.keeper.forget("a", keep_newest=False)
    assert in_memory.keeper.poll() == [] and in_memory.found() == ["m3", "m4"]
    blocked.set()
    eventually(lambda: in_memory.found() == ["k3", "k4"])
    answers = eventually(lambda: in_memory.keeper.poll())
    assert [(Path(one.path).name[:8], one.problem) for one in answers] == [("00000003", ""), ("00000004", "")]


def test_what_was_asked_for_is_done_before_the_host_closes(here: Machine) -> None:
    paths = {name: here.save(name, 1)[0] for name in "abcdefgh"}
    for name, path in paths.items():
        here.keeper.persist("localhost", name, path, keep=True)
        here.keeper.forget(name, keep_newest=False)
    here.keeper.close()
    assert here.found() == ["k1"] * 8 and len(here.keeper.poll()) == 8


def test_a_host_that_closes_begins_nothing_after_a_while(
    in_memory: Machine, blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_jobs, "_CLOSE_S", -1.0)
    (path,) = in_memory.save("a", 3)
    in_memory.keeper.persist("localhost", "a", path, keep=True)
    in_memory.keeper.forget("a", keep_newest=False)
    eventually(lambda: list(in_memory.run.glob("trials/a/kept")))  # The first one has begun.
    closing = threading.Thread(target=in_memory.keeper.close)
    closing.start()
    eventually(lambda: in_memory.keeper._jobs._end_at < float("inf"))
    blocked.set()
    closing.join(PATIENCE)
    assert not closing.is_alive() and in_memory.found() == ["k3", "m3"]


def test_a_request_that_fails_ends_no_other(in_memory: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = in_memory.save("a", 3)
    raised: list[str] = []

    def fails(place: str, *, demote: bool) -> None:
        raised.append(place)
        raise RuntimeError("no")

    monkeypatch.setattr(checkpoint_jobs, "discard_kept", fails)
    in_memory.keeper.discard("localhost", "a path", demote=True)
    assert in_memory.persist("a", path, keep=False).problem == "" and raised == ["a path"]


def test_changes_of_the_ledger_by_two_threads_both_count(tmp_path: Path) -> None:
    ledger = StoreLedger(str(tmp_path))
    ledger.create(10**9, 10**9)

    def add(size: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(2000):
                ledger.correct(size)

        return run

    threads = [threading.Thread(target=add(size)) for size in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.read().used == 2000 * 16
    ledger.close()


def test_a_host_makes_a_checkpoint_the_start_of_another_trial(here: Machine) -> None:
    (path,) = here.save("a", 3)
    here.keeper.fork("localhost", "b", "a", path)
    (made,) = eventually(here.keeper.poll)
    assert isinstance(made, CheckpointForked) and made.problem == "" and made.in_memory is bool(here.place)
    assert damage_of(made.path) is None and Path(made.path).name.startswith("00000003-")
    here.keeper.forget("a", keep_newest=False)
    here.keeper.fork("localhost", "c", "a", path)
    here.keeper.fork("10.0.0.7", "d", "a", path)
    answers: list[Any] = []
    while len(answers) < 2:
        answers += eventually(here.keeper.poll)
    gone, elsewhere = sorted(answers, key=lambda answer: answer.trial_id)
    assert gone.path == "" and "iteration 3 is gone" in gone.problem
    assert elsewhere.problem == "10.0.0.7 has no host of this session"
    assert damage_of(made.path) is None, "it outlives what it is of"
