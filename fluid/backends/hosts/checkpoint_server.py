"""Sends checkpoints of this machine to lanes of other machines: straight to them, not through the driver.

Its client is :mod:`fluid.lane.checkpoints.fetch`, and what they say :mod:`fluid.lane.checkpoints.fetch`. It runs in
threads of the host's process, which the transfers do not hold up: they spend their time in calls that let other threads
run.
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
from fluid.backends.hosts.listener import LaneListener
from fluid.backends.hosts.selector import WakeableSelector
from fluid.lane.checkpoints.fetch import (
    STALL_S,
    CheckpointRequest,
    Refusal,
    checkpoint_key,
    receive_message,
    send_message,
)
from fluid.lane.checkpoints.files import checkpoints_like, locked_for_reading
from fluid.lane.checkpoints.paths import checkpoints_folder, settled_path, trial_folder_name
from fluid.processes.handshake import Address

_log = logger_of(__name__)

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
