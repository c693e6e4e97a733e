"""``fluid.shared`` in one process: outside a lane, and as a lane with a host's folders."""

from __future__ import annotations

import fcntl
import os
import random
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fluid
from fluid.shared_data import loading
from fluid.shared_data.key import shared_key
from fluid.shared_data.pickling import dump_shared
from fluid.shared_data.store import SharedStore
from fluid.trainables.shared_place import SharedPlace, set_shared_place

PATIENCE = 90.0
CALLS: list[int] = []


def load(count: int) -> dict[str, Any]:
    CALLS.append(count)
    return {"rows": np.arange(count)}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    become_another_process(monkeypatch)
    CALLS.clear()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[SharedPlace]:
    """This process is a lane, with folders of its host."""
    place = SharedPlace((str(tmp_path / "memory"), str(tmp_path / "disk")))
    set_shared_place(place)
    yield place
    set_shared_place(None)


def become_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what this process has loaded."""
    monkeypatch.setattr(loading, "_kept", loading._ProcessValues())


# -- outside a lane


def test_outside_a_lane_each_process_loads_once() -> None:
    first = fluid.shared(load, 5)
    assert fluid.shared(load, 5) is first
    assert first["rows"].flags.writeable, "it is what the loader returned"
    fluid.shared(load, 6)
    assert CALLS == [5, 6]


def fails_once(folder: Path) -> str:
    if not any(folder.iterdir()):
        (folder / "called").touch()
        raise OSError("the disk is away")
    return "data"


@pytest.mark.parametrize("in_lane", [False, True])
def test_a_loader_that_raises_is_called_again(in_lane: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if in_lane:
        request.getfixturevalue("place")
    (folder := tmp_path / "calls").mkdir()
    with pytest.raises(OSError, match="the disk is away"):
        fluid.shared(fails_once, folder)
    assert fluid.shared(fails_once, folder) == "data"


def test_bad_loaders() -> None:
    with pytest.raises(fluid.InvalidFieldError, match="must be callable") as raised:
        fluid.shared([1, 2])  # type: ignore[arg-type]
    assert raised.value.field == "loader"


def circular() -> Any:
    return fluid.shared(circular)


def nested() -> Any:
    return fluid.shared(load, 3)["rows"].sum()


def test_loaders_that_share() -> None:
    with pytest.raises(fluid.FluidError, match="for its own result"):
        fluid.shared(circular)
    assert fluid.shared(nested) == 3


def draws() -> float:
    random.seed(0)
    np.random.seed(0)
    return random.random() + float(np.random.random())


def test_random_numbers_do_not_depend_on_who_loads(place: SharedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for _ in range(2):
        random.seed(7)
        np.random.seed(7)
        fluid.shared(draws)
        drawn.append((random.random(), np.random.random()))
        become_another_process(monkeypatch)
    assert drawn[0] == drawn[1]


BEGUN, GO = threading.Event(), threading.Event()


def waits() -> dict[str, Any]:
    BEGUN.set()
    assert GO.wait(PATIENCE)
    return load(1)


def test_threads_load_once_and_other_data_do_not_wait() -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(fluid.shared(waits))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert BEGUN.wait(PATIENCE)
    fluid.shared(load, 9)
    GO.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert found[0] is found[1]
    assert CALLS == [9, 1]


# -- in a lane


def test_the_second_lane_maps_what_the_first_one_loaded(place: SharedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fluid.shared(load, 5000)
    become_another_process(monkeypatch)
    second = fluid.shared(load, 5000)
    assert CALLS == [5000]
    for value in (first, second):
        np.testing.assert_array_equal(value["rows"], np.arange(5000))
        assert not value["rows"].flags.writeable, "the first lane gives its own copy up"
    assert fluid.shared(load, 5000) is second


def test_only_this_user_can_read_it(place: SharedPlace) -> None:
    fluid.shared(load, 5000)
    folder = Path(place.folders[0]) / "shared"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert not Path(place.folders[1]).exists()


def test_where_host_memory_has_no_room_it_goes_to_disk(
    place: SharedPlace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = os.statvfs(tmp_path)
    set_shared_place(place._replace(reserved_bytes=float(usage.f_bavail * usage.f_frsize)))
    fluid.shared(load, 5000)
    key = shared_key(load, (5000,))
    assert not (tmp_path / "memory/shared" / key).exists()
    assert (tmp_path / "disk/shared" / key).exists()
    become_another_process(monkeypatch)
    fluid.shared(load, 5000)
    assert CALLS == [5000]


def test_a_reservation_larger_than_host_memory_is_elsewhere(place: SharedPlace, tmp_path: Path) -> None:
    set_shared_place(place._replace(reserved_bytes=1e18))
    fluid.shared(load, 5000)
    assert (tmp_path / "memory/shared" / shared_key(load, (5000,))).exists()


def test_without_any_space_each_lane_loads(
    place: SharedPlace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("memory", "disk"):
        (tmp_path / name).write_text("")  # No folder can be made there.
    for _ in range(2):
        assert len(fluid.shared(load, 5000)["rows"]) == 5000
        become_another_process(monkeypatch)
    assert CALLS == [5000, 5000]
    assert "there is no space to share" in caplog.text


def test_what_cannot_be_shared_is_an_error(place: SharedPlace) -> None:
    with pytest.raises(fluid.InvalidFieldError, match="returned what cannot be pickled") as raised:
        fluid.shared(iter_rows)
    assert raised.value.field == "loader"


def iter_rows() -> Iterator[int]:
    return (number for number in range(3))


def test_a_file_that_was_not_finished_is_written_again(place: SharedPlace) -> None:
    folder = Path(place.folders[0]) / "shared"
    folder.mkdir(parents=True)
    key = shared_key(load, (5000,))
    (folder / f".{key}").write_bytes(b"half")
    fluid.shared(load, 5000)
    assert sorted(file.name for file in folder.iterdir()) == [f".{key}.lock", key]


def test_a_disk_that_fills_up_leaves_no_half_file(place: SharedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fluid.shared_data.mapped_file.os.write", full)
    assert not SharedStore(place).write("0a", dump_shared(np.arange(9)))
    assert [file for folder in place.folders for file in (Path(folder) / "shared").iterdir()] == []


def test_one_lane_at_a_time_has_the_turn(place: SharedPlace) -> None:
    store = SharedStore(place)
    lock = Path(place.folders[0]) / "shared/.0a.lock"
    with store.turn("0a"), lock.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
