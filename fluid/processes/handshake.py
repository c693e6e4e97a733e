"""Mutual authentication of two processes of a session over TCP, by HMAC (RFC 2104) of random challenges.

Any process on the network can connect, and what it says would be done. So neither end reads a message before the other
has proved that it knows the session's key. Messages are not encrypted: like all traffic of a Ray cluster they need a
private network. ``multiprocessing.connection`` has the same handshake, but makes each connection wait for its own round
trips; here many connections share them, and a server need not block.

The server sends a challenge; the client answers with its hello and the proof for it; the server answers with its own
proof.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from fluid._clock import Clock, MonotonicClock
from fluid.wire import VERSION

_NONCE_BYTES = 32
_PROOF_BYTES = 32
#: Bytes of a version, with zeros after it.
_VERSION_BYTES = 64
#: Number of the client, its version, and a challenge for the server.
_HELLO = struct.Struct(f"!q{_VERSION_BYTES}s{_NONCE_BYTES}s")
#: Bytes that a client sends: its hello and its proof.
HELLO_BYTES = _HELLO.size + _PROOF_BYTES
#: Seconds that both sides have.
HANDSHAKE_S = 10.0

Address = tuple[str, int]


class Hello(NamedTuple):
    """What a client says of itself.

    Attributes:
        number: chosen by the client.
        version: its Fluid's.
        nonce: its challenge for the server.
    """

    number: int
    version: str
    nonce: bytes


def derive_key(key: bytes, purpose: bytes) -> bytes:
    """Returns the key for connections of another purpose, so that no proof can be used for both.

    Args:
        key: the session's.
        purpose: of the connections.
    """
    return hmac.digest(key, b"fluid|purpose|" + purpose, "sha256")


def new_challenge() -> bytes:
    """Returns what a server sends first."""
    return secrets.token_bytes(_NONCE_BYTES)


def read_hello(key: bytes, challenge: bytes, data: bytes) -> Hello | None:
    """Returns what a client says of itself; ``None`` if it does not know the key.

    Args:
        key: shared by the session's processes.
        challenge: that was sent to the client.
        data: the :data:`HELLO_BYTES` bytes that it sent.
    """
    hello, proof = data[: _HELLO.size], data[_HELLO.size :]
    if len(data) != HELLO_BYTES or not hmac.compare_digest(proof, _prove(key, b"client", challenge, hello)):
        return None
    number, version, nonce = _HELLO.unpack(hello)
    return Hello(number, version.rstrip(b"\0").decode(errors="replace"), nonce)


def server_proof(key: bytes, challenge: bytes, hello: Hello) -> bytes:
    """Returns what a server sends to a client that knows the key."""
    return _prove(key, b"server", hello.nonce, challenge)


def connect_all(address: Address, key: bytes, numbers: Sequence[int]) -> list[socket.socket]:
    """Opens and authenticates several connections to a server, in the time that one takes.

    Args:
        address: where the server listens.
        key: shared by the session's processes.
        numbers: one for each connection.

    Returns:
        The connections, in blocking mode, in the order of ``numbers``.

    Raises:
        OSError: the server cannot be reached, or what listens there does not know the key. No connection is left.
    """
    clock = MonotonicClock()
    handshakes: list[_ClientHandshake] = []
    try:
        for number in numbers:
            handshakes.append(_ClientHandshake(address, key, number, clock))
        for handshake in handshakes:
            handshake.await_connection()
        for handshake in handshakes:
            handshake.send_hello()
        return [handshake.check_server() for handshake in handshakes]
    except BaseException:
        for handshake in handshakes:
            handshake.socket.close()
        raise


def keep_alive(sock: socket.socket) -> None:
    """Sets a connection to send small messages at once, and to notice within 15 s that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that is switched off closes no connection. Not TCP_USER_TIMEOUT: that would also end the connection to a
    # lane that is too busy with an iteration to read.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _ClientHandshake:
    """A client's part of the handshake, in steps; each waits for the server until the deadline."""

    def __init__(self, address: Address, key: bytes, number: int, clock: Clock) -> None:
        self._key = key
        self._number = number
        self._clock = clock
        self._deadline = clock.now() + HANDSHAKE_S
        self._challenge = self._nonce = b""
        self.socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        try:
            self.socket.setblocking(False)
            keep_alive(self.socket)
            problem = self.socket.connect_ex(address)
            if problem not in (0, errno.EINPROGRESS):
                raise OSError(problem, os.strerror(problem))
        except BaseException:
            self.socket.close()
            raise

    def await_connection(self) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        if not poll.poll(1000.0 * _remaining(self._clock, self._deadline)):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        problem = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem))

    def send_hello(self) -> None:
        self._challenge = self._receive(_NONCE_BYTES)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        hello = _HELLO.pack(self._number, VERSION.encode()[:_VERSION_BYTES], self._nonce)
        self.socket.sendall(hello + _prove(self._key, b"client", self._challenge, hello))

    def check_server(self) -> socket.socket:
        proof = self._receive(_PROOF_BYTES)
        if not hmac.compare_digest(proof, _prove(self._key, b"server", self._nonce, self._challenge)):
            raise ConnectionError("what listens there does not know this session's key")
        self.socket.settimeout(None)
        return self.socket

    def _receive(self, size: int) -> bytes:
        return _receive(self.socket, size, self._clock, self._deadline)


def _prove(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"|".join((b"fluid", role, *parts)), "sha256")


def _receive(sock: socket.socket, size: int, clock: Clock, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(_remaining(clock, deadline))
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        data += piece
    return data


def _remaining(clock: Clock, deadline: float) -> float:
    """Seconds to a deadline; more than 0, which would mean not to wait at all."""
    return max(0.001, deadline - clock.now())
