"""How a lane on whatever machine gets a connection to the driver that both can trust.

Whoever can connect may try, so neither end reads a message before the other has proved that it knows the session's
key: the messages are pickles. The key reaches lanes through Ray. As everything in a Ray cluster, what follows is not
encrypted: its network is taken to be private.
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
from fluid.backends.lanes.framed_socket import limit_lane_buffer

_NONCE_BYTES = 32
_PROOF_BYTES = 32
#: Number of the actor, its process, and when that was born.
_HELLO = struct.Struct(f"!qqq{_NONCE_BYTES}s")
#: Seconds a guest has to prove itself.
_PATIENCE_S = 10.0
#: Connections that have not proved themselves; beyond it the oldest is closed.
_MOST_GUESTS = 256

Address = tuple[str, int]


class AuthenticatedConnection(NamedTuple):
    """An actor that has connected and proved itself.

    Attributes:
        number: which one.
        pid: its process, in its own machine's or container's count.
        birth: when that process was started, see :func:`process_start_time`.
    """

    number: int
    pid: int
    birth: int
    socket: socket.socket


@dataclass(slots=True)
class _PendingConnection:
    """Somebody at the door."""

    socket: socket.socket
    challenge: bytes
    deadline: float
    heard: bytearray = field(default_factory=bytearray)


class LaneListener:
    """Listens for lanes and lets in those that know the key. Never waits.

    Args:
        key: shared by the session's processes.
        selector: where to put descriptors in; what is put in with them is to be called when they are readable.
    """

    def __init__(self, key: bytes, selector: selectors.BaseSelector) -> None:
        self._key = key
        self._selector = selector
        self._clock = MonotonicClock()
        self._lock = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._guests: OrderedDict[int, _PendingConnection] = OrderedDict()
        self._arrivals: list[AuthenticatedConnection] = []

    def listen(self, ip: str) -> Address:
        """Listens on an address of this machine, if it does not yet, and returns where; from any thread.

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

    def arrivals(self) -> list[AuthenticatedConnection]:
        """Returns those who were let in since it was last asked."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def close(self) -> None:
        """Sends everybody away who was not let in yet."""
        with self._lock:
            for arrival in self._arrivals:
                arrival.socket.close()
            for listener in self._listeners.values():
                listener.close()
            for guest in self._guests.values():
                guest.socket.close()
            self._arrivals.clear()
            self._listeners.clear()
            self._guests.clear()

    def _open(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                break  # Nobody is left at the door; or no descriptors are: they can try again.
            sock.setblocking(False)
            guest = _PendingConnection(sock, secrets.token_bytes(_NONCE_BYTES), self._clock.now() + _PATIENCE_S)
            self._guests[sock.fileno()] = guest
            self._selector.register(sock, selectors.EVENT_READ, _Callback(self._hear, guest))
            with suppress(OSError):  # If it is gone already, reading tells.
                sock.send(guest.challenge)
        for old in [guest for guest in self._guests.values() if guest.deadline < self._clock.now()]:
            self._dismiss(old)
        while len(self._guests) > _MOST_GUESTS:
            self._dismiss(next(iter(self._guests.values())))

    def _hear(self, guest: _PendingConnection) -> None:
        wanted = _HELLO.size + _PROOF_BYTES
        try:
            heard = guest.socket.recv(wanted - len(guest.heard))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            heard = b""
        guest.heard += heard
        if heard and len(guest.heard) < wanted:
            return
        hello, proof = bytes(guest.heard[: _HELLO.size]), bytes(guest.heard[_HELLO.size :])
        if not hmac.compare_digest(proof, _prove(self._key, b"lane", guest.challenge, hello)):
            self._dismiss(guest)
            return
        number, pid, birth, nonce = _HELLO.unpack(hello)
        self._forget(guest)
        _set_options(guest.socket)
        with suppress(OSError):
            guest.socket.send(_prove(self._key, b"driver", nonce, guest.challenge))
        self._arrivals.append(AuthenticatedConnection(number, pid, birth, guest.socket))

    def _dismiss(self, guest: _PendingConnection) -> None:
        self._forget(guest)
        guest.socket.close()

    def _forget(self, guest: _PendingConnection) -> None:
        self._selector.unregister(guest.socket)
        del self._guests[guest.socket.fileno()]


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
        OSError: the driver cannot be reached, or whoever is there does not know the key.
    """
    sock = socket.create_connection(address, timeout=_PATIENCE_S)
    try:
        limit_lane_buffer(sock)
        _set_options(sock)
        challenge = _receive(sock, _NONCE_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hello = _HELLO.pack(number, os.getpid(), process_start_time(os.getpid()), nonce)
        sock.sendall(hello + _prove(key, b"lane", challenge, hello))
        if not hmac.compare_digest(_receive(sock, _PROOF_BYTES), _prove(key, b"driver", nonce, challenge)):
            raise ConnectionError("it is not this session's driver")
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def is_reachable(address: Address, timeout: float) -> bool:
    """Whether somebody listens at an address, as far as can be told within ``timeout`` seconds."""
    try:
        socket.create_connection(address, timeout=timeout).close()
    except OSError:
        return False
    return True


def process_start_time(pid: int) -> int:
    """When a process was started, in clock ticks since its machine was; -1 if there is none. Tells apart processes
    of one number."""
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
            raise ConnectionError("the driver sent this lane away")
        data += piece
    return data


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that is switched off says no goodbye. Not TCP_USER_TIMEOUT: that would also end the connection to a
    # lane that is too busy with an iteration to read.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
