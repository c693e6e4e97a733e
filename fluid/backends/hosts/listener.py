"""Accepts connections of lanes on any machine, once they are authenticated (:mod:`fluid.processes.handshake`).

One silent client must not keep the driver from its lanes, so nothing blocks here.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from fluid._clock import MonotonicClock
from fluid.processes.handshake import (
    HANDSHAKE_S,
    HELLO_BYTES,
    Address,
    Hello,
    keep_alive,
    new_challenge,
    read_hello,
    server_proof,
)

#: Most connections without a proof; beyond it the oldest is closed. Hosts open those of their lanes all at once.
_MOST_PENDING = 1024


class AuthenticatedConnection(NamedTuple):
    """A connection of a process that knows the key."""

    hello: Hello
    socket: socket.socket


@dataclass(slots=True)
class _PendingConnection:
    """A connection whose proof has not arrived yet."""

    socket: socket.socket
    challenge: bytes
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class LaneListener:
    """Listens for lanes, and accepts those that know the key. Never waits.

    Args:
        key: shared by the session's processes.

    Attributes:
        wants_to_write: never.
    """

    wants_to_write = False

    def __init__(self, key: bytes) -> None:
        self._key = key
        #: Keeps with each descriptor a function to call when it is readable.
        self._selector = selectors.EpollSelector()
        self._clock = MonotonicClock()
        self._lock = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._pending: OrderedDict[int, _PendingConnection] = OrderedDict()
        self._authenticated: list[AuthenticatedConnection] = []

    def listen(self, ip: str) -> Address:
        """Listens on an address of this machine, if it does not yet; from any thread. Returns address and port.

        Raises:
            OSError: this machine has no such address.
        """
        with self._lock:
            listener = self._listeners.get(ip)
            if listener is None:
                family = socket.AF_INET6 if ":" in ip else socket.AF_INET
                listener = socket.create_server((ip, 0), family=family, backlog=1024)
                listener.setblocking(False)
                self._listeners[ip] = listener
                self._selector.register(listener, selectors.EVENT_READ, _Callback(self._open, listener))
            port: int = listener.getsockname()[1]
            return ip, port

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`accept` has something to do."""
        return self._selector.fileno()

    def accept(self) -> list[AuthenticatedConnection]:
        """Returns the connections authenticated since the last call."""
        for key, _ in self._selector.select(0):
            key.data()
        authenticated, self._authenticated = self._authenticated, []
        return authenticated

    def close(self) -> None:
        """Stops listening, and closes every connection that was not returned."""
        with self._lock:
            for connected in self._authenticated:
                connected.socket.close()
            for listener in self._listeners.values():
                listener.close()
            for pending in self._pending.values():
                pending.socket.close()
            self._authenticated.clear()
            self._listeners.clear()
            self._pending.clear()
            self._selector.close()

    def _open(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                break  # No more connections; or no descriptors, and the lane tries again.
            sock.setblocking(False)
            pending = _PendingConnection(sock, new_challenge(), self._clock.now() + HANDSHAKE_S)
            self._pending[sock.fileno()] = pending
            self._selector.register(sock, selectors.EVENT_READ, _Callback(self._read_proof, pending))
            with suppress(OSError):  # If it is gone already, reading tells.
                sock.send(pending.challenge)
        for old in [pending for pending in self._pending.values() if pending.deadline < self._clock.now()]:
            self._reject(old)
        while len(self._pending) > _MOST_PENDING:
            self._reject(next(iter(self._pending.values())))

    def _read_proof(self, pending: _PendingConnection) -> None:
        try:
            received = pending.socket.recv(HELLO_BYTES - len(pending.received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        pending.received += received
        if received and len(pending.received) < HELLO_BYTES:
            return
        hello = read_hello(self._key, pending.challenge, bytes(pending.received))
        if hello is None:
            self._reject(pending)
            return
        self._forget(pending)
        keep_alive(pending.socket)
        with suppress(OSError):
            pending.socket.send(server_proof(self._key, pending.challenge, hello))
        self._authenticated.append(AuthenticatedConnection(hello, pending.socket))

    def _reject(self, pending: _PendingConnection) -> None:
        self._forget(pending)
        pending.socket.close()

    def _forget(self, pending: _PendingConnection) -> None:
        self._selector.unregister(pending.socket)
        del self._pending[pending.socket.fileno()]


class _Callback:
    """A function and its argument; what a selector keeps with a descriptor."""

    def __init__(self, function: Callable[..., None], argument: object) -> None:
        self._function = function
        self._argument = argument

    def __call__(self) -> None:
        self._function(self._argument)


def is_reachable(address: Address, timeout: float) -> bool:
    """Whether a process listens at an address, as far as ``timeout`` seconds can tell."""
    try:
        socket.create_connection(address, timeout=timeout).close()
    except OSError:
        return False
    return True
