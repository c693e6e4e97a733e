"""A host that keeps checkpoints of its lanes in memory by what they are worth there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid.backends.hosts.checkpoints.keeper import CheckpointKeeper, KeeperOptions
from fluid.backends.hosts.checkpoints.server import CheckpointServer, ServedFolders
from fluid.engine.commands import CheckpointValue
from fluid.lane.checkpoints.files import copy_atomically, locked_for_reading
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.seal import damage_of
from fluid.lane.checkpoints.store import CheckpointStore
from fluid.lane.protocol import CheckpointMoved

SIZE = 1000


class Machine:
    """A host's folders; its keeper allows so many bytes in memory, and keeps an eighth of them free."""

    def __init__(self, folder: Path, name: str = "localhost", limit: int = 9_250) -> None:
        self.name, self.limit = name, limit
        self.run = folder / f"run-{name}"
        self.memory = folder / f"fluid-0123456789abcdef-{name}"
        self.memory.mkdir(parents=True)
        self.moved: list[CheckpointMoved] = []
        self.keeper = self.make_keeper()

    def make_keeper(self) -> CheckpointKeeper:
        options = KeeperOptions(self.name, str(self.memory), str(self.run), self.limit, key=b"key")
        return CheckpointKeeper(options, lambda: None)

    def lane(self, number: int = 0) -> CheckpointStore:
        return CheckpointStore(number, str(self.run), str(self.memory))

    def in_memory(self) -> list[str]:
        """The checkpoints in memory: their trials and iterations."""
        return sorted(f"{path.parent.name}{int(path.name[:8])}" for path in self.memory.glob("*/[0-9]*"))

    def on_disk(self) -> list[str]:
        paths = self.run.glob("trials/*/checkpoints/[0-9]*")
        return sorted(f"{path.parent.parent.name}{int(path.name[:8])}" for path in paths)

    def used(self) -> int:
        return StoreLedger(str(self.memory)).read().used

    def settled(self, in_memory: list[str]) -> None:
        """Waits until these checkpoints, and no others, are in memory, and the ledger says so."""
        eventually(lambda: self.in_memory() == sorted(in_memory) and self.used() == SIZE * len(in_memory))

    def prefetch(self, trial_id: str, path: str, source: tuple[str, int] | None = None) -> None:
        self.keeper.prefetch(self.name, trial_id, path, source)

    def heard(self) -> list[CheckpointMoved]:
        self.moved += self.keeper.poll()
        return self.moved


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def build(**options: Any) -> Machine:
        made.append(Machine(tmp_path, **options))
        return made[-1]

    yield build
    for machine in made:
        machine.keeper.close()


@pytest.fixture
def here(make: Callable[..., Machine]) -> Machine:
    return make()


def save(store: CheckpointStore, trial_id: str, iteration: int = 1, size: int = SIZE, durable: bool = False) -> str:
    def write(folder: str) -> None:
        Path(folder, "data").write_bytes(os.urandom(size))

    return store.save(trial_id, iteration, write, durable=durable).path


def test_what_is_worth_least_goes_to_disk_before_memory_is_full(here: Machine) -> None:
    here.keeper.value({"a": CheckpointValue(0.9), "b": CheckpointValue(0.1), "c": CheckpointValue(0.0, pinned=True)})
    lane = here.lane()
    for trial_id in "abcdefgh":
        save(lane, trial_id)
    here.settled(["a1", "b1", "c1", "d1", "e1", "f1", "g1", "h1"])
    save(lane, "i")
    here.settled(["a1", "c1", "d1", "e1", "f1", "g1", "h1", "i1"])
    assert here.on_disk() == ["b1"]
    eventually(lambda: bool(here.heard()))
    (moved,) = here.moved
    assert (moved.in_memory, moved.host) == (False, "localhost") and damage_of(moved.path) is None
    lane.delete("h")
    save(lane, "a", 2)  # The one before is worth nothing from now on.
    here.settled(["a1", "a2", "c1", "d1", "e1", "f1", "g1", "i1"])
    save(lane, "j")
    here.settled(["a2", "c1", "d1", "e1", "f1", "g1", "i1", "j1"])
    assert here.on_disk() == ["a1", "b1"]


def test_a_lane_that_finds_no_room_waits_for_what_is_worth_less(here: Machine) -> None:
    lane, sizes = here.lane(), {"a": 3, "b": 1, "c": 3}
    here.keeper.value({"a": CheckpointValue(0.9), "b": CheckpointValue(0.8), "c": CheckpointValue(0.2)})
    for trial_id, size in sizes.items():
        save(lane, trial_id, size=size * SIZE)
    assert here.in_memory() == ["a1", "b1", "c1"], "there is just room for them"
    assert save(lane, "d", size=3 * SIZE).startswith(str(here.memory))
    eventually(lambda: here.in_memory() == ["a1", "b1", "d1"])


@pytest.mark.usefixtures("many_descriptors")
def test_room_is_made_where_the_host_has_more_files_open_than_select_takes(make: Callable[..., Machine]) -> None:
    here = make()
    here.keeper.value({name: CheckpointValue(0.1 * worth) for worth, name in enumerate("abcdefghi")})
    lane = here.lane()
    for trial_id in "abcdefghi":
        save(lane, trial_id)
    here.settled(["b1", "c1", "d1", "e1", "f1", "g1", "h1", "i1"])


def test_what_is_worth_less_than_all_in_memory_goes_to_disk(here: Machine) -> None:
    lane = here.lane()
    names = "abcdefgh"
    here.keeper.value({name: CheckpointValue(1.0, pinned=True) for name in names} | {"z": CheckpointValue(0.0)})
    save(lane, "z")  # Its size is known now.
    for name in names:
        save(lane, name)
    here.settled([f"{name}1" for name in names])
    assert here.on_disk() == ["z1"]
    here.keeper.value({name: CheckpointValue(1.0, pinned=True) for name in "ij"})
    save(lane, "i")
    save(lane, "j")
    save(lane, "z", 2, size=9 * SIZE)
    eventually(lambda: "z2" in here.on_disk() and "z2" not in here.in_memory())


def test_what_is_being_read_stays_until_it_was(here: Machine) -> None:
    lane = here.lane()
    here.keeper.value({name: CheckpointValue(1.0, pinned=True) for name in "bcdefghi"})
    paths = [save(lane, name) for name in "abcdefgh"]
    with locked_for_reading(paths[0]) as exists:
        assert exists
        save(lane, "i")
        eventually(lambda: "a1" in here.on_disk())
        assert os.path.isdir(paths[0]), "a reader has it open"


def test_readers_find_what_moves_at_any_moment(here: Machine) -> None:
    lane, other = here.lane(), here.lane(1)
    paths = {name: save(lane, name) for name in "abcdefgh"}
    for number in range(30):
        paths[f"n{number}"] = save(lane, f"n{number}")
        for name, path in paths.items():
            for place in other.places(name, path):
                with locked_for_reading(place) as exists:
                    if exists:
                        assert damage_of(place) is None
                        break
            else:
                raise AssertionError(f"{path} is gone")
    eventually(lambda: here.used() <= 8 * SIZE)


def killed(folder: str, run: str, ready: Any) -> None:
    """A lane that is killed in the middle of a save."""

    def write(draft: str) -> None:
        Path(draft, "data").write_bytes(bytes(4 * SIZE))
        ready.set()
        signal.pause()

    CheckpointStore(7, run, folder).save("a", 2, write)


def test_what_a_killed_lane_had_begun_to_write_is_deleted_and_counted_no_more(here: Machine) -> None:
    save(here.lane(7), "a")
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=killed, args=(str(here.memory), str(here.run), ready))
    process.start()
    assert ready.wait(60.0)
    process.kill()
    process.join()
    assert list(here.memory.glob("a/.*"))
    here.keeper.note_lanes(0, lost=8)
    here.keeper.note_lanes(0, lost=7)
    eventually(lambda: not list(here.memory.glob("a/.*")))
    here.settled(["a1"])


def test_a_full_disk_costs_nothing_but_room(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = here.lane()
    names = "abcdefgh"
    paths = [save(lane, name) for name in names]

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    save(lane, "i")
    save(lane, "j")
    assert all(map(os.path.isdir, paths)), "what cannot be moved stays"
    assert not list(here.run.glob("trials/*/checkpoints/.*")), "no part of a copy is left"
    monkeypatch.undo()
    eventually(lambda: here.used() <= 8 * SIZE)


# -- prefetching -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_from_disk_over_what_is_worth_less(here: Machine) -> None:
    lane = here.lane()
    path = save(lane, "wanted", durable=True)
    for name in "abcdefgh":
        save(lane, name)
    here.keeper.value({"wanted": CheckpointValue(0.7), "a": CheckpointValue(0.8), "b": CheckpointValue(0.6)})
    here.prefetch("wanted", path)
    here.settled([f"{name}1" for name in "abdefgh"] + ["wanted1"])
    eventually(lambda: any(moved.in_memory for moved in here.heard()))
    assert [Path(moved.path).parent.name for moved in here.moved if moved.in_memory] == ["wanted"]
    assert next(lane.places("wanted", path)).startswith(str(here.memory))
    here.prefetch("wanted", path)
    eventually(lambda: sum(moved.in_memory for moved in here.heard()) == 2)
    # It is still on disk, and leaves memory without being written again.
    here.keeper.value({"wanted": CheckpointValue(0.0)})
    save(lane, "i")
    here.settled([f"{name}1" for name in "abdefghi"])
    assert damage_of(path) is None
    lane.delete("wanted")
    assert here.on_disk() == ["c1"]


def test_a_pinned_one_that_has_no_room_comes_once_there_is_some(here: Machine) -> None:
    lane, names = here.lane(), "abcdefgh"
    paths = {name: save(lane, name, durable=True) for name in ("first", "second", "unpinned")}
    here.keeper.value({name: CheckpointValue(1.0, pinned=True) for name in (*names, "first", "second")})
    here.keeper.value({"unpinned": CheckpointValue(0.9)})
    for name in names:
        save(lane, name)
    for name, path in paths.items():
        here.prefetch(name, path)
    save(lane, "a", 2)  # Of the two, one goes to disk; there is still no room for another.
    here.settled(["a2", *(f"{name}1" for name in "bcdefgh")])
    here.keeper.value({"a": CheckpointValue(0.05)})
    here.settled([*(f"{name}1" for name in "bcdefgh"), "first1"])
    # The second starts before there is room for it.
    here.keeper.value({"second": CheckpointValue(0.05)})
    lane.delete("b")
    save(lane, "z")
    here.settled([*(f"{name}1" for name in "cdefgh"), "first1", "z1"])
    lane.delete("c")
    save(lane, "y")
    here.settled([*(f"{name}1" for name in "defgh"), "first1", "y1", "z1"])


def test_a_damaged_one_does_not_come_into_memory(here: Machine) -> None:
    lane = here.lane()
    bad, good = (save(lane, name, durable=True) for name in ("bad", "good"))
    Path(bad, "data").write_bytes(bytes(SIZE))
    here.prefetch("bad", bad)
    here.prefetch("gone", str(here.run / "trials/gone/checkpoints/00000001-0-9"))
    here.prefetch("good", good)
    here.settled(["good1"])


def test_a_checkpoint_comes_from_another_machine(make: Callable[..., Machine]) -> None:
    here, there = make(), make(name="10.0.0.7")
    path = save(there.lane(3), "a")
    served = ServedFolders(str(there.run), str(there.run), str(there.memory))
    server = CheckpointServer("127.0.0.1", b"key", served)
    try:
        hidden = there.memory.rename(there.memory.parent / "hidden")
        server.close()
        server = CheckpointServer("127.0.0.1", b"key", ServedFolders(str(there.run), str(there.run), str(hidden)))
        here.keeper.prefetch("10.0.0.7", "a", path, server.address)
        here.prefetch("a", path, server.address)
        here.settled(["a1"])
        eventually(lambda: bool(here.heard()))
        assert [damage_of(moved.path) for moved in here.moved] == [None]
    finally:
        server.close()
        hidden.rename(there.memory)


def test_a_trial_that_ended_meanwhile_is_not_brought(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = here.lane()
    path, other = save(lane, "a", durable=True), save(lane, "b", durable=True)
    copied = shutil.copytree

    def copy(source: str, *args: Any, **options: Any) -> Any:
        done = copied(source, *args, **options)
        if source == path:
            shutil.rmtree(source)
        return done

    monkeypatch.setattr(shutil, "copytree", copy)
    here.prefetch("a", path)
    here.prefetch("b", other)
    here.settled(["b1"])


# -- several hosts, and none -----------------------------------------------------------------------------------------


def test_of_several_hosts_on_a_machine_one_makes_room_and_another_takes_over(here: Machine) -> None:
    second = here.make_keeper()
    try:
        lane = here.lane()
        for number in range(12):
            save(lane, f"n{number}")
        eventually(lambda: here.used() <= 8 * SIZE)
        here.keeper.close()
        for number in range(12, 24):
            save(lane, f"n{number}")
        eventually(lambda: here.used() <= 8 * SIZE)
    finally:
        second.close()


def test_without_host_memory_nothing_happens(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(KeeperOptions("localhost", "", str(tmp_path), 100), lambda: None)
    keeper.value({"a": CheckpointValue(1.0)})
    keeper.prefetch("localhost", "a", str(tmp_path), None)
    keeper.note_lanes(1, lost=0)
    keeper.forget("a", keep_newest=False)
    assert keeper.poll() == []
    keeper.close()


def test_a_session_that_goes_on_counts_what_is_there(here: Machine) -> None:
    save(here.lane(), "a")
    here.keeper.close()
    copy_atomically(str(next(here.memory.glob("a/*"))), str(here.memory / "b"))
    here.keeper = here.make_keeper()
    here.settled(["a1", "b1"])
