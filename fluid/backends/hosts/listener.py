"""Accepts connections of lanes on any machine, authenticated by HMAC.

Any process on the network can connect, and the messages are pickles. So neither end reads a message before the other
has proved that it knows the session's key, which lanes get through Ray. Messages are not encrypted: like all traffic of
a Ray cluster they need a private network. ``multiprocessing.connection.Listener`` has the same handshake, but blocks in
it; here one silent client must not keep the driver from its lanes.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from fluid._clock import MonotonicClock
from fluid.backends.hosts.framed_socket import limit_lane_buffer

_NONCE_BYTES = 32
_PROOF_BYTES = 32
#: Number of the actor, its process, and when that was started.
_HELLO = struct.Struct(f"!qqq{_NONCE_BYTES}s")
#: Seconds a connection has to prove that it knows the key.
_HANDSHAKE_S = 10.0
#: Most connections without a proof; beyond it the oldest is closed.
_MOST_PENDING = 256

Address = tuple[str, int]


class AuthenticatedConnection(NamedTuple):
    """The connection of an actor that knows the key.

    Attributes:
        number: the actor.
        pid: its process, in its own machine's or container's count.
        birth: when the process was started, see :func:`process_start_time`.
    """

    number: int
    pid: int
    start_time: int
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
        selector: its descriptors are registered there, each with a function to call when it is readable.
    """

    def __init__(self, key: bytes, selector: selectors.BaseSelector) -> None:
        self._key = key
        self._selector = selector
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

    def authenticated(self) -> list[AuthenticatedConnection]:
        """Returns the connections authenticated since the last call."""
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

    def _open(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                break  # No more connections; or no descriptors, and the lane tries again.
            sock.setblocking(False)
            pending = _PendingConnection(sock, secrets.token_bytes(_NONCE_BYTES), self._clock.now() + _HANDSHAKE_S)
            self._pending[sock.fileno()] = pending
            self._selector.register(sock, selectors.EVENT_READ, _Callback(self._read_proof, pending))
            with suppress(OSError):  # If it is gone already, reading tells.
                sock.send(pending.challenge)
        for old in [pending for pending in self._pending.values() if pending.deadline < self._clock.now()]:
            self._reject(old)
        while len(self._pending) > _MOST_PENDING:
            self._reject(next(iter(self._pending.values())))

    def _read_proof(self, pending: _PendingConnection) -> None:
        wanted = _HELLO.size + _PROOF_BYTES
        try:
            received = pending.socket.recv(wanted - len(pending.received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        pending.received += received
        if received and len(pending.received) < wanted:
            return
        hello, proof = bytes(pending.received[: _HELLO.size]), bytes(pending.received[_HELLO.size :])
        if not hmac.compare_digest(proof, _prove(self._key, b"lane", pending.challenge, hello)):
            self._reject(pending)
            return
        number, pid, start_time, nonce = _HELLO.unpack(hello)
        self._forget(pending)
        _set_options(pending.socket)
        with suppress(OSError):
            pending.socket.send(_prove(self._key, b"driver", nonce, pending.challenge))
        self._authenticated.append(AuthenticatedConnection(number, pid, start_time, pending.socket))

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


def connect(address: Address, key: bytes, number: int) -> socket.socket:
    """Connects an actor to the driver.

    Args:
        address: where the driver listens.
        key: shared by the session's processes.
        number: which actor this is.

    Raises:
        OSError: the driver cannot be reached, or what listens there does not know the key.
    """
    sock = socket.create_connection(address, timeout=_HANDSHAKE_S)
    try:
        limit_lane_buffer(sock)
        _set_options(sock)
        challenge = _receive(sock, _NONCE_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hello = _HELLO.pack(number, os.getpid(), process_start_time(os.getpid()), nonce)
        sock.sendall(hello + _prove(key, b"lane", challenge, hello))
        if not hmac.compare_digest(_receive(sock, _PROOF_BYTES), _prove(key, b"driver", nonce, challenge)):
            raise ConnectionError("what listens there is not this session's driver")
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def is_reachable(address: Address, timeout: float) -> bool:
    """Whether a process listens at an address, as far as ``timeout`` seconds can tell."""
    try:
        socket.create_connection(address, timeout=timeout).close()
    except OSError:
        return False
    return True


def process_start_time(pid: int) -> int:
    """Returns when a process was started, in clock ticks since boot; -1 without such a process.

    It tells apart processes that had the same number one after the other.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in brackets, may hold anything.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


def _prove(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"|".join((b"fluid", role, *parts)), "sha256")


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the driver closed the connection")
        data += piece
    return data


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that is switched off closes no connection. Not TCP_USER_TIMEOUT: that would also end the connection to a
    # lane that is too busy with an iteration to read.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
