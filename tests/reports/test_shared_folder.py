"""fluid doctor --shared: whether a folder does for several drivers, by what it does."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fluid.cli import main
from fluid.joint import log, meeting
from fluid.joint.meeting import Meeting, Other, Spread, meet
from fluid.joint.probe import FileSystem, Probe, _warnings, file_system_of, probe
from fluid.reports.shared_folder import probe_json
from tests.json_fields import undescribed

ROOT = Path(__file__).resolve().parents[2]
MOUNTS = r"""21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
30 21 0:30 / /home rw,relatime - nfs4 server:/home rw,vers=4.2,soft,nocto,acdirmin=30,hard
31 30 0:31 / /home/my\040bucket rw,nosuid - fuse mountpoint-s3 rw,user_id=0
32 21 0:32 / /home2 rw - fuse.s3fs s3fs rw
a line that is none
"""
NFS = FileSystem("nfs4", "server:/home", "/home", ("rw", "vers=4.2"))
GOOD = Spread(0.004, 0.008, 0.01, 20)
THERE = Other("there", 7, False, GOOD, GOOD)


def run(*arguments: str, patch: str = "", folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs fluid doctor and all processes that it starts with a changed file system."""
    (folder / "sitecustomize.py").write_text(patch)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "fluid.cli", "doctor", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def settled(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    for name, value in {"SETTLES_S": 0.1, "ROUNDS": 3, "RACES": 5, **values}.items():
        monkeypatch.setattr(meeting, f"_{name}", value)


def all_meet(*folders: Path, wait_s: float = 20.0) -> list[Meeting]:
    """Has several take part, each in a thread."""
    found: list[Meeting | None] = [None] * len(folders)

    def take_part(place: int) -> None:
        found[place] = meet(folders[place], wait_s)

    threads = [threading.Thread(target=take_part, args=(place,)) for place in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for result in found if result is not None]


# --- What one machine tests


def test_a_good_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    found = probe(tmp_path)
    assert found.problems == []
    assert found.is_usable
    assert set(found.given.values()) == {True}
    assert found.append is not None
    assert found.look is not None
    assert found.appends_per_s is not None
    assert 0.0 < found.look.median_s <= found.look.p95_s < found.append.p95_s
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def link(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    found = probe(tmp_path)
    (problem,) = found.problems
    assert "without hard links" in problem
    assert os.strerror(code) in problem
    assert "NFS" in problem
    assert found.given == {"files": True, "rename": True, "links": False, "log": None, "race": None}
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "link", link)
    bucket = FileSystem("fuse.gcsfuse", "bucket", "/data", ("rw",))
    monkeypatch.setattr("fluid.joint.probe.file_system_of", lambda folder: bucket)
    (problem,) = probe(tmp_path).problems
    assert "object store (fuse.gcsfuse bucket)" in problem


def test_links_that_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda here, there: Path(there).write_bytes(Path(here).read_bytes()))
    (problem,) = probe(tmp_path).problems
    assert "a name that is taken" in problem


def test_files_that_cannot_be_synchronised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    found = probe(tmp_path)
    assert found.given["files"] is False
    assert found.problems == [f"{tmp_path} refuses files: Invalid argument."]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_another(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert probe(tmp_path).problems == [f"{tmp_path} refuses files: Permission denied."]


#: A link looks whether the name is taken, and takes it a moment later.
NO_COMPARE_AND_SWAP = """
import os, time

def link(here, there):
    if os.path.exists(there):
        raise FileExistsError(17, "File exists", there)
    time.sleep(0.002)
    with open(here, "rb") as source:
        content = source.read()
    with open(f"{there}.{os.getpid()}", "wb") as target:
        target.write(content)
    os.replace(f"{there}.{os.getpid()}", there)

os.link = link
"""
#: What another process has made is never seen.
BLIND = """
import os
own, opened, linked = set(), os.open, os.link

def link(here, there):
    linked(here, there)
    own.add(os.path.basename(there))

def look(path, *arguments, dir_fd=None, **options):
    if dir_fd is not None and path.isdigit() and path not in own:
        raise FileNotFoundError(2, "No such file or directory", path)
    return opened(path, *arguments, dir_fd=dir_fd, **options)

os.open, os.link = look, link
import fluid.joint.probe
fluid.joint.probe._HANGS_S = 2.0
"""


@pytest.mark.parametrize(
    ("patch", "said"),
    [(NO_COMPARE_AND_SWAP, "lost or doubled entries"), (BLIND, "did not show to one process within 2 s")],
    ids=["lost", "blind"],
)
def test_processes_that_race_find_what_one_alone_does_not(tmp_path: Path, patch: str, said: str) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    done = run("--shared", str(shared), "--json", patch=patch, folder=own)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["given"] == {"files": True, "rename": True, "links": True, "log": True, "race": False}
    assert said in " ".join(found["problems"])
    assert list(shared.iterdir()) == []


# --- What several machines test


@pytest.mark.parametrize("count", [2, 3])
def test_those_that_test_one_folder_find_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    settled(monkeypatch, SETTLES_S=0.5)
    found = all_meet(*[tmp_path] * count)
    assert [result.problems for result in found] == [[]] * count
    for result in found:
        assert len(result.others) == count - 1
        for other in result.others:
            assert (other.pid, other.is_here) == (os.getpid(), True)
            assert other.entry.times == other.content.times == 3
            assert 0.0 < other.entry.median_s <= other.entry.worst_s
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_killed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch, DEAD_S=0.0)
    room = meeting._Room(tmp_path / meeting.MEETING)
    room._sign()
    room._say("here killed 1 boot")
    found = all_meet(tmp_path, tmp_path)
    assert [len(result.others) for result in found] == [1, 1]
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    for result in all_meet(one, two, wait_s=0.3):
        assert result.others == ()
        assert "no other fluid doctor was seen" in result.problems[0]
    assert list(one.iterdir()) == list(two.iterdir()) == []


def test_one_that_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch, ANSWERS_S=0.3)
    gone = threading.Event()

    def leaves() -> None:
        room = meeting._Room(tmp_path / meeting.MEETING)
        room._say("here gone 1 boot")
        while not room._names:
            room._sign()
            room._read()
            gone.wait(0.01)
        room.leave()

    thread = threading.Thread(target=leaves)
    thread.start()
    result = meet(tmp_path, 10.0)
    thread.join()
    assert "nothing new of gone was seen" in result.problems[0]


def test_a_file_system_that_shows_names_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[[str, int], bytes] = log._read
    first_seen: dict[tuple[int, str], float] = {}
    clock = meeting.MonotonicClock()

    def late(name: str, folder: int) -> bytes:
        content = read(name, folder)
        if clock.now() < first_seen.setdefault((threading.get_ident(), name), clock.now()) + 0.3:
            raise FileNotFoundError
        return content

    monkeypatch.setattr(log, "_read", late)
    settled(monkeypatch, ROUNDS=1, RACES=1)
    for result in all_meet(tmp_path, tmp_path):
        assert result.problems == []
        (other,) = result.others
        assert other.entry.worst_s > 0.3 > other.content.worst_s


# --- What is said


@pytest.mark.parametrize(
    ("folder", "kind", "is_object_store"),
    [
        ("/home/me", "nfs4", False),
        ("/home/my bucket/x", "fuse", True),
        ("/home2", "fuse.s3fs", True),
        ("/homes", "ext4", False),
    ],
)
def test_the_mount_of_a_folder(folder: str, kind: str, is_object_store: bool) -> None:
    found = file_system_of(Path(folder), MOUNTS)
    assert found is not None
    assert (found.type, found.is_object_store) == (kind, is_object_store)


def test_the_mount_is_not_known() -> None:
    assert file_system_of(Path("/home"), "nothing") is None


def test_warnings() -> None:
    good = Probe(Path("/home"), NFS, {}, [], [])
    slow = Spread(0.01, 0.02, 4.0, 20)
    cached = replace(NFS, options=("rw", "acdirmin=30"))
    for said, found in {
        "": good,
        "An append is slow: 0.2 s": replace(good, append=Spread(0.2, 0.3, 0.3, 5)),
        "A look at the log is slow: 8 ms": replace(good, look=Spread(0.008, 0.3, 0.3, 5)),
        "ext4 is a file system of this machine": replace(good, file_system=FileSystem("ext4", "/dev/sda", "/", ())),
        "is mounted with nocto": replace(good, file_system=file_system_of(Path("/home"), MOUNTS)),
        "up to 4 s until an answer of there": replace(good, meeting=Meeting((replace(THERE, entry=slow),))),
        "acdirmin=30": replace(good, file_system=cached, meeting=Meeting((replace(THERE, content=slow),))),
        "(negative_timeout, entry_timeout": replace(
            good,
            file_system=FileSystem("fuse.bindfs", "/", "/", ()),
            meeting=Meeting((replace(THERE, content=slow),)),
        ),
        "of this machine, so": replace(good, meeting=Meeting((replace(THERE, is_here=True),))),
    }.items():
        told = list(_warnings(found))
        assert (said in told[0]) if said else told == []


# --- The command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--shared", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "The folder gives hard links that fail where the name is taken." in printed
    assert printed.endswith("Several drivers can share this folder.\n")


def test_the_command_says_that_no_other_machine_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--shared", str(tmp_path), "--wait", "0.2"]) == 1
    assert "That several machines can was not shown." in " ".join(capsys.readouterr().out.split())


def test_two_commands(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fluid.cli", "doctor", "--shared", str(tmp_path), "--wait", "60"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in started:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        assert "entry, answer" in output
        assert "is of this machine" in output
    assert list(tmp_path.iterdir()) == []


def test_every_field_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--shared", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    whole = probe_json(Probe(tmp_path, NFS, {}, [], [], meeting=Meeting((THERE,))))
    names = [*found, *found["file_system"], *found["given"], *found["append"], *whole["others"][0]]
    assert undescribed({*names, *found["look"]}, probe_json) == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shared", "/does/not/exist"], "is no folder"),
        (["--wait", "3"], "give --shared DIR too"),
        (["--shared", "/tmp", "--wait", "-1"], "wait='-1'"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err
