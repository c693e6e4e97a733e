"""Checkpoints that are made of those of other trials, and the files of these trials."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fluid.backends.hosts.checkpoints.memory import MemoryFolder
from fluid.keeping import FACTS
from fluid.lane.checkpoints import files
from fluid.lane.checkpoints.files import locked_for_reading
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.paths import own_folder
from fluid.lane.checkpoints.seal import LANE_STATE, damage_of, held_bytes, is_shared
from fluid.lane.checkpoints.store import CheckpointStore, persist_checkpoints
from fluid.lane.checkpoints.trial_files import copy_trial_files

SIZE = 1000


def write(folder: str) -> None:
    Path(folder, "state").mkdir()
    Path(folder, "state", "data").write_bytes(os.urandom(SIZE))


def make(tmp_path: Path, lane_id: int = 0) -> CheckpointStore:
    (tmp_path / "memory").mkdir(exist_ok=True)
    StoreLedger(str(tmp_path / "memory")).create(10**6, 10**6)
    return CheckpointStore(lane_id, str(tmp_path / "run"), str(tmp_path / "memory"))


def used(tmp_path: Path) -> int:
    return StoreLedger(str(tmp_path / "memory")).read().used


def counted(tmp_path: Path) -> int:
    """Bytes in memory, as the host counts them."""
    found, _ = MemoryFolder(str(tmp_path / "memory"), str(tmp_path / "run")).scan()
    return sum(one.bytes for one in found)


def data(path: str) -> bytes:
    return Path(path, "state", "data").read_bytes()


def test_forks_take_no_room_and_outlive_what_they_are_of(tmp_path: Path) -> None:
    store = make(tmp_path)
    original = store.save("a", 3, write).path
    state = data(original)
    forks = [store.fork(f"b{number}", original) for number in range(4)]
    assert all(fork.in_memory and data(fork.path) == state for fork in forks)
    assert used(tmp_path) == SIZE == counted(tmp_path) and held_bytes(original) == SIZE // 5
    store.delete("a")
    assert used(tmp_path) == SIZE == counted(tmp_path), "the others have the bytes still"
    for number in range(4):
        assert damage_of(forks[number].path) is None
        store.delete(f"b{number}")
    assert used(tmp_path) == 0 == counted(tmp_path)


def test_code_that_is_given_a_fork_changes_no_other_one(tmp_path: Path) -> None:
    store = make(tmp_path)
    original = store.save("a", 3, write).path
    state, fork = data(original), store.fork("b", original).path
    own = store.own("b", fork)
    assert own == fork and not is_shared(fork) and not is_shared(original) and used(tmp_path) == 2 * SIZE
    Path(own, "state", "data").write_bytes(b"")
    assert data(original) == state
    assert store.own("a", original) == original and used(tmp_path) == 2 * SIZE, "nothing is to be done twice"


def test_without_room_in_memory_code_is_given_a_copy_on_disk(tmp_path: Path) -> None:
    store = make(tmp_path)
    original = store.save("a", 3, write).path
    fork = store.fork("b", original).path
    StoreLedger(str(tmp_path / "memory")).create(SIZE, SIZE)
    own = store.own("b", fork)
    assert own.startswith(str(tmp_path / "run")) and data(own) == data(original) and used(tmp_path) == SIZE


def test_what_is_being_read_is_copied(tmp_path: Path) -> None:
    """Its reader may have been given the files themselves, before they were anyone else's."""
    store = make(tmp_path)
    original = store.save("a", 3, write).path
    with locked_for_reading(original):
        fork = store.fork("b", original)
    assert not is_shared(original) and data(fork.path) == data(original)


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_there_can_be_no_links_files_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(error, os.strerror(error))

    store = make(tmp_path)
    original = store.save("a", 3, write, durable=True).path
    monkeypatch.setattr(files.os, "link", refuse)
    fork = store.fork("b", original)
    assert data(fork.path) == data(original) and not is_shared(original) and not fork.in_memory
    assert [path.name for path in Path(fork.path).parent.iterdir()] == [Path(fork.path).name], "no draft is left"


def test_a_saved_state_is_found_where_it_has_gone_and_no_other_one_is_taken(tmp_path: Path) -> None:
    lane, host = make(tmp_path), make(tmp_path, lane_id=-1)
    first, second = lane.save("a", 3, write), lane.save("a", 4, write)
    state = data(second.path)
    folder = MemoryFolder(str(tmp_path / "memory"), str(tmp_path / "run"))
    (moved,) = [one for one in folder.scan()[0] if one.path == second.path]
    assert folder.to_disk(moved) is not None
    fork = host.fork_saved("b", "a", second.path)
    assert data(fork.path) == state and not fork.in_memory
    lane.delete("a")
    assert os.path.isdir(fork.path)
    lane.save("a", 2, write)
    with pytest.raises(OSError, match="iteration 3"):
        host.fork_saved("c", "a", first.path)
    assert not (tmp_path / "run" / "trials" / "c").exists()


def test_a_damaged_state_is_none_to_start_from(tmp_path: Path) -> None:
    store = make(tmp_path)
    original = store.save("a", 3, write).path
    os.truncate(Path(original, "state", "data"), 1)
    with pytest.raises(OSError, match=r"iteration 3 is damaged: state/data has 1 bytes"):
        store.fork_saved("b", "a", original)


def test_another_copy_of_a_state_serves_where_the_first_one_is_damaged_or_being_deleted(tmp_path: Path) -> None:
    store = make(tmp_path)
    original = store.save("a", 3, write).path
    state = data(original)
    folder = MemoryFolder(str(tmp_path / "memory"), str(tmp_path / "run"))
    (kept,) = [one for one in folder.scan()[0] if one.path == original]
    assert folder.to_disk(kept) is not None
    shutil.copytree(store.fork("c", store.fork_saved("b", "a", original).path).path, original, dirs_exist_ok=True)
    os.truncate(Path(original, "state", "data"), 1)
    assert data(store.fork_saved("d", "a", original).path) == state


def test_a_state_of_another_run_comes_with_its_trials_files_and_not_with_those_of_a_namesake(tmp_path: Path) -> None:
    def keep(folder: str) -> None:
        write(folder)
        Path(folder, LANE_STATE).write_bytes(b"")
        Path(folder, FACTS).write_text('{"value": 1.0}')

    other = CheckpointStore(0, str(tmp_path / "other"))
    kept = other.save("a", 3, keep, keep=True).path
    for run, text in (("other", "theirs"), ("run", "ours")):
        folder = Path(own_folder(str(tmp_path / run), "a"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "notes").write_text(text)
    store = make(tmp_path)
    store.save("a", 3, write)
    fork = store.fork_saved("b", "a", kept)
    assert data(fork.path) == data(kept) and not fork.in_memory and fork.path.startswith(str(tmp_path / "run"))
    assert Path(own_folder(str(tmp_path / "run"), "b"), "notes").read_text() == "theirs"
    assert not Path(fork.path, FACTS).exists() and damage_of(fork.path) is None, "it is not kept"
    assert Path(kept, FACTS).exists() and damage_of(kept) is None
    assert store.own("b", fork.path) == fork.path and Path(kept, "state", "data").stat().st_nlink == 1
    shutil.rmtree(kept)
    with pytest.raises(FileNotFoundError):
        store.fork_saved("c", "a", kept)


@pytest.mark.parametrize("how", ["as the run ends", "for want of room"])
def test_forks_take_the_room_of_one_on_disk_too(tmp_path: Path, how: str) -> None:
    store = make(tmp_path)
    original = store.save("a", 3, write).path
    state = data(original)
    names = ["a", *(f"b{number}" for number in range(4))]
    for name in names[1:]:
        store.fork(name, original)
    if how == "as the run ends":
        persist_checkpoints(str(tmp_path / "memory"), str(tmp_path / "run"), temporary=False)
    else:
        folder = MemoryFolder(str(tmp_path / "memory"), str(tmp_path / "run"))
        first, *others = folder.scan()[0]
        place = folder.to_disk(first)
        assert place is not None
        # Code that it was given to has changed it: the others are not to have that in common with it.
        Path(place, "state", "data").write_bytes(b"y" * SIZE)
        assert all(folder.to_disk(one) is not None for one in others)
        names.remove(first.trial)
    on_disk = [path for name in names for path in (tmp_path / "run" / "trials" / name / "checkpoints").iterdir()]
    assert len(on_disk) == len(names) and all(data(str(path)) == state for path in on_disk)
    assert len({(path / "state" / "data").stat().st_ino for path in on_disk}) == 1


def test_a_trials_files_are_copied_whole(tmp_path: Path) -> None:
    run = str(tmp_path)
    source, target = Path(own_folder(run, "a")), Path(own_folder(run, "b"))
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "file").write_text("text")
    (source / "runs.sh").write_text("")
    (source / "runs.sh").chmod(0o750)
    (source / "within").symlink_to(source / "deep")
    (source / "near").symlink_to("deep/er")
    (source / "beyond").symlink_to("/nowhere")
    os.mkfifo(source / "pipe")
    os.chdir(source)  # The name of a socket is short.
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("socket")
        os.chdir(tmp_path)
        target.mkdir(parents=True)
        (target / "stale").write_text("of an attempt before")
        copy_trial_files(run, "a", "b")
    assert sorted(path.name for path in target.iterdir()) == ["beyond", "deep", "near", "runs.sh", "within"]
    assert (target / "deep" / "er" / "file").read_text() == "text"
    assert os.readlink(target / "within") == str(target / "deep") and os.readlink(target / "near") == "deep/er"
    assert target.stat().st_mode & 0o077 == 0 and (target / "runs.sh").stat().st_mode & 0o777 == 0o750
    (target / "deep" / "er" / "file").write_text("b's")
    assert (source / "deep" / "er" / "file").read_text() == "text"


def test_a_trial_without_files_gives_none(tmp_path: Path) -> None:
    copy_trial_files(str(tmp_path), "a", "b")
    assert not Path(own_folder(str(tmp_path), "b")).exists()


def test_files_that_cannot_be_copied_leave_no_part_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(own_folder(str(tmp_path), "a"))
    source.mkdir(parents=True)
    for name in "xyz":
        (source / name).write_text(name)
    real: Callable[..., object] = shutil.copy2
    copied: list[object] = []

    def full(path: str, copy: str) -> object:
        copied.append(path)
        if len(copied) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, copy)

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left"):
        copy_trial_files(str(tmp_path), "a", "b")
    assert list(Path(own_folder(str(tmp_path), "b")).parent.iterdir()) == []


def test_what_a_trial_is_about_to_start_from_is_summed_before_it_leaves_memory(tmp_path: Path) -> None:
    store = make(tmp_path)
    start = store.save_start("b", "a", 3, write)
    assert start.in_memory and damage_of(start.path) is None and start.bytes == SIZE
    folder = MemoryFolder(str(tmp_path / "memory"), str(tmp_path / "run"))
    place = folder.to_disk(folder.scan()[0][0])
    assert place is not None and damage_of(place) is None
    Path(place, "state", "data").write_bytes(b"z" * SIZE)
    assert damage_of(place) == "state/data has changed since it was written"
    again = store.save_start("c", "a", 3, write).path
    os.truncate(Path(again, "state", "data"), 1)
    assert store.persist(again) and "has 1 bytes" in str(damage_of(again)), "what is damaged stays so"
