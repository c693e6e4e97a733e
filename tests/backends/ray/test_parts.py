"""The parts of the Ray backend that need no Ray."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid._imports import try_import
from fluid.backends.hosts import host_memory
from fluid.backends.hosts.folders import HERE, HostFolders, SessionFolders, host_of, locate, pack, unpack
from fluid.backends.hosts.listener import (
    AuthenticatedConnection,
    LaneListener,
    connect,
    is_reachable,
    process_start_time,
)
from fluid.backends.ray.process_handles import ProcessHandles
from fluid.errors import MissingDependencyError
from fluid.lane.checkpoint_store import CheckpointStore

PATIENCE = 60.0


# -- the door -----------------------------------------------------------------------------------------------------


class Door:
    """A doorman and what waits for him."""

    def __init__(self, key: bytes) -> None:
        self.selector = selectors.EpollSelector()
        self.listener = LaneListener(key, self.selector)
        self.address = self.listener.listen("127.0.0.1")

    def serve_until_rung(self, key: bytes, number: int) -> tuple[list[AuthenticatedConnection], list[BaseException]]:
        """Lets an actor ring, and serves until that has come to an end for both."""
        errors: list[BaseException] = []

        def try_it() -> None:
            try:
                connect(self.address, key, number).close()
            except OSError as error:
                errors.append(error)

        actor = threading.Thread(target=try_it)
        actor.start()
        authenticated: list[AuthenticatedConnection] = []
        while actor.is_alive():
            self.turn(0.01)
            authenticated += self.listener.authenticated()
        self.turn(0.0)
        return authenticated + self.listener.authenticated(), errors

    def turn(self, wait: float) -> None:
        for key, _ in self.selector.select(wait):
            key.data()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door(b"right")
    yield made
    made.listener.close()
    made.selector.close()


def test_who_knows_the_key_comes_in(door: Door) -> None:
    (connected,), errors = door.serve_until_rung(b"right", 7)
    assert (connected.number, connected.pid, connected.start_time) == (7, os.getpid(), process_start_time(os.getpid()))
    assert errors == []
    connected.socket.close()


def test_who_does_not_stays_out(door: Door) -> None:
    authenticated, (error,) = door.serve_until_rung(b"wrong", 7)
    assert authenticated == []
    assert isinstance(error, ConnectionError)


def test_rubbish_and_silence_do_no_harm(door: Door) -> None:
    with socket.create_connection(door.address), socket.create_connection(door.address) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        (connected,), errors = door.serve_until_rung(b"right", 1)
        assert errors == []
        connected.socket.close()


def test_an_impostor_learns_nothing_and_is_told_nothing() -> None:
    """A lane sends no message, and reads none, before the driver has proved that it knows the key."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_impostor, args=(listener,))
        thread.start()
        with pytest.raises(ConnectionError, match="not this session's driver"):
            connect(listener.getsockname(), b"right", 1)
        thread.join()


def _impostor(listener: socket.socket) -> None:
    sock, _ = listener.accept()
    with sock:
        sock.sendall(b"c" * 32)
        sock.recv(4096)
        sock.sendall(b"p" * 32)


def test_it_listens_once_per_address(door: Door) -> None:
    assert door.listener.listen("127.0.0.1") == door.address
    assert is_reachable(door.address, 1.0)
    door.listener.close()
    assert not is_reachable(door.address, 1.0)


# -- folders ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the RAM disk."""
    path = tmp_path / "ram"
    path.mkdir()
    monkeypatch.setattr(host_memory, "RAM_DISK", str(path))
    return path


@pytest.fixture
def session(tmp_path: Path) -> SessionFolders:
    (tmp_path / "run").mkdir()
    return SessionFolders("0a" * 8, str(tmp_path / "run"), temporary=False)


def save(home: HostFolders, trial_id: str, iteration: int, text: str, lane_id: int = 0) -> str:
    store = CheckpointStore(lane_id, home.run_folder, home.memory_folder, 1e9 if home.memory_folder else 0.0)
    return store.save(trial_id, iteration, lambda folder: _write(folder, text)).path


def _write(folder: str, text: str) -> None:
    (Path(folder) / "state").write_text(text)


def test_a_path_tells_which_machine_wrote_it(ram: Path, session: SessionFolders) -> None:
    for host in (HERE, "10.0.0.7"):
        home = HostFolders(session, host)
        assert host_of(save(home, "a", 1, "x")) == host
        home.memory_folder = ""
        assert host_of(save(home, "a", 2, "x")) == host
        home.leave(clear=False)


def test_machines_that_share_the_run_folder_use_it_and_others_do_not(ram: Path, session: SessionFolders) -> None:
    Path(session.marker).touch()
    assert HostFolders(session, "10.0.0.7").run_folder == session.run_folder
    os.unlink(session.marker)
    assert HostFolders(session, "10.0.0.7").run_folder != session.run_folder


def test_the_last_one_to_leave_puts_checkpoints_on_disk(ram: Path, session: SessionFolders) -> None:
    driver, lane = HostFolders(session, HERE), HostFolders(session, HERE)
    path = save(lane, "a", 3, "third")
    assert path.startswith(str(ram))
    lane.leave(clear=True)
    assert os.path.isdir(path)  # The driver is still there.
    driver.leave(clear=True)
    assert os.listdir(ram) == []
    found = locate(path, session.run_folder)
    assert found is not None and (Path(found) / "state").read_text() == "third"


@pytest.mark.parametrize("host", [HERE, "10.0.0.7"])
def test_what_a_killed_process_left_is_swept_up_by_the_next(ram: Path, session: SessionFolders, host: str) -> None:
    home = HostFolders(session, host)
    path = save(home, "a", 3, "third")
    host_memory.sweep()
    assert os.path.isdir(path)  # A process uses it.
    os.close(home._lock)  # As when it is killed.
    other = HostFolders(session._replace(token="0b" * 8), HERE)
    assert os.listdir(ram) == [os.path.basename(other.memory_folder)]
    assert locate(path, session.run_folder) is not None


def test_a_temporary_session_leaves_nothing(ram: Path, session: SessionFolders) -> None:
    temporary = session._replace(temporary=True)
    for host in ("10.0.0.7", HERE):
        home = HostFolders(temporary, host)
        save(home, "a", 1, "x")
        home.leave(clear=True)
        assert os.listdir(ram) == []
    assert not os.path.exists(session.run_folder)


def test_without_host_memory_everything_is_on_disk(session: SessionFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "RAM_DISK", "/proc/there/is/none")
    home = HostFolders(session, HERE)
    assert (home.memory_folder, host_memory.free_bytes(home.memory_folder)) == ("", 0)
    assert home.note(3).startswith(session.run_folder)
    assert home.place_for("a", "n", 10).startswith(session.run_folder)
    home.leave(clear=True)


def test_a_checkpoint_travels_whole(ram: Path, session: SessionFolders, tmp_path: Path) -> None:
    there, here = HostFolders(session, "10.0.0.7"), HostFolders(session, HERE)
    path = save(there, "a/b", 4, "fourth")
    os.mkdir(os.path.join(path, "sub"))
    (Path(path) / "sub" / "more").write_bytes(b"\x00" * 1000)
    target = here.place_for("a/b", os.path.basename(path), 1000)
    assert pack(path, session.run_folder)[0] == os.path.basename(path)
    unpack(pack(path, session.run_folder)[1], target)
    names = {p.relative_to(target).as_posix() for p in Path(target).rglob("*")}
    assert names == {"seal.json", "state", "sub", "sub/more"}
    unpack(pack(path, session.run_folder)[1], target)  # Two lanes may want it at once.
    assert locate(target, session.run_folder) == target
    assert locate(path.replace("00000004", "00000005"), session.run_folder) is None
    with pytest.raises(FileNotFoundError, match="there is none before it"):
        pack(path.replace("00000004", "00000003"), session.run_folder)


def test_of_a_checkpoint_that_is_damaged_or_gone_the_one_before_travels(ram: Path, session: SessionFolders) -> None:
    there = HostFolders(session, "10.0.0.7")
    store = CheckpointStore(0, there.run_folder, there.memory_folder, 1e9)
    first, second = (store.save("a", number, lambda folder: _write(folder, "state")).path for number in (4, 5))
    (Path(second) / "state").write_text("FIFTH")
    gone = second.replace("00000005", "00000006")
    for wanted in (second, gone):
        assert pack(wanted, session.run_folder)[0] == os.path.basename(first)
    there.leave(clear=True)  # Both go to disk.
    assert pack(second, session.run_folder)[0] == os.path.basename(first)


# -- processes ----------------------------------------------------------------------------------------------------


def test_processes_are_waited_for_and_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.backends.ray.process_handles._END_S", 0.1)
    watched = ProcessHandles()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        watched.watch(child.pid, process_start_time(child.pid))
        watched.end()
        assert child.wait(PATIENCE) == -signal.SIGKILL
    watched.close()


def test_a_process_of_another_container_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has the same number and began at another time is not the one that was meant."""
    monkeypatch.setattr("fluid.backends.ray.process_handles._END_S", 0.1)
    watched = ProcessHandles()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        watched.watch(child.pid, process_start_time(child.pid) + 1)
        watched.end()
        assert child.poll() is None
    watched.close()


def test_without_ray_the_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from fluid.backends.ray import RayBackend, cluster

    missing: Any = try_import("Ray", extra="ray")
    with missing:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    monkeypatch.setattr(cluster, "ray_imports", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fluid-tune\[ray\]'"):
        RayBackend(1)
