"""Checkpoints on their way from one machine to another, over real connections."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack
from stranger_processes import KINDS, strangers_at

from fluid._clock import nap
from fluid.backends.hosts.checkpoints.server import CheckpointServer, ServedFolders
from fluid.lane.checkpoints import fetch as checkpoint_wire
from fluid.lane.checkpoints import fetch as fetching
from fluid.lane.checkpoints import restore as locating
from fluid.lane.checkpoints.fetch import (
    LinkRates,
    Manifest,
    SendReport,
    checkpoint_key,
    fetch_checkpoint,
    receive_message,
    send_message,
)
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.restore import CheckpointLocator
from fluid.lane.checkpoints.seal import damage_of, seal
from fluid.lane.checkpoints.store import CheckpointStore
from fluid.lane.protocol import LaneOptions
from fluid.processes.handshake import HELLO_BYTES, Address, new_challenge, read_hello, server_proof

KEY = b"right"
PATIENCE = 60.0
MB = 1 << 20


class Machine:
    """A machine that has checkpoints of a session, and serves them."""

    def __init__(self, folder: Path) -> None:
        self.session_folder = folder / "there" / "run"  # As this machine sees the run's folder; it is empty here.
        self.run_folder = self.session_folder / "hosts" / "fluid-0123456789abcdef-10.0.0.7"
        self.memory_folder = folder / "there" / "fluid-0123456789abcdef-10.0.0.7"
        for made in (self.run_folder, self.memory_folder):
            made.mkdir(parents=True)
        StoreLedger(str(self.memory_folder)).create(10**9, 10**9)
        self.store = CheckpointStore(3, str(self.run_folder), str(self.memory_folder))
        folders = ServedFolders(str(self.session_folder), str(self.run_folder), str(self.memory_folder))
        self.server = CheckpointServer("127.0.0.1", KEY, folders)

    def save(self, iteration: int, data: bytes | None = None, trial_id: str = "a", *, durable: bool = False) -> str:
        def write(folder: str) -> None:
            Path(folder, "state").write_bytes(b"%d" % iteration if data is None else data)

        return self.store.save(trial_id, iteration, write, durable=durable).path


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.server.close()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    path = tmp_path / "here"
    path.mkdir()
    return path


def fetch(source: Address, path: str, here: Path, key: bytes = KEY) -> fetching.Fetched:
    return fetch_checkpoint(source, key, path, lambda name, size: str(here / name), LinkRates(str(here)))


def state(path: str | Path) -> bytes:
    return Path(path, "state").read_bytes()


def checkpoints(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".link-rates")


class Relay:
    """A connection of its own between lane and server, through which at most ``limit`` bytes come to the lane.

    Args:
        target: the server.
        limit: how many bytes come through before ``at_limit`` is called.
        at_limit: called once; the connection is broken afterwards.
        pause: seconds before each 32 KiB that come to the lane.
    """

    def __init__(
        self,
        target: Address,
        limit: float = float("inf"),
        at_limit: Callable[[], object] = lambda: None,
        pause: float = 0.0,
    ) -> None:
        self._target = target
        self._limit = limit
        self._at_limit = at_limit
        self._pause = pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = ("127.0.0.1", self._listener.getsockname()[1])
        self.connections = 0
        self.relayed = 0
        self._lock = threading.Lock()
        self._ended: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                lane, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(self._target)
            for relay in ((lane, server, False), (server, lane, True)):
                thread = threading.Thread(target=self._relay, args=relay)
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, target: socket.socket, to_lane: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 15):
                if to_lane:
                    nap(self._pause)
                    self.relayed += len(data)
                    if self.relayed > self._limit:
                        self._at_limit()
                        break
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._ended.append(source)
            if target in self._ended:  # The other direction has ended, too.
                source.close()
                target.close()


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    def make(*arguments: Any, **options: Any) -> Relay:
        made.append(Relay(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


# -- what is sent -------------------------------------------------------------------------------------------------


def test_a_checkpoint_arrives_whole(there: Machine, here: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("outside")
    (tmp_path / "folder").mkdir()

    def write(folder: str) -> None:
        path = Path(folder)
        (path / "state").write_bytes(random.Random(1).randbytes(3 * MB + 17))
        (path / "empty").touch()
        (path / "sub" / "sub").mkdir(parents=True)
        (path / "sub" / "none").mkdir()
        (path / "sub" / "sub" / "möre \udcff").write_bytes(b"\0" * 1000)
        (path / "program").write_text("x")
        (path / "program").chmod(0o755)
        (path / "file link").symlink_to(tmp_path / "outside")
        (path / "folder link").symlink_to("sub")
        os.mkfifo(path / "pipe")

    path = there.store.save("a/b", 4, write).path
    found, problem = fetch(there.server.address, path, here)
    assert (found, problem) == (str(here / os.path.basename(path)), "")
    assert damage_of(found) is None
    got = {one.relative_to(found).as_posix() for one in Path(found).rglob("*")}
    assert got == {one.relative_to(path).as_posix() for one in Path(path).rglob("*")} - {"pipe"}
    assert state(found) == state(path)
    assert Path(found, "program").stat().st_mode & 0o777 == 0o700
    link = Path(found, "file link")
    assert not link.is_symlink() and link.read_text() == "outside"
    assert os.readlink(Path(found, "folder link")) == "sub"
    assert checkpoints(here) == [os.path.basename(path)]


def test_it_is_found_where_it_has_moved(there: Machine, here: Path) -> None:
    path = there.save(4)
    moved = there.store.persist(path)
    assert fetch(there.server.address, moved, here / "1").problem == ""
    Path(path, "state").unlink()
    os.rename(path, f"{path}-gone")
    found = fetch(there.server.address, path, here / "2").path
    assert state(found) == b"4"


def test_what_an_earlier_session_has_left_on_disk_is_sent_too(there: Machine, here: Path) -> None:
    name = "fluid-ray-fedcba9876543210-10.0.0.7"
    earlier = CheckpointStore(0, str(there.session_folder / "hosts" / name))
    saved = earlier.save("a", 2, lambda folder: Path(folder, "state").write_bytes(b"2"))  # type: ignore[arg-type,return-value]
    written = f"/dev/shm/{name}/a/{os.path.basename(saved.path)}"
    assert state(fetch(there.server.address, written, here).path) == b"2"


def test_in_place_of_one_that_is_gone_the_one_before_is_sent(there: Machine, here: Path) -> None:
    first = there.save(4)
    gone = first.replace("00000004", "00000006")
    assert os.path.basename(fetch(there.server.address, gone, here).path) == os.path.basename(first)
    os.unlink(os.path.join(first, "seal.json"))
    with pytest.raises(FileNotFoundError, match="is damaged or has been deleted, and there is none before it"):
        fetch(there.server.address, first, here / "x")


def test_damage_is_found_on_arrival_and_the_one_before_is_taken(there: Machine, here: Path) -> None:
    first, second = there.save(4), there.save(5, b"fifth")
    Path(second, "state").write_text("FIFTH")
    found, problem = fetch(there.server.address, second, here)
    assert state(found) == b"4"
    assert problem == "the checkpoint of iteration 5 is damaged: state has changed since it was written"
    assert checkpoints(here) == [os.path.basename(first)]
    os.unlink(os.path.join(first, "state"))
    with pytest.raises(FileNotFoundError, match=r"iteration 5 is damaged: .*iteration 4 .*is missing.*none before it"):
        fetch(there.server.address, second, here / "x")
    assert checkpoints(here / "x") == []


def test_only_checkpoints_of_the_session_are_sent(there: Machine, here: Path, tmp_path: Path) -> None:
    other = CheckpointStore(0, str(tmp_path / "other"))
    path = other.save("a", 2, lambda folder: Path(folder, "state").touch()).path
    seal(str(tmp_path))
    os.symlink(os.path.dirname(path), there.run_folder / "link")
    refused = [
        path,
        str(there.run_folder / "link" / os.path.basename(path)),
        f"{there.run_folder}/../../../../other/trials/a/checkpoints/{os.path.basename(path)}",
        os.path.relpath(path),
        str(there.run_folder),
        "",
        "\0",
    ]
    for one in refused:
        with pytest.raises(FileNotFoundError):
            fetch(there.server.address, one, here)
    with pytest.raises(FileNotFoundError, match="is not a checkpoint of this session"):
        fetch(there.server.address, path, here)
    assert checkpoints(here) == []


def test_without_the_key_nothing_is_sent(there: Machine, here: Path) -> None:
    path = there.save(4)
    for key in (b"wrong", b""):
        with pytest.raises(ConnectionError):
            fetch(there.server.address, path, here, key)
    with socket.create_connection(there.server.address) as sock:
        challenge = sock.recv(1000)
        sock.sendall(b"x" * HELLO_BYTES)
        assert len(challenge) == 32 and sock.recv(1000) == b""
    assert state(fetch(there.server.address, path, here).path) == b"4"


@pytest.mark.parametrize(("count", "kind"), [(2000, "silent"), *((300, kind) for kind in KINDS)])
def test_strangers_keep_no_checkpoint_from_being_fetched(there: Machine, here: Path, count: int, kind: str) -> None:
    path = there.save(4)
    with strangers_at(there.server.address, count, kind):
        for number in range(3):
            begun = time.monotonic()
            assert state(fetch(there.server.address, path, here / str(number)).path) == b"4"
            assert time.monotonic() - begun < 2.0


def test_a_checkpoint_stays_while_it_is_sent(there: Machine, here: Path, relay: Callable[..., Relay]) -> None:
    path = there.save(4, b"x" * (16 * MB))
    busy: list[bool] = []

    def look() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            busy.append(False)
        except BlockingIOError:
            busy.append(True)
        os.close(descriptor)

    with pytest.raises(ConnectionError):
        fetch(relay(there.server.address, limit=MB, at_limit=look).address, path, here)
    assert busy == [True]


# -- what comes in between ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [10, 40, 100, 250, MB])
def test_a_connection_that_breaks_leaves_nothing(
    there: Machine, here: Path, relay: Callable[..., Relay], limit: int
) -> None:
    path = there.save(4, random.Random(1).randbytes(2 * MB))
    with pytest.raises(OSError):
        fetch(relay(there.server.address, limit=limit).address, path, here)
    assert checkpoints(here) == []


def test_a_connection_that_stalls_is_given_up(
    there: Machine, here: Path, relay: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "STALL_S", 0.2)
    path = there.save(4, bytes(2 * MB))
    over = threading.Event()
    with pytest.raises(TimeoutError):
        fetch(relay(there.server.address, limit=MB, at_limit=lambda: over.wait(PATIENCE)).address, path, here)
    over.set()
    assert checkpoints(here) == []


def test_a_server_that_ends_breaks_its_connections(there: Machine, here: Path, relay: Callable[..., Relay]) -> None:
    path = there.save(4, bytes(16 * MB))
    with pytest.raises(OSError):
        fetch(relay(there.server.address, limit=2 * MB, at_limit=there.server.close).address, path, here)
    with pytest.raises(ConnectionRefusedError):
        fetch(there.server.address, path, here)
    assert checkpoints(here) == []


def test_a_process_forked_from_the_host_does_not_end_the_server(there: Machine, here: Path) -> None:
    path = there.save(4)
    child = os.fork()
    if not child:
        there.server.abandon()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert state(fetch(there.server.address, path, here).path) == b"4"


def serve_once(manifest: Manifest, contents: bytes) -> tuple[Address, threading.Thread]:
    """A server that sends what it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            challenge, key = new_challenge(), checkpoint_key(KEY)
            sock.sendall(challenge)
            hello = read_hello(key, challenge, sock.recv(HELLO_BYTES, socket.MSG_WAITALL))
            assert hello is not None
            sock.sendall(server_proof(key, challenge, hello))
            receive_message(sock)
            send_message(sock, manifest)
            sock.sendall(contents)
            with suppress(OSError):
                send_message(sock, SendReport(0.0))
                sock.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    return ("127.0.0.1", listener.getsockname()[1]), thread


NAME = "/somewhere/00000004-0-1"


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(NAME, [], [("../x", 0o600, 1)], [], False),
        Manifest(NAME, [], [("/tmp/x", 0o600, 1)], [], False),
        Manifest(NAME, [], [("sub/../../x", 0o600, 1)], [], False),
        Manifest(NAME, [], [("", 0o600, 1)], [], False),
        Manifest(NAME, [], [("x\0", 0o600, 1)], [], False),
        Manifest(NAME, ["../sub"], [], [], False),
        Manifest(NAME, [], [("x", 0o600, 1)], [("../x", "/")], False),
        Manifest(NAME, [], [("x", 0o600, 1), ("x", 0o600, 0)], [], False),
        Manifest("/somewhere/..", [], [], [], False),
        Manifest("/somewhere/", [], [], [], False),
    ],
    ids=lambda manifest: repr((manifest.folders, manifest.files, manifest.links)),
)
def test_names_that_lead_out_of_a_checkpoint_are_refused(tmp_path: Path, here: Path, manifest: Manifest) -> None:
    before = sorted(os.listdir(tmp_path))
    address, thread = serve_once(manifest, b"x")
    with pytest.raises(OSError):
        fetch(address, NAME, here)
    thread.join(PATIENCE)
    assert checkpoints(here) == [] and sorted(os.listdir(tmp_path)) == before


def test_nothing_is_written_through_a_link(tmp_path: Path, here: Path) -> None:
    files = [("link/x", 0o600, 1)]
    address, thread = serve_once(Manifest(NAME, [], files, [("link", str(tmp_path))], False), b"x")
    with pytest.raises(FileNotFoundError):
        fetch(address, NAME, here)
    thread.join(PATIENCE)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("contents", [b"\0\0\0\3abc\0\0\0\0", b"\0\0\0\0", b"\xff\xff\xff\xff"])
def test_data_that_is_not_what_was_announced_is_refused(here: Path, contents: bytes) -> None:
    address, thread = serve_once(Manifest(NAME, [], [("x", 0o600, 100)], [], True), contents)
    with pytest.raises(ConnectionError):
        fetch(address, NAME, here)
    thread.join(PATIENCE)
    assert checkpoints(here) == []


# -- compression --------------------------------------------------------------------------------------------------


def test_data_is_compressed_on_a_slow_link_and_not_on_a_fast_one(
    there: Machine, here: Path, relay: Callable[..., Relay]
) -> None:
    compressible = there.save(4, b"abcdefgh" * (MB // 4))
    slow = relay(there.server.address, pause=0.005)
    relayed = []
    for number in range(2):
        found = fetch_checkpoint(
            slow.address, KEY, compressible, lambda name, size, n=number: str(here / f"{n}{name}"), LinkRates(str(here))
        )
        assert state(found.path) == state(compressible)
        relayed.append(slow.relayed - sum(relayed))
    assert relayed[0] > 2 * MB, "the first transfer measures the link"
    assert relayed[1] < 100_000

    incompressible = there.save(5, random.Random(1).randbytes(2 * MB))
    fetch(slow.address, incompressible, here)
    assert slow.relayed - sum(relayed) > 2 * MB

    LinkRates(str(here / "fast")).record("127.0.0.1", 1 << 40, 1.0, 1.0)
    fast = relay(there.server.address)
    fetch(fast.address, compressible, here / "fast")
    assert fast.relayed > 2 * MB


@pytest.mark.parametrize("size", [1, 100, MB - 1, MB, MB + 1, 5 * MB + 3])
def test_compressed_data_arrives_as_it_was(there: Machine, here: Path, size: int) -> None:
    random_part = random.Random(size).randbytes(size // 3)
    path = there.save(4, (random_part + bytes(size))[:size])
    LinkRates(str(here)).record("127.0.0.1", MB, 1e6, 1e6)
    found = fetch(there.server.address, path, here).path
    assert state(found) == state(path)


# -- lanes --------------------------------------------------------------------------------------------------------


def locator(here: Path, **options: Any) -> CheckpointLocator:
    (here / "memory").mkdir(exist_ok=True)
    StoreLedger(str(here / "memory")).create(10**9, 10**9)
    options = {"run_folder": str(here / "run"), "memory_folder": str(here / "memory"), **options}
    return CheckpointLocator(LaneOptions(0, session_key=KEY, session_folder=str(here / "run"), **options))


def hide(there: Machine, path: str) -> str:
    """Moves what is in host memory to disk; returns the path that no other machine sees."""
    hidden = there.store.persist(path)
    os.rename(os.path.dirname(path), f"{there.memory_folder}/.gone")
    assert os.path.isdir(hidden)
    return path


def test_a_lane_finds_what_another_one_has_fetched(there: Machine, here: Path, relay: Callable[..., Relay]) -> None:
    path = hide(there, there.save(4))
    passed = relay(there.server.address)
    for _ in range(2):
        located = locator(here).locate("a", path, passed.address)
        assert located.problem == ""
    assert passed.connections == 1
    store = CheckpointStore(1, str(here / "run"), str(here / "memory"))
    found = next(filter(os.path.isdir, store.places("a", located.path)))
    assert found.startswith(str(here / "memory")) and state(found) == b"4"


def test_lanes_that_want_it_at_the_same_time_fetch_it_once(
    there: Machine, here: Path, relay: Callable[..., Relay]
) -> None:
    path = hide(there, there.save(4, bytes(2 * MB)))
    passed = relay(there.server.address, pause=0.002)
    problems: list[str] = []

    def ask() -> None:
        problems.append(locator(here).locate("a", path, passed.address).problem)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert problems == [""] * 4
    assert passed.connections == 1


def test_without_room_in_host_memory_it_goes_to_disk(
    there: Machine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hide(there, there.save(4))
    monkeypatch.setattr(locating.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10})())
    locator(here).locate("a", path, there.server.address)
    assert state(here / "run" / "trials" / "a" / "checkpoints" / os.path.basename(path)) == b"4"
    locator(here, memory_folder="").locate("a", path.replace("00000004", "00000005"), there.server.address)


def test_what_cannot_be_fetched_is_told(there: Machine, here: Path) -> None:
    path = hide(there, there.save(4))
    there.server.close()
    located = locator(here).locate("a", path, there.server.address)
    wanted = "the checkpoint of iteration 4 could not be fetched from 127.0.0.1: ConnectionRefusedError"
    assert located.problem.startswith(wanted)


def test_messages_that_are_none_are_refused() -> None:
    wrong = [[], [{"what": "Odd"}], [{"what": "Refusal"}], [{"what": "Refusal", "reason": 1}], "Refusal"]
    bodies = [b"abc", *map(msgpack.encode, wrong)]
    for sent in (b"\xff\xff\xff\xff", *(checkpoint_wire.LENGTH.pack(len(body)) + body for body in bodies)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(sent)
            with pytest.raises(ConnectionError):
                checkpoint_wire.receive_message(theirs)
