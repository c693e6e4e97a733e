"""Sends checkpoints of this machine to lanes of other machines: straight to them, not through the driver.

Its client is :mod:`fluid.lane.fetching`, and what they say :mod:`fluid.lane.checkpoint_wire`. It runs in threads of the
host's process, which the transfers do not hold up: they spend their time in calls that let other threads run.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

from fluid._clock import MonotonicClock
from fluid._logs import logger_of
from fluid._waiting import BackgroundThread
from fluid.backends.hosts.checkpoint_sending import describe, send_checkpoint
from fluid.lane.checkpoint_files import checkpoints_like, locked_for_reading
from fluid.lane.checkpoint_paths import checkpoints_folder, settled_path, trial_folder_name
from fluid.lane.checkpoint_wire import (
    STALL_S,
    CheckpointRequest,
    Refusal,
    checkpoint_key,
    receive_message,
    send_message,
)
from fluid.processes.handshake import Address, authenticate_client, keep_alive

_log = logger_of(__name__)

#: Most connections at a time; further ones wait.
_MOST_CONNECTIONS = 128
#: Seconds after which a connection that could not be accepted is tried again.
_RETRY_S = 1.0


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
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.create_server((ip, 0), family=family, backlog=_MOST_CONNECTIONS)
        self.address: Address = (ip, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._closed = threading.Event()
        self._clock = MonotonicClock()
        self._accepting = BackgroundThread("fluid-checkpoints", self._accept)
        self._accepting.start()

    def close(self) -> None:
        """Stops listening, and breaks the connections that there are."""
        with self._lock:
            self._closed.set()
            for sock in (self._listener, *self._connections):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits for it.
        self._accepting.join()
        self._listener.close()

    def abandon(self) -> None:
        """Called in a process forked from the host: closes descriptors that are the host's."""
        for sock in (self._listener, *self._connections):
            sock.close()

    def _accept(self) -> None:
        while True:
            self._free.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                self._free.release()
                if self._closed.wait(_RETRY_S):
                    return
                _log.warning("no connection for a checkpoint could be accepted: %s", error)  # For want of descriptors.
                continue
            with self._lock:
                if self._closed.is_set():
                    sock.close()
                    return
                self._connections.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="fluid-checkpoint", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                authenticate_client(sock, self._key)
                keep_alive(sock)
                sock.settimeout(STALL_S)
                while True:
                    request = receive_message(sock)
                    if not isinstance(request, CheckpointRequest):
                        return
                    self._answer(sock, request)
        except OSError as error:  # The client has gone, as all do in the end, or has not proved that it knows the key.
            _log.debug("a connection for checkpoints has ended: %s", error)
        except Exception:
            _log.exception("a checkpoint could not be sent")
        finally:
            with self._lock:
                self._connections.discard(sock)
            self._free.release()

    def _answer(self, sock: socket.socket, request: CheckpointRequest) -> None:
        for place in self._folders.places(request.path):
            if place in request.without:
                continue
            with locked_for_reading(place) as exists:
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
