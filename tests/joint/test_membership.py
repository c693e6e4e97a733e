"""Taking part in a shared folder: signs of life, who is taken for dead, and coming back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid._clock import MonotonicClock
from fluid.joint import membership
from fluid.joint.entries import Claimed, Extended, Item, Iterated, Joined, Left, Lost, Wants, entry_of, read_entry
from fluid.joint.log import LOG, LogError, SharedLog
from fluid.joint.membership import ALIVE, MEMBERS, Entry, Membership, lost_error
from fluid.processes.identity import has_ended, own_process

ROOT = Path(__file__).resolve().parents[2]
#: Says which process it is, and sleeps.
SLEEPER = (
    "import time; from fluid.processes.identity import own_process; print(own_process(), flush=True); time.sleep(600)"
)


class JumpingClock(MonotonicClock):
    """A monotonic clock that is ahead by what it is told."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


class Part:
    """A member, and what it hears; its thread can be held, as a process is that is stopped."""

    def __init__(self, shared: Path) -> None:
        self.heard: list[Entry] = []
        self.errors: list[BaseException] = []
        self.clock = JumpingClock()
        self.free = threading.Event()
        self.free.set()
        self.is_held = threading.Event()
        self.membership = Membership(shared, self.clock)
        self.membership.hear(self._hear, self.errors.append)
        self.name = self.membership.folder.name
        self.membership.start({0: "cpu"})

    def _hear(self, entries: list[Entry]) -> None:
        self.heard += entries
        if not self.free.is_set():
            self.is_held.set()
            self.free.wait(60.0)

    def hold(self) -> None:
        """Stops its thread, as of the next entry, which this makes it hear."""
        self.free.clear()
        self.membership.post(Wants(1))
        assert self.is_held.wait(30.0)

    def items(self, kind: type) -> list[tuple[str, Any]]:
        """What it has heard of a kind, and from whom."""
        return [(entry.writer, item) for entry in self.heard for item in entry.items if isinstance(item, kind)]

    def awaits(self, kind: type, count: int = 1) -> list[tuple[str, Any]]:
        eventually(lambda: len(self.items(kind)) >= count or self.errors)
        assert not self.errors
        return self.items(kind)

    @property
    def sign(self) -> bytes:
        return (self.membership.folder / ALIVE).read_bytes()


class Pen:
    """Writes to the log by hand, as a member that is not there."""

    def __init__(self, shared: Path, name: str, process: str = "") -> None:
        self._log, self._name = SharedLog(shared, name), name
        (shared / MEMBERS / name).mkdir(parents=True)
        self.write(
            Joined(folder=name, host="h", pid=1, process=process or own_process(), devices={0: "cpu"}, version="v")
        )

    def write(self, *items: Item) -> None:
        list(self._log.append(entry_of(self._name, self._log.appended, items)))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "BEAT_S", 0.1)
    monkeypatch.setattr(membership, "LEASE_S", 1.5)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[list[Part]]:
    both = [Part(tmp_path), Part(tmp_path)]
    for part in both:
        part.awaits(Joined, 2)
    yield both
    for part in both:
        part.free.set()
        part.membership.close()


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[str], str]]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", SLEEPER], env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_process_that_was_killed_has_ended(sleeper: tuple[subprocess.Popen[str], str]) -> None:
    process, name = sleeper
    assert not has_ended(name) and not has_ended(own_process())
    process.send_signal(signal.SIGSTOP)
    assert not has_ended(name)
    process.kill()
    # A zombie first: nobody has asked for its exit code.
    eventually(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert has_ended(name)
    process.wait()
    assert has_ended(name)


def test_another_process_of_the_same_number() -> None:
    place, begun = own_process().rsplit(" ", 1)
    assert has_ended(f"{place} {int(begun) - 1}")


def test_processes_of_other_machines_are_not_judged() -> None:
    boot, space, pid, begun = own_process().split()
    dead = int(begun) - 1
    assert has_ended(f"{boot} {space} {pid} {dead}")
    for place in (f"other {space}", f"{boot} pid:[1]", "", " "):
        assert not has_ended(f"{place} {pid} {dead}"), place


# -- members -----------------------------------------------------------------------------------------------------------


def test_members_hear_the_same(parts: list[Part], tmp_path: Path) -> None:
    one, other = parts
    assert one.name != other.name and one.membership.folder == tmp_path / MEMBERS / one.name
    for turn in range(5):
        one.membership.post(Wants(turn))
        other.membership.post(Wants(turn + 10), Wants(turn + 20))
    for part in parts:
        part.awaits(Wants, 15)
    assert one.heard == other.heard
    assert [entry.number for entry in one.heard] == list(range(len(one.heard)))
    for part, expected in ((one, [0, 1, 2, 3, 4]), (other, [10, 20, 11, 21, 12, 22, 13, 23, 14, 24])):
        assert [item.devices for writer, item in one.items(Wants) if writer == part.name] == expected


def test_a_member_that_leaves_says_so(parts: list[Part]) -> None:
    one, other = parts
    one.membership.post(Wants(7))
    one.membership.close()
    assert other.awaits(Left) == [(one.name, Left())]
    assert [item.devices for _, item in other.items(Wants)] == [7], "what was posted is told first"
    assert not (one.membership.folder / ALIVE).exists()
    time.sleep(2.0)
    assert not other.items(Lost)


def test_iterations_wait_for_each_other(parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = parts
    monkeypatch.setattr(membership, "GATHER_S", 1.0)
    for step in range(1, 21):
        one.membership.post(
            Iterated(
                "t", 1, iteration=step, metrics=("1",), seconds=(1.0,), at=1.0, ages=(0.0,), width=1.0, device_ids=(0,)
            )
        )
        time.sleep(0.01)
    assert [item.iteration for _, item in other.awaits(Iterated, 20)] == list(range(1, 21))
    entries = [entry for entry in other.heard if any(isinstance(item, Iterated) for item in entry.items)]
    assert len(entries) <= 3


def test_a_process_that_has_ended_is_lost_at_once(
    parts: list[Part], tmp_path: Path, sleeper: tuple[subprocess.Popen[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LEASE_S", 60.0)
    process, name = sleeper
    Pen(tmp_path, "killed", name)
    for part in parts:
        part.awaits(Joined, 3)
    process.kill()
    (writer, lost), *_ = parts[0].awaits(Lost)
    assert lost.member == "killed" and writer in (parts[0].name, parts[1].name)


def test_who_sleeps_too_long_is_lost_and_joins_again_by_another_name(parts: list[Part]) -> None:
    one, other = parts
    one.hold()
    one.membership.post(Wants(99))
    assert other.awaits(Lost)[0][1].member == one.name
    one.free.set()
    names = [writer for writer, _ in other.awaits(Joined, 3)]
    assert names[2] == f"{one.name}~2"
    assert 99 not in [item.devices for _, item in other.items(Wants)], "what it was about to tell is dropped"
    one.membership.post(Wants(100))
    eventually(lambda: (names[2], Wants(100)) in other.items(Wants))
    # It is watched again.
    one.is_held.clear()
    one.hold()
    assert other.awaits(Lost, 2)[1][1].member == names[2]
    one.free.set()
    assert other.awaits(Joined, 4)[3][0] == f"{one.name}~3"


def test_who_was_held_up_does_not_take_others_for_dead(parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = parts
    monkeypatch.setattr(membership, "LEASE_S", 3.0)
    one.hold()  # As both are where a machine sleeps: the other one finds the same sign of life when it wakes up.

    def jump() -> None:
        other.clock.ahead_s += 1000.0
        sign = other.sign
        eventually(lambda: other.sign != sign)

    for _ in range(5):
        jump()
    assert not other.items(Lost)
    for _ in range(12):
        jump()
    assert other.awaits(Lost)[0][1].member == one.name


def test_who_is_lost_is_told_by_one_that_was_lost_itself(
    parts: list[Part], tmp_path: Path, sleeper: tuple[subprocess.Popen[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member sees that another one has ended, and learns in the same moment that it was taken for dead itself."""
    monkeypatch.setattr(membership, "LEASE_S", 60.0)
    one, other = parts
    other.membership.close()
    process, name = sleeper
    killed = Pen(tmp_path, "killed", name)
    one.awaits(Joined, 3)
    one.hold()
    killed.write(Lost(one.name))
    process.kill()
    process.wait()
    time.sleep(0.2)
    one.free.set()
    eventually(lambda: (f"{one.name}~2", "killed") in [(writer, item.member) for writer, item in one.items(Lost)])


@pytest.mark.parametrize("is_under_way", [False, True])
def test_what_a_lost_member_tells_all_the_same(parts: list[Part], tmp_path: Path, is_under_way: bool) -> None:
    one, other = parts
    one.hold()
    Pen(tmp_path, "pen").write(Lost(one.name))
    if is_under_way:  # It learns of its death as it appends.
        one.membership._log.read = list  # type: ignore[method-assign, union-attr]
    one.membership.post(Wants(5), Extended("t", 7), Claimed("g", "t"))
    one.free.set()
    assert other.awaits(Extended) == [(f"{one.name}~2", Extended("t", 7))]
    assert not other.items(Claimed) and Wants(5) not in [item for _, item in other.items(Wants)]


def test_signs_of_life_that_cannot_be_written_are_no_end(parts: list[Part]) -> None:
    one, other = parts
    sign = one.membership.folder / ALIVE
    sign.unlink()
    sign.mkdir()
    assert other.awaits(Lost)[0][1].member == one.name
    sign.rmdir()
    assert other.awaits(Joined, 3)[2][0] == f"{one.name}~2"
    assert not one.errors


@pytest.mark.parametrize("damage", ["deleted", "not of this version"])
def test_a_log_that_cannot_be_read_breaks_off(parts: list[Part], tmp_path: Path, damage: str) -> None:
    if damage == "deleted":
        (tmp_path / LOG).rename(tmp_path / "elsewhere")
    else:
        list(SharedLog(tmp_path, "newer").append(b"\x91\x81\xa4what\xa3Odd"))
    for part in parts:
        eventually(lambda part=part: part.errors)
        assert isinstance(part.errors[0], LogError), part.errors
        assert lost_error(part.errors[0]) is part.errors[0]


def test_what_cannot_be_looked_for_breaks_off(parts: list[Part]) -> None:
    member, found = parts[0].membership, list[object]()
    member.call(lambda: 1, found.append)
    member.call(lambda: os.listdir("/no/such/folder"), found.append)
    eventually(lambda: parts[0].errors)
    assert found == [1]
    assert isinstance(parts[0].errors[0], FileNotFoundError)


def test_a_member_that_leaves_looks_for_nothing(parts: list[Part]) -> None:
    member, found = parts[0].membership, list[object]()
    member.close()
    member.call(lambda: 1, found.append)  # What it had asked for has come back meanwhile.
    assert not found
    assert not parts[0].errors


def test_the_log_of_members_can_be_read_alone(parts: list[Part], tmp_path: Path) -> None:
    entries = [read_entry(content) for _, content in SharedLog(tmp_path, "reader").read()]
    assert sorted(writer for writer, items in entries if isinstance(items[0], Joined)) == sorted(
        part.name for part in parts
    )
