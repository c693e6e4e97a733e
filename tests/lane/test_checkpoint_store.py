"""Where checkpoints are kept."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid.lane.checkpoints.files import (
    copy_atomically,
    discard_kept,
    iteration_of,
    locked_for_reading,
    move,
    write_atomically,
)
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.seal import damage_by_lengths, damage_of, seal
from fluid.lane.checkpoints.store import CheckpointStore, checkpoints_on_disk, persist_checkpoints


def writes(size: int) -> Callable[[str], None]:
    def write(folder: str) -> None:
        Path(folder, "data").write_bytes(b"x" * size)

    return write


def make(tmp_path: Path, budget: int | None = None, lane_id: int = 0) -> CheckpointStore:
    """A lane's store; with a budget, all lanes together have so many bytes of memory."""
    (tmp_path / "memory").mkdir(exist_ok=True)
    if budget is not None:
        StoreLedger(str(tmp_path / "memory")).create(budget, budget)
    return CheckpointStore(lane_id, str(tmp_path / "run"), str(tmp_path / "memory"))


def used(tmp_path: Path) -> int:
    return StoreLedger(str(tmp_path / "memory")).read().used


def to_disk(tmp_path: Path, path: str) -> None:
    """Moves a checkpoint to disk, as a host does."""
    assert move(path, checkpoints_on_disk(str(tmp_path / "run"), Path(path).parent.name))


def where(store: CheckpointStore, path: str) -> str:
    """Where a reader finds a checkpoint, or another of its iteration; empty if there is none."""
    trial_id = Path(path).parent.name
    places = (place for place in store.places(trial_id, path) if iteration_of(place) == iteration_of(path))
    return next(filter(os.path.isdir, places), "")


def test_a_durable_checkpoint_goes_to_disk_at_once(tmp_path: Path) -> None:
    store = make(tmp_path, budget=2500)
    stored = store.save("a", 1, writes(1000), durable=True)
    assert not stored.in_memory and Path(stored.path, "data").exists()
    assert Path(stored.path).is_relative_to(tmp_path / "run")


def test_a_checkpoint_is_copied_from_memory_to_disk_and_stays_in_memory(tmp_path: Path) -> None:
    store = make(tmp_path, budget=2500)
    stored = store.save("a", 1, writes(1000))
    assert stored.in_memory
    other = make(tmp_path, lane_id=1)
    copy = other.persist(stored.path)
    assert copy == os.path.join(checkpoints_on_disk(str(tmp_path / "run"), "a"), os.path.basename(stored.path))
    assert Path(copy, "data").exists() and Path(stored.path, "data").exists()
    for gone in (str(tmp_path / "memory" / "a" / "none"), copy):
        with pytest.raises(OSError):
            other.persist(gone)


def test_memory_is_for_what_fits_and_the_rest_goes_to_disk(tmp_path: Path) -> None:
    store, other = make(tmp_path, budget=2500), make(tmp_path, lane_id=1)
    stored = [lane.save(name, 1, writes(1000)) for lane, name in ((store, "a"), (other, "b"), (store, "c"))]
    assert [one.in_memory for one in stored] == [True, True, False] and used(tmp_path) == 2000
    for one in stored:  # A reader finds each of them.
        assert Path(where(other, one.path), "data").stat().st_size == 1000
    # Another lane may have deleted what this one wrote: that room is free again.
    other.delete("a")
    assert used(tmp_path) == 1000 and store.save("c", 2, writes(1000)).in_memory
    to_disk(tmp_path, stored[1].path)
    assert where(store, stored[1].path) == os.path.join(
        checkpoints_on_disk(str(tmp_path / "run"), "b"), os.path.basename(stored[1].path)
    )


def test_the_ledger_counts_what_is_there(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)
    for iteration, size in enumerate((1000, 2000, 500, 800), start=1):
        store.save("a", iteration, writes(size))
        assert used(tmp_path) == sum(path.stat().st_size for path in (tmp_path / "memory").rglob("data"))

    def fails(folder: str) -> None:
        Path(folder, "data").write_bytes(bytes(10))
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        store.save("a", 5, fails)
    assert used(tmp_path) == 1300
    store.delete("a")
    assert used(tmp_path) == 0


def test_what_is_larger_than_memory_goes_to_disk_and_moves_nobody(tmp_path: Path) -> None:
    store = make(tmp_path, budget=2500)
    small = store.save("a", 1, writes(1000)).path
    assert [store.save("b", number, writes(3000)).in_memory for number in (1, 2)] == [False, False]
    assert os.path.isdir(small)


def test_what_is_being_read_stays_where_it_is(tmp_path: Path) -> None:
    store, other = make(tmp_path, budget=1500), make(tmp_path, lane_id=1)
    path, disk = store.save("a", 1, writes(1000)).path, checkpoints_on_disk(str(tmp_path / "run"), "a")
    with locked_for_reading(path) as exists:
        assert exists
        assert not move(path, disk)
        assert os.path.isdir(path)
    assert move(path, disk)
    assert where(other, path) == os.path.join(disk, os.path.basename(path))


def test_what_its_trial_needs_no_longer_is_not_moved_back_to_life(tmp_path: Path) -> None:
    store, other = make(tmp_path, budget=10**6), make(tmp_path, lane_id=1)
    path, disk = store.save("a", 1, writes(1000)).path, checkpoints_on_disk(str(tmp_path / "run"), "a")
    copied = shutil.copytree

    def copy(*args: object, **options: object) -> object:
        done = copied(*args, **options)  # type: ignore[call-overload]
        other.delete("a")
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "copytree", copy)
        with contextlib.suppress(OSError):
            assert not move(path, disk)
    assert not list(tmp_path.rglob("data"))


def test_the_last_two_are_kept_also_where_one_has_gone_to_disk(tmp_path: Path) -> None:
    store, other = make(tmp_path, budget=10**6), make(tmp_path, lane_id=1)
    first, second = (store.save("a", number, writes(1000)).path for number in (1, 2))
    to_disk(tmp_path, first)
    assert Path(where(other, first)).parts[-4:-2] == ("trials", "a") and os.path.isdir(second)
    other.protect("a", second)
    to_disk(tmp_path, second)  # While the trial is in the other lane,
    other.save("a", 3, writes(1000))  # of which the driver has not heard yet.
    assert os.path.isdir(where(other, second)) and not os.path.isdir(where(other, first))


def test_a_copy_in_memory_is_read_rather_than_the_one_on_disk(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)
    path = store.save("a", 1, writes(1000), durable=True).path
    copy_atomically(path, str(tmp_path / "memory/a"))
    assert next(store.places("a", path)) == str(tmp_path / "memory/a" / Path(path).name)
    store.delete("a")
    assert not list(tmp_path.rglob("data"))


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)
    paths = [Path(store.save("a", number, writes(1)).path) for number in range(1, 5)]
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert len(os.listdir(paths[0].parent)) == 2


def test_the_checkpoint_a_trial_came_from_is_kept(tmp_path: Path) -> None:
    first, second = make(tmp_path, 10**6, 0), make(tmp_path, 10**6, 1)
    origin, lost = (first.save("a", number, writes(1)).path for number in (1, 2))
    second.protect("a", origin)
    saved = second.save("a", 2, writes(1)).path
    assert [os.path.exists(path) for path in (origin, lost, saved)] == [True, False, True]


def test_a_lane_that_a_trial_has_left_deletes_nothing_of_where_it_goes_on(tmp_path: Path) -> None:
    left, here = make(tmp_path, budget=10**6), make(tmp_path, budget=10**6, lane_id=1)
    path = left.save("a", 3, writes(10)).path
    later = here.save("a", 4, writes(30)).path
    for size in (11, 12):
        newest = left.save("a", 3, writes(size)).path
    assert os.path.isdir(later) and os.path.isdir(newest) and not os.path.isdir(path)
    assert where(here, path) == newest, "what was saved since, of the same iteration"
    assert where(here, path.replace("00000003", "00000002")) == "", "there is none"


def test_what_is_being_read_is_not_deleted(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)
    path = store.save("a", 3, writes(10)).path
    with locked_for_reading(path) as exists:
        assert exists
        for _ in range(2):
            store.save("a", 3, writes(10))
        assert Path(path, "data").stat().st_size == 10
    store.save("a", 4, writes(10))
    assert not os.path.isdir(path)


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)
    good = store.save("a", 1, writes(1)).path

    def fails(folder: str) -> None:
        Path(folder, "half").touch()
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError):
        store.save("a", 2, fails)
    assert os.listdir(os.path.dirname(good)) == [os.path.basename(good)]
    assert os.listdir(tmp_path / "run/trials/a/checkpoints") == []


def test_what_memory_cannot_take_goes_to_disk(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)

    def full(folder: str) -> None:
        if folder.startswith(str(tmp_path / "memory")):
            raise OSError("no space left")

    assert not store.save("a", 1, full).in_memory


# -- what damage does -----------------------------------------------------------------------------------------------


def test_earlier_checkpoints_come_after_the_one_wanted_wherever_they_are(tmp_path: Path) -> None:
    store = make(tmp_path, budget=2500)
    first, second = (store.save("a", number, writes(1000)).path for number in (1, 2))
    to_disk(tmp_path, first)
    found = [place for place in make(tmp_path, lane_id=1).places("a", second) if os.path.isdir(place)]
    assert found == [second, str(tmp_path / "run/trials/a/checkpoints" / Path(first).name)]
    assert [place for place in store.places("a", first) if os.path.isdir(place)] == found[1:], "none that is later"
    shutil.rmtree(tmp_path / "memory")
    assert [place for place in store.places("a", second) if os.path.isdir(place)] == found[1:]
    assert not store.save("a", 3, writes(1000)).in_memory, "a folder that is gone is not used again"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "sub/data has 3 bytes instead of 4": lambda path: (path / "sub/data").write_bytes(b"abc"),
    "sub/data has changed since it was written": lambda path: (path / "sub/data").write_bytes(b"abce"),
    "sub/data is missing": lambda path: (path / "sub/data").unlink(),
    "empty is missing": lambda path: (path / "empty").unlink(),
    "seal.json is missing": lambda path: (path / "seal.json").unlink(),
    "seal.json has changed since it was written": lambda path: (path / "seal.json").write_text("{}"),
    "it cannot be read: [Errno 21] Is a directory": lambda path: ((path / "empty").unlink(), (path / "empty").mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/data").write_bytes(b"abcd")
    (tmp_path / "empty").touch()
    (tmp_path / "the link").symlink_to("sub/data")
    (tmp_path / "broken link").symlink_to("nowhere")
    assert seal(str(tmp_path)) == 8
    assert damage_of(str(tmp_path)) is None
    (tmp_path / "later").write_text("what comes later does not matter")
    assert damage_of(str(tmp_path)) is None
    assert damage_by_lengths(str(tmp_path)) is None
    DAMAGE[damage](tmp_path)
    assert (damage_of(str(tmp_path)) or "").startswith(damage)
    by_lengths = damage_by_lengths(str(tmp_path))
    assert by_lengths is None if damage == "sub/data has changed since it was written" else damage in str(by_lengths)


@pytest.mark.parametrize("position", range(0, 90, 7))
def test_any_flipped_bit_is_found(tmp_path: Path, position: int) -> None:
    (tmp_path / "data").write_bytes(bytes(range(256)))
    seal(str(tmp_path))
    for name in ("data", "seal.json"):
        path = tmp_path / name
        content = bytearray(path.read_bytes())
        content[position % len(content)] ^= 1 << position % 8
        whole, _ = path.read_bytes(), path.write_bytes(content)
        assert damage_of(str(tmp_path)) is not None or content.split() == whole.split()
        path.write_bytes(whole)


def test_a_lack_of_descriptors_is_no_damage(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)
    path = store.save("a", 1, writes(10)).path
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            damage_of(path)
        with pytest.raises(OSError, match="Too many open files"), locked_for_reading(path):
            pass
        with pytest.raises(OSError, match="Too many open files"):
            list(store.places("a", path))
        with pytest.raises(OSError, match="Too many open files"):
            store.save("a", 2, writes(10))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(taken)
    assert damage_of(path) is None and store.save("a", 3, writes(10)).in_memory


def test_names_are_private_and_safe(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)
    for name in ("../../escape", "..", "x" * 1000, "ü/ß"):
        path = Path(store.save(name, 1, writes(1)).path)
        assert path.parent.parent == tmp_path / "memory"
        assert path.stat().st_mode & 0o777 == 0o700


def test_settling_moves_the_last_ones_to_disk(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)
    old = store.save("a", 1, writes(1)).path
    os.utime(old, (1, 1))
    last = store.save("a", 2, writes(2)).path
    (tmp_path / "memory/a/.draft").mkdir()
    persist_checkpoints(str(tmp_path / "memory"), str(tmp_path / "run"), temporary=False)
    assert not (tmp_path / "memory").exists()
    assert Path(where(make(tmp_path), last), "data").stat().st_size == 2
    assert not os.path.exists(old) and Path(where(store, old), "data").stat().st_size == 1, "and the one before"
    persist_checkpoints("", str(tmp_path / "run"), temporary=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", ["full", "damaged"])
def test_what_cannot_be_moved_to_disk_stays_in_memory_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store, memory, run = make(tmp_path, budget=10**6), tmp_path / "memory", tmp_path / "run"
    (memory / ".session").touch()
    paths = [store.save(name, 3, writes(size)).path for name, size in (("small", 10), ("large", 5000))]
    if how == "full":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    else:
        copy = shutil.copytree

        def cut_short(*args: Any, **options: Any) -> Any:
            made = copy(*args, **options)
            os.truncate(Path(made, "data"), min(1000, os.stat(Path(made, "data")).st_size))
            return made

        monkeypatch.setattr(shutil, "copytree", cut_short)
    try:
        persist_checkpoints(str(memory), str(run), temporary=False)
    finally:
        if how == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        monkeypatch.undo()
    assert not os.path.exists(paths[0]) and damage_of(paths[1]) is None and (memory / ".session").exists()
    told = caplog.text
    assert "'large' of iteration 3" in told and "'small'" not in told
    assert ("File too large" if how == "full" else "has 1000 bytes instead of 5000") in told
    assert not any(name.startswith(".") for _, names, _ in os.walk(run) for name in names), "no draft is left"
    persist_checkpoints(str(memory), str(run), temporary=False)
    assert not memory.exists()
    for path in paths:
        assert damage_of(where(make(tmp_path), path)) is None


def test_a_damaged_copy_on_disk_does_not_stand_for_the_one_in_memory(tmp_path: Path) -> None:
    store = make(tmp_path, budget=10**6)
    path = store.save("a", 3, writes(10)).path
    on_disk = Path(checkpoints_on_disk(str(tmp_path / "run"), "a"), os.path.basename(path))
    shutil.copytree(path, on_disk)
    (on_disk / "data").write_bytes(b"")
    persist_checkpoints(str(tmp_path / "memory"), str(tmp_path / "run"), temporary=False)
    assert damage_of(str(on_disk)) is None


def test_what_cannot_be_deleted_keeps_the_lock_by_which_the_next_session_finds_it(tmp_path: Path) -> None:
    store = make(tmp_path, budget=2500)
    store.save("a", 1, writes(1))
    lock = tmp_path / "memory/.session"
    lock.touch()
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, hard))  # Two descriptors: too few for folders in folders.
    try:
        persist_checkpoints(str(tmp_path / "memory"), str(tmp_path / "run"), temporary=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert lock.exists() and (tmp_path / "memory/a").exists()
    persist_checkpoints(str(tmp_path / "memory"), str(tmp_path / "run"), temporary=False)
    assert not (tmp_path / "memory").exists()


@pytest.mark.slow
def test_a_checkpoint_is_written_while_its_empty_folder_is_removed(tmp_path: Path) -> None:
    root, over = tmp_path / "kept", threading.Event()

    def remove() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                root.rmdir()

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(1000):
            path, _ = write_atomically(str(root), f"{number:08d}-0-0", lambda folder: None)
            discard_kept(path, demote=False)
    finally:
        over.set()
        remover.join()


def test_a_checkpoint_is_copied_to_a_folder_that_is_removed_whenever_it_is_empty(tmp_path: Path) -> None:
    checkpoint, target = tmp_path / "2-0-0", tmp_path / "kept"
    checkpoint.mkdir()
    (checkpoint / "state.pkl").write_bytes(b"state")
    copied = threading.Event()

    def remove() -> None:
        while not copied.is_set():
            with contextlib.suppress(OSError):
                target.rmdir()

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(300):
            copy_atomically(str(checkpoint), str(target))
            assert (target / "2-0-0" / "state.pkl").read_bytes() == b"state"
            shutil.rmtree(target / "2-0-0")
    finally:
        copied.set()
        remover.join()
