"""Where checkpoints are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fluid.lane_store import CheckpointStore, settle


def writes(size: int) -> Callable[[str], None]:
    def write(folder: str) -> None:
        Path(folder, "data").write_bytes(b"x" * size)

    return write


def make(tmp_path: Path, budget: float, lane_id: int = 0) -> CheckpointStore:
    (tmp_path / "memory").mkdir(exist_ok=True)
    return CheckpointStore(lane_id, str(tmp_path / "run"), str(tmp_path / "memory"), budget)


def test_memory_is_for_what_fits(tmp_path: Path) -> None:
    store = make(tmp_path, budget=2500)
    stored = [store.save(name, 1, writes(1000)) for name in "abc"]
    assert [one.in_memory for one in stored] == [True, True, False]
    assert all(Path(one.path, "data").stat().st_size == 1000 for one in stored)
    # Another lane may have deleted what this one wrote: that room is free again.
    make(tmp_path, budget=0, lane_id=1).delete("a")
    assert store.save("c", 2, writes(1000)).in_memory


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    store = make(tmp_path, budget=1e6)
    paths = [Path(store.save("a", number, writes(1)).path) for number in range(1, 5)]
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert len(os.listdir(paths[0].parent)) == 2


def test_the_checkpoint_a_trial_came_from_is_kept(tmp_path: Path) -> None:
    first, second = make(tmp_path, 1e6, 0), make(tmp_path, 1e6, 1)
    origin, lost = (first.save("a", number, writes(1)).path for number in (1, 2))
    second.restored("a", origin)
    saved = second.save("a", 2, writes(1)).path
    assert [os.path.exists(path) for path in (origin, lost, saved)] == [True, False, True]


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    store = make(tmp_path, budget=1e6)
    good = store.save("a", 1, writes(1)).path

    def fails(folder: str) -> None:
        Path(folder, "half").touch()
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError):
        store.save("a", 2, fails)
    assert os.listdir(os.path.dirname(good)) == [os.path.basename(good)]
    assert os.listdir(tmp_path / "run/trials/a/checkpoints") == []


def test_what_memory_cannot_take_goes_to_disk(tmp_path: Path) -> None:
    store = make(tmp_path, budget=1e6)

    def full(folder: str) -> None:
        if folder.startswith(str(tmp_path / "memory")):
            raise OSError("no space left")

    assert not store.save("a", 1, full).in_memory


def test_names_are_private_and_safe(tmp_path: Path) -> None:
    store = make(tmp_path, budget=1e6)
    for name in ("../../escape", "..", "x" * 1000, "ü/ß"):
        path = Path(store.save(name, 1, writes(1)).path)
        assert path.parent.parent == tmp_path / "memory"
        assert path.stat().st_mode & 0o777 == 0o700


def test_settling_moves_the_last_ones_to_disk(tmp_path: Path) -> None:
    store = make(tmp_path, budget=1e6)
    old = store.save("a", 1, writes(1)).path
    os.utime(old, (1, 1))
    last = store.save("a", 2, writes(2)).path
    (tmp_path / "memory/a/.draft").mkdir()
    settle(str(tmp_path / "memory"), str(tmp_path / "run"), temporary=False)
    assert not (tmp_path / "memory").exists()
    found = make(tmp_path, 0).find(last)
    assert Path(found, "data").stat().st_size == 2
    assert not os.path.exists(store.find(old))
    settle("", str(tmp_path / "run"), temporary=True)
    assert not (tmp_path / "run").exists()
