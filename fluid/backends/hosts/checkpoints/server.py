"""Sends checkpoints of this machine to lanes of other machines: straight to them, not through the driver.

Its client is :mod:`fluid.lane.checkpoints.fetch`, and what they say :mod:`fluid.lane.checkpoints.fetch`. It runs in
threads of the host's process, which the transfers do not hold up: they spend their time in calls that let other threads
run.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress

from msgspec import structs

from fluid._clock import Clock, MonotonicClock
from fluid._logs import logger_of
from fluid.backends.hosts.sockets import LaneListener, WakeableSelector
from fluid.lane.checkpoints.fetch import (
    LENGTH,
    PIECE,
    STALL_S,
    CheckpointRequest,
    Manifest,
    Refusal,
    SendReport,
    checkpoint_key,
    compression_pays,
    receive_message,
    send_message,
)
from fluid.lane.checkpoints.files import checkpoints_like, locked_for_reading
from fluid.lane.checkpoints.paths import checkpoints_folder, settled_path, trial_folder_name
from fluid.lane.checkpoints.seal import SEAL, complete_seal
from fluid.processes.handshake import Address
from fluid.waiting.waits import BackgroundThread

# -- checkpoint sending --------------------------------------------------------------------------
#
# Sends a checkpoint over a connection: straight from its files, or compressed where it then arrives earlier.


_log = logger_of(__name__)

#: The fastest level of zlib.
_LEVEL = 1
#: A transfer that takes fewer seconds is not worth a look at how well its data compresses.
_WORTH_A_LOOK_S = 0.05
#: Where samples for that are taken, as shares of all data, and the bytes of each.
_SAMPLES_AT, _SAMPLE_BYTES = (0.1, 0.5, 0.9), 1 << 16


def describe(folder: str) -> Manifest | None:
    """Returns the manifest of a checkpoint; ``None`` if it has no seal. A link to a file counts as the file."""
    folders: list[str] = []
    files: list[tuple[str, int, int]] = []
    links: list[tuple[str, str]] = []

    def add(path: str, prefix: str) -> None:
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = prefix + entry.name
                if entry.is_file():
                    found = entry.stat()
                    files.append((name, stat.S_IMODE(found.st_mode), found.st_size))
                elif entry.is_symlink():
                    links.append((name, os.readlink(entry.path)))
                elif entry.is_dir():
                    folders.append(name)
                    add(entry.path, f"{name}/")

    add(folder, "")
    has_seal = any(path == SEAL for path, _, _ in files)
    return Manifest(folder, folders, files, links, compressed=False) if has_seal else None


def send_checkpoint(sock: socket.socket, manifest: Manifest, rate: float | None, clock: Clock) -> None:
    """Sends a checkpoint, which is locked.

    Raises:
        OSError: the connection broke or stalls, or a file cannot be read; the connection must then be closed.
    """
    manifest = structs.replace(manifest, compressed=_should_compress(manifest, rate, clock))
    send_message(sock, manifest)
    begun = clock.now()
    waited = _send_compressed(sock, manifest, clock) if manifest.compressed else _send_plain(sock, manifest, clock)
    send_message(sock, SendReport(waited))
    _log.debug("%s was sent in %.3f s%s", manifest.place, clock.now() - begun, ", compressed" * manifest.compressed)


def _send_plain(sock: socket.socket, manifest: Manifest, clock: Clock) -> float:
    """Sends files as they are; returns the seconds that it took."""
    begun = clock.now()
    for path, _, size in manifest.files:
        if size:
            with open(os.path.join(manifest.place, path), "rb", buffering=0) as file:
                if sock.sendfile(file, count=size) != size:
                    raise OSError(f"{path} has become shorter")
    return clock.now() - begun


def _send_compressed(sock: socket.socket, manifest: Manifest, clock: Clock) -> float:
    """Sends files compressed; returns the seconds in which it waited for the network."""
    compressor = zlib.compressobj(_LEVEL)
    waited = 0.0

    def send(data: bytes) -> None:
        nonlocal waited
        if data:
            begun = clock.now()
            sock.sendall(LENGTH.pack(len(data)))
            sock.sendall(data)
            waited += clock.now() - begun

    for path, _, size in manifest.files:
        left = size
        with open(os.path.join(manifest.place, path), "rb", buffering=0) as file:
            while left:
                piece = file.read(min(left, PIECE))
                if not piece:
                    raise OSError(f"{path} has become shorter")
                left -= len(piece)
                send(compressor.compress(piece))
    send(compressor.flush())
    sock.sendall(LENGTH.pack(0))
    return waited


def _should_compress(manifest: Manifest, rate: float | None, clock: Clock) -> bool:
    """Whether a checkpoint arrives earlier if it is compressed, as far as samples of it tell.

    Args:
        manifest: the checkpoint's.
        rate: bytes per second that the link carries; ``None`` if it is not known.
        clock: measures the compressor.
    """
    if rate is None or manifest.size < _WORTH_A_LOOK_S * rate:
        return False
    sample = b"".join(_read_at(manifest, int(share * manifest.size)) for share in _SAMPLES_AT)
    begun = clock.now()
    packed = zlib.compress(sample, _LEVEL)
    if not sample:  # The files have just become shorter; sending them will tell.
        return False
    seconds = max(1e-9, clock.now() - begun)
    return compression_pays(rate, len(sample) / seconds, len(packed) / len(sample))


def _read_at(manifest: Manifest, offset: int) -> bytes:
    """Reads some bytes at an offset into all the data of a checkpoint, from one file."""
    for path, _, size in manifest.files:
        if offset < size:
            with open(os.path.join(manifest.place, path), "rb", buffering=0) as file:
                file.seek(offset)
                return file.read(_SAMPLE_BYTES)
        offset -= size
    return b""


# -- checkpoint server ---------------------------------------------------------------------------


#: Most connections that are served at a time; further ones of the session's lanes wait.
_MOST_CONNECTIONS = 128
#: Seconds between two looks at connections without a proof.
_LOOK_S = 2.0


class CheckpointServer:
    """Serves the checkpoints of a session that are on this machine, to those that know its key.

    Args:
        ip: this machine's address, at which other machines reach it.
        key: the session's.
        folders: those that have the session's checkpoints.

    Attributes:
        address: where it listens.

    Raises:
        OSError: this machine has no such address.
    """

    def __init__(self, ip: str, key: bytes, folders: ServedFolders) -> None:
        self._key = checkpoint_key(key)
        self._folders = folders
        self._listener = LaneListener(self._key, "the port for checkpoints")
        self.address: Address = self._listener.listen(ip)
        self._selector = WakeableSelector()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._closed = threading.Event()
        self._clock = MonotonicClock()
        self._accepting = BackgroundThread("fluid-checkpoints", self._accept)
        self._accepting.start()

    def close(self) -> None:
        """Stops listening, and breaks the connections that there are. Closing twice is harmless."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for sock in self._connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits for it.
        self._selector.wake()
        self._accepting.join()
        self._listener.close()
        self._selector.close()

    def abandon(self) -> None:
        """Called in a process forked from the host: closes descriptors that are the host's."""
        self._listener.abandon()
        self._selector.close()
        for sock in self._connections:
            sock.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._selector.watch("listener", self._listener)
            self._selector.wait(_LOOK_S)
            for connected in self._listener.accept():
                with self._lock:
                    if self._closed.is_set():
                        connected.socket.close()
                        continue
                    self._connections.add(connected.socket)
                serving = threading.Thread(target=self._serve, args=(connected.socket,), name="fluid-checkpoint")
                serving.daemon = True
                serving.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock, self._places:
                sock.settimeout(STALL_S)
                while True:
                    request = receive_message(sock)
                    if not isinstance(request, CheckpointRequest):
                        return
                    self._answer(sock, request)
        except OSError as error:  # The client has gone, as all do in the end.
            _log.debug("a connection for checkpoints has ended: %s", error)
        except Exception:
            _log.exception("a checkpoint could not be sent")
        finally:
            with self._lock:
                self._connections.discard(sock)

    def _answer(self, sock: socket.socket, request: CheckpointRequest) -> None:
        for place in self._folders.places(request.path):
            if place in request.without:
                continue
            with locked_for_reading(place) as exists:
                if exists:
                    complete_seal(place)
                manifest = describe(place) if exists else None
                if manifest is not None:
                    send_checkpoint(sock, manifest, request.rate, self._clock)
                    return
        send_message(sock, Refusal(self._folders.why_none(request.path)))


class ServedFolders:
    """The folders on this machine that may have checkpoints of a session, and which of those are sent for a path.

    Args:
        session_folder: the run's folder on the driver's machine; what is at that path here may be of the run, too.
        run_folder: the run's folder on this machine.
        memory_folder: the session's folder in host memory; empty if there is none.
    """

    def __init__(self, session_folder: str, run_folder: str, memory_folder: str = "") -> None:
        self._session_folder = session_folder
        self._run_folder = run_folder
        self._memory_folder = memory_folder
        self._roots = [os.path.realpath(root) for root in (session_folder, run_folder, memory_folder) if root]

    def places(self, path: str) -> Iterator[str]:
        """Yields the folders of a checkpoint and of those that can replace it, the best first; some may not exist.

        Args:
            path: where it was written.
        """
        settled = settled_path(path, self._session_folder)
        if not self._may_ask(path, settled):
            return
        parent, trial = os.path.dirname(path), trial_folder_name(path)
        disk = parent if settled is None else os.path.dirname(settled)
        roots = [parent, disk, checkpoints_folder(self._run_folder, trial)]
        if self._memory_folder:
            roots.append(os.path.join(self._memory_folder, trial))
        for place in checkpoints_like(path, dict.fromkeys(roots), disk):
            if self._is_served(place):
                yield place

    def why_none(self, path: str) -> str:
        """Returns why none was sent for a path."""
        if not self._may_ask(path, settled_path(path, self._session_folder)):
            return f"{path} is not a checkpoint of this session"
        name = os.path.basename(path)
        return f"the checkpoint {name} is damaged or has been deleted, and there is none before it"

    def _may_ask(self, path: str, settled: str | None) -> bool:
        is_plain = os.path.isabs(path) and os.path.normpath(path) == path and "\0" not in path
        return is_plain and (self._is_served(path) or settled is not None)

    def _is_served(self, place: str) -> bool:
        real = os.path.realpath(place)
        is_within = any(os.path.commonpath((root, real)) == root for root in self._roots)
        return is_within and os.path.basename(place)[:1].isdigit()
