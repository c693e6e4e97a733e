"""Accepts connections of lanes on any machine, once they are authenticated (:mod:`fluid.processes.handshake`).

One silent client must not keep the driver from its lanes, so nothing blocks here. Both servers of a session use it:
that of lanes' connections to the driver, and that of checkpoints.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

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
from fluid.processes.strangers import Strangers

#: Most connections that are accepted before proofs are read again: no flood of them comes before a proof that is there.
_ACCEPTED_AT_ONCE = 64


class AuthenticatedConnection(NamedTuple):
    """A connection of a process that knows the key."""

    hello: Hello
    socket: socket.socket


@dataclass(slots=True, eq=False)
class _PendingConnection:
    """A connection whose proof has not arrived yet."""

    socket: socket.socket
    challenge: bytes
    received: bytearray = field(default_factory=bytearray)


class LaneListener:
    """Listens for lanes, and accepts those that know the key. Never waits.

    Args:
        key: shared by the session's processes.
        service: what it is, for the log.

    Attributes:
        wants_to_write: never.
    """

    wants_to_write = False

    def __init__(self, key: bytes, service: str = "the port for lanes") -> None:
        self._key = key
        #: Keeps with each descriptor a function to call when it is readable.
        self._selector = selectors.EpollSelector()
        self._lock = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._strangers: Strangers[_PendingConnection] = Strangers(service, self._drop, HANDSHAKE_S)
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
        self._strangers.turn_late_away()
        authenticated, self._authenticated = self._authenticated, []
        return authenticated

    def close(self) -> None:
        """Stops listening, and closes every connection that was not returned."""
        with self._lock:
            self.abandon()
            self._authenticated.clear()
            self._listeners.clear()

    def abandon(self) -> None:
        """Called in a process forked from this one: closes descriptors that are this one's."""
        pending = (stranger.socket for stranger in self._strangers)
        returned = (connected.socket for connected in self._authenticated)
        for sock in (*self._listeners.values(), *pending, *returned):
            sock.close()
        self._selector.close()

    def _open(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers.turn_oldest_away():
                    continue
                break  # No more connections; or no descriptors, and the lane tries again.
            sock.setblocking(False)
            pending = _PendingConnection(sock, new_challenge())
            self._selector.register(sock, selectors.EVENT_READ, _Callback(self._read_proof, pending))
            self._strangers.add(pending)
            with suppress(OSError):  # If it is gone already, reading tells.
                sock.send(pending.challenge)

    def _read_proof(self, pending: _PendingConnection) -> None:
        if pending not in self._strangers:
            return  # It was closed after the selector had found it ready.
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
        if hello is not None:
            self._strangers.remove(pending)
            self._selector.unregister(pending.socket)
            keep_alive(pending.socket)
            with suppress(OSError):
                pending.socket.send(server_proof(self._key, pending.challenge, hello))
            self._authenticated.append(AuthenticatedConnection(hello, pending.socket))
        elif received:
            self._strangers.refuse(pending)
        elif self._strangers.remove(pending):  # It has gone by itself, as those do that only look who listens.
            self._drop(pending)

    def _drop(self, pending: _PendingConnection) -> None:
        self._selector.unregister(pending.socket)
        pending.socket.close()


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
