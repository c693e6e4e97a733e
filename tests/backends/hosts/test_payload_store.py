"""Payloads that a host keeps for its lanes."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluid.backends.hosts import memory as host_memory
from fluid.backends.hosts.folders import HERE, HostFolders, SessionFolders
from fluid.backends.hosts.payloads import PayloadStore


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SessionFolders:
    """A session with a folder in place of the RAM disk."""
    (tmp_path / "ram").mkdir()
    monkeypatch.setattr(host_memory, "RAM_DISK", str(tmp_path / "ram"))
    return SessionFolders("0a" * 8, str(tmp_path / "run"), temporary=False)


@pytest.fixture
def home(session: SessionFolders) -> Iterator[HostFolders]:
    made = HostFolders(session, HERE)
    yield made
    made.leave(clear=True)


def files(path: Path) -> list[Path]:
    """The payloads, and parts of some, below a folder."""
    return [file for file in path.rglob("*") if file.is_file() and ".payloads" in str(file)]


def test_a_payload_that_comes_in_parts_appears_as_a_whole(home: HostFolders, tmp_path: Path) -> None:
    store = PayloadStore(home)
    assert store.write("a", b"abc", size=5) is None
    assert "a" not in store and not any(os.path.exists(os.path.join(folder, "a")) for folder in store.folders)
    assert store.write("a", b"de", size=5, offset=3) is True
    assert "a" in store
    (file,) = files(tmp_path)
    assert (file.name, file.read_bytes(), str(file.parent)) == ("a", b"abcde", store.folders[0])
    assert file.is_relative_to(tmp_path / "ram")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with file.open("rb") as reader:
        store.drop("a")
        assert reader.read() == b"abcde"
    assert "a" not in store and not files(tmp_path)
    store.drop("a")
    store.close()


def test_a_payload_that_is_dropped_on_its_way_begins_anew(home: HostFolders, tmp_path: Path) -> None:
    store = PayloadStore(home)
    assert store.write("a", b"old", size=6) is None
    store.drop("a")
    assert not files(tmp_path)
    assert store.write("a", b"old", size=6, offset=3) is False  # Its beginning is gone.
    assert store.write("a", b"old", size=6) is None
    assert store.write("b", b"b", size=1) is True  # The driver has given the other one up.
    assert [file.name for file in files(tmp_path)] == ["b"]
    store.close()
    assert not files(tmp_path)


def test_hosts_on_one_machine_do_not_share_files(home: HostFolders, tmp_path: Path) -> None:
    one, other = PayloadStore(home), PayloadStore(home)
    assert one.write("a", b"1", size=1) and other.write("a", b"1", size=1)
    one.close()
    (file,) = files(tmp_path)
    assert str(file.parent) in other.folders
    other.close()
    assert not files(tmp_path)


def test_a_payload_goes_to_disk_if_there_is_too_little_memory(
    home: HostFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PayloadStore(home)
    monkeypatch.setattr(host_memory, "free_bytes", lambda folder: 39)
    assert store.write("a", bytes(10), size=10) is True
    assert store.write("b", bytes(9), size=9) is True
    assert {file.name: file.is_relative_to(tmp_path / "run") for file in files(tmp_path)} == {"a": True, "b": False}
    store.close()
    assert os.listdir(tmp_path / "run") == []


def test_a_payload_goes_to_disk_without_host_memory(
    session: SessionFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "RAM_DISK", "/proc/there/is/none")
    folders = HostFolders(session, HERE)
    assert PayloadStore(folders).write("a", b"1", size=1) is True
    assert [file.is_relative_to(tmp_path / "run") for file in files(tmp_path)] == [True]
    folders.leave(clear=True)  # As if the store had been killed.
    assert not files(tmp_path)


def test_a_payload_for_which_there_is_no_space_is_refused(home: HostFolders, tmp_path: Path) -> None:
    store = PayloadStore(home)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        assert store.write("a", bytes(1 << 16), size=1 << 18) is None
        assert store.write("a", bytes(1 << 17), size=1 << 18, offset=1 << 16) is None
        assert store.write("a", bytes(1 << 16), size=1 << 18, offset=3 << 16) is False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "a" not in store and not files(tmp_path)
    assert store.write("a", bytes(1 << 18), size=1 << 18) is True
    store.close()


def test_a_payload_that_can_be_written_nowhere_is_refused(home: HostFolders) -> None:
    for folder in home.payloads:
        Path(folder).touch()
    assert PayloadStore(home).write("a", b"1", size=1) is False
    for folder in home.payloads:
        os.unlink(folder)


def test_what_a_killed_host_left_is_swept_up_by_the_next_session(session: SessionFolders, tmp_path: Path) -> None:
    home = HostFolders(session, "10.0.0.7")
    for folder in PayloadStore(home).folders:
        os.makedirs(folder)
        (Path(folder) / "a").touch()
    os.close(home._lock)  # As when it is killed.
    HostFolders(session._replace(token="0b" * 8), HERE).leave(clear=True)
    assert not files(tmp_path)
