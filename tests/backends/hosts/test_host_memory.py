"""Folders in host memory: a process that uses one holds its lock, and a folder without a holder is swept up."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from fluid.backends.hosts import memory as host_memory
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.paths import open_folder
from fluid.lane.checkpoints.store import CheckpointStore


@pytest.fixture
def ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the RAM disk."""
    path = tmp_path / "ram"
    path.mkdir()
    monkeypatch.setattr(host_memory, "RAM_DISK", str(path))
    return path


def save(memory: Path, run: Path, text: str) -> str:
    """Has a trial saved to host memory."""

    def fill(folder: str) -> None:
        (Path(folder) / "state").write_text(text)

    StoreLedger(str(memory)).create(10**9, 10**9)
    stored = CheckpointStore(0, str(run), str(memory)).save("a", 3, fill)
    assert stored.in_memory
    return stored.path


def test_a_folder_in_use_stays_and_one_that_is_not_goes(ram: Path, tmp_path: Path) -> None:
    folder, run = ram / "fluid-1", tmp_path / "run"
    run.mkdir()
    lock = host_memory.enter(str(folder), str(run), temporary=False)
    path = save(folder, run, "third")
    host_memory.sweep()
    assert os.path.isdir(path)
    os.close(lock)
    host_memory.sweep()
    assert os.listdir(ram) == []
    settled = next(filter(os.path.isdir, CheckpointStore(1, str(run)).places("a", path)))  # As a resumed run does.
    assert (Path(settled) / "state").read_text() == "third"


@pytest.mark.parametrize("how", ["moved", "exchanged", "deleted"])
def test_checkpoints_of_a_run_folder_that_is_not_in_its_place_wait_for_it_but_not_for_ever(
    ram: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    folder, run, elsewhere = ram / "fluid-1", tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    os.close(host_memory.enter(str(folder), str(run), temporary=False))
    path = save(folder, run, "third")
    if how == "deleted":
        run.rmdir()
    else:
        run.rename(elsewhere)
    if how == "exchanged":
        run.mkdir()
    host_memory.sweep()
    assert os.path.isdir(path) and str(folder) in caplog.text and "7.0 days" in caplog.text
    assert os.path.isdir(run) == (how == "exchanged") and not (how == "exchanged" and os.listdir(run))
    if how == "deleted":
        for parent, _, _ in os.walk(folder):
            os.utime(parent, (0, 0))
        host_memory.sweep()
    else:
        host_memory.reclaim(str(folder), str(elsewhere), 0.0)
        settled = next(filter(os.path.isdir, CheckpointStore(1, str(elsewhere)).places("a", path)))
        assert (Path(settled) / "state").read_text() == "third"
    assert os.listdir(ram) == []


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_who_used_the_run_folder_knows_where_it_is(ram: Path, tmp_path: Path, how: str) -> None:
    folder, run, elsewhere = ram / "fluid-1", tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    lock, held = host_memory.enter(str(folder), str(run), temporary=False), open_folder(str(run))
    path = save(folder, run, "third")
    if how == "moved":
        run.rename(elsewhere)
    else:
        run.rmdir()
    host_memory.settle(str(folder), lock, held)
    for descriptor in (lock, held):
        os.close(descriptor)
    assert os.listdir(ram) == [] and not run.exists()
    if how == "moved":
        assert any(map(os.path.isdir, CheckpointStore(1, str(elsewhere)).places("a", path)))


def test_only_folders_of_sessions_in_host_memory_are_reclaimed(ram: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "fluid-1", ram / "other"):
        os.close(host_memory.enter(str(folder), str(tmp_path), temporary=False))
        path = save(folder, tmp_path, "third")
        host_memory.reclaim(str(folder), str(tmp_path / "run"), 0.0)
        assert os.path.isdir(path)
    host_memory.reclaim(str(ram / "fluid-gone"), str(tmp_path / "run"), 0.0)
    assert not (tmp_path / "run").exists()


def test_what_another_program_has_reserved_is_left_to_it(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's object store takes its memory as it is filled: until then it counts as free."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: namedtuple("Usage", "total free")(100, 80))
    left = [1000]
    monkeypatch.setattr(host_memory, "memory_left", lambda: left[0])
    assert host_memory.checkpoint_bytes(str(ram)) == 68
    assert host_memory.checkpoint_bytes(str(ram), taken=20) == 85, "what checkpoints take is theirs"
    assert host_memory.checkpoint_bytes(str(ram), reserved=30.0) == 42
    assert host_memory.checkpoint_bytes(str(ram), reserved=95.0) == 0
    assert host_memory.checkpoint_bytes(str(ram), reserved=101.0) == 68, "it is elsewhere"
    left[0] = 40
    assert host_memory.checkpoint_bytes(str(ram)) == 34, "the control group allows less than the RAM disk has"
    assert host_memory.checkpoint_bytes("", reserved=30.0) == 0


def test_of_a_temporary_run_nothing_is_left(ram: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    os.close(host_memory.enter(str(ram / "fluid-1"), str(run), temporary=True))
    host_memory.sweep()
    assert os.listdir(ram) == [] and not run.exists()


def test_the_last_user_is_told_so(ram: Path) -> None:
    first, second = (host_memory.enter(str(ram / "fluid-1"), "/run", temporary=False) for _ in range(2))
    assert not host_memory.is_last(first)
    os.close(second)
    assert host_memory.is_last(first)
    os.close(first)


def test_what_is_written_to_the_lock_by_accident_does_not_spoil_the_folder(ram: Path, tmp_path: Path) -> None:
    """As by a trial, which inherits it."""
    lock = host_memory.enter(str(ram / "fluid-1"), str(tmp_path), temporary=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(lock, b"garbage")
    host_memory.settle(str(ram / "fluid-1"), lock)
    os.close(lock)
    assert os.listdir(ram) == []


HOLDER = """
import os, sys
from fluid.backends.hosts import memory
memory.enter(sys.argv[1], sys.argv[2], temporary=False)
if os.fork() == 0:  # As a lane does, which comes from the fork server.
    os.close(1)
    sys.stdin.read()
    os._exit(0)
print("in", flush=True)
os._exit(0)
"""


def test_the_lock_is_held_as_long_as_any_process_that_was_forked_from_its_owner(ram: Path, tmp_path: Path) -> None:
    folder = ram / "fluid-1"
    command = [sys.executable, "-c", HOLDER, str(folder), str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.read() == "in\n"
        owner.wait()
        host_memory.sweep()
        assert folder.is_dir()
        lock = os.open(folder / ".session", os.O_RDWR)
        assert not host_memory.is_last(lock)
        assert owner.stdin is not None
        owner.stdin.close()  # The forked process ends.
        fcntl.flock(lock, fcntl.LOCK_EX)  # Waits for that.
        os.close(lock)
    host_memory.sweep()
    assert not folder.exists()


def test_what_is_not_this_users_or_not_a_sessions_is_left_alone(
    ram: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = json.dumps({"run_folder": str(tmp_path / "run"), "temporary": True})
    (tmp_path / "run").mkdir()
    for folder in (ram / "fluid-other", ram / "elsewhere", tmp_path / "hidden"):
        folder.mkdir()
        (folder / ".session").write_text(facts)
    (ram / "fluid-link").symlink_to(tmp_path / "hidden")
    (ram / "fluid-bare").mkdir()
    (ram / "fluid-bare" / "file").touch()
    (ram / "fluid-broken").mkdir()
    (ram / "fluid-broken" / ".session").write_text("{")
    (ram / "fluid-file").touch()
    before = sorted(os.listdir(ram))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.stat(ram).st_uid + 1)
        host_memory.sweep()
        with pytest.raises(PermissionError):
            host_memory.enter(str(ram / "fluid-other"), "/run", temporary=False)
    assert sorted(os.listdir(ram)) == before
    host_memory.sweep()
    assert sorted(os.listdir(ram)) == [name for name in before if name != "fluid-other"]
    assert not (tmp_path / "run").exists()  # That of fluid-other.
    assert (tmp_path / "hidden" / ".session").exists()


def test_what_a_session_leaves_that_was_killed_before_it_used_its_folder_goes(ram: Path) -> None:
    (ram / "fluid-1").mkdir()
    (ram / "fluid-2").mkdir()
    (ram / "fluid-2" / ".session").touch()
    host_memory.sweep()
    assert os.listdir(ram) == []


def test_a_full_ram_disk_is_left_as_it_was(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        host_memory.enter(str(ram / "fluid-1"), "/run", temporary=False)
    assert os.listdir(ram) == []


def test_where_there_is_no_ram_disk_there_is_nothing_to_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "RAM_DISK", "/proc/there/is/none")
    host_memory.sweep()
    with pytest.raises(FileNotFoundError):
        host_memory.enter("/proc/there/is/none/fluid-1", "/run", temporary=False)
