"""The driver's end of a connection, against the standard library's."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from fluid.backends.hosts.framed_socket import FramedSocket
from fluid.lane.messages import decode, encode


@pytest.fixture
def ends() -> Iterator[tuple[FramedSocket, Connection]]:
    ours, theirs = socket.socketpair()
    wire, connection = FramedSocket(ours), Connection(theirs.detach())
    yield wire, connection
    wire.close()
    connection.close()


def receive(wire: FramedSocket, count: int) -> list[Any]:
    found: list[Any] = []
    poller = select.poll()
    poller.register(wire.fileno(), select.POLLIN)
    while len(found) < count and not wire.ended:
        assert poller.poll(60_000)
        found += wire.receive()
    return found


def test_both_ways(ends: tuple[FramedSocket, Connection]) -> None:
    wire, connection = ends
    wire.send(["a", 1])
    wire.send([])
    wire.send(["b"])
    assert [decode(connection.recv_bytes()) for _ in range(3)] == [["a", 1], [], ["b"]]
    assert wire.receive() == []
    connection.send_bytes(encode(["c"]))
    connection.send_bytes(encode([None, "d"]))
    assert receive(wire, 3) == ["c", None, "d"]


def test_writing_never_blocks(ends: tuple[FramedSocket, Connection]) -> None:
    wire, connection = ends
    data = b"x" * (1 << 22)
    for number in range(3):
        wire.send([number, data])
    assert wire.wants_to_write
    found = []
    for _ in range(3):
        # The other end takes it in pieces, as this end goes on writing.
        poller = select.poll()
        poller.register(wire.fileno(), select.POLLOUT)
        reader = connection.fileno()
        buffer = b""
        while len(buffer) < 4 or len(buffer) < 4 + struct.unpack("!i", buffer[:4])[0]:
            poller.poll(0)
            wire.flush()
            wanted = 4 if len(buffer) < 4 else 4 + struct.unpack("!i", buffer[:4])[0]
            with socket.socket(fileno=reader) as sock:
                buffer += sock.recv(wanted - len(buffer))
                sock.detach()
        found.append(decode(buffer[4:]))
    assert found == [[number, data] for number in range(3)]
    assert not wire.wants_to_write


def test_messages_in_pieces(ends: tuple[FramedSocket, Connection]) -> None:
    wire, connection = ends
    body = encode(["x" * 100])
    long_header = struct.pack("!i", -1) + struct.pack("!Q", len(body))  # As for more than 2 GiB.
    with socket.socket(fileno=connection.fileno()) as sock:
        for byte in long_header + body:
            assert wire.receive() == []
            sock.send(bytes([byte]))
        sock.detach()
    assert receive(wire, 1) == ["x" * 100]


def test_the_end(ends: tuple[FramedSocket, Connection]) -> None:
    wire, connection = ends
    connection.send_bytes(encode(["last"]))
    connection.close()
    assert receive(wire, 1) == ["last"]
    assert wire.receive() == []
    assert wire.ended
    wire.send(["never read"])
    assert not wire.wants_to_write
    wire.close()


def test_a_broken_pipe_leaves_what_was_sent(ends: tuple[FramedSocket, Connection]) -> None:
    wire, connection = ends
    connection.send_bytes(encode(["result"]))
    connection.close()
    for _ in range(3):
        wire.send(["x"])
    assert receive(wire, 1) == ["result"]
