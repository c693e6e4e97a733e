"""An end of a connection that never blocks, against one that does; and what is no message."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.backends.hosts.sockets import FramedSocket
from fluid.processes.frames import LONGEST_BODY, FrameBuffer, FramedConnection, FrameError, framed
from fluid.wire import decoder, encode

Ends = tuple[FramedSocket, FramedConnection]
decode = decoder(Any)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    wire, connection = FramedSocket(ours, decode), FramedConnection(theirs.detach())
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


def frame(*messages: Any) -> bytes:
    return b"".join(framed(encode(messages)))


def test_both_ways(ends: Ends) -> None:
    wire, connection = ends
    wire.send(["a", 1])
    wire.send([])
    wire.send(["b"])
    assert [decode(connection.recv_bytes()) for _ in range(3)] == [["a", 1], [], ["b"]]
    assert wire.receive() == []
    connection.send_bytes(encode(["c"]))
    connection.send_bytes(encode([None, "d"]))
    assert receive(wire, 3) == ["c", None, "d"]


def test_writing_never_blocks(ends: Ends) -> None:
    wire, connection = ends
    data = b"x" * (1 << 22)
    for number in range(3):
        wire.send([number, data])
    assert wire.wants_to_write
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(decode(connection.recv_bytes()) for _ in range(3)))
    reader.start()
    poller = select.poll()
    poller.register(wire.fileno(), select.POLLOUT)
    while wire.wants_to_write:
        assert poller.poll(60_000)
        wire.flush()
    reader.join(60.0)
    assert found == [[number, data] for number in range(3)]


def test_long_messages_come_whole(ends: Ends) -> None:
    wire, connection = ends
    long = [os.urandom(size) for size in (100, 1 << 16, (1 << 16) + 1, 1 << 23)]
    sender = threading.Thread(target=lambda: [connection.send_bytes(encode([each])) for each in long])
    sender.start()
    assert receive(wire, len(long)) == long
    sender.join(60.0)


def test_messages_in_pieces(ends: Ends) -> None:
    wire, connection = ends
    with socket.socket(fileno=connection.fileno()) as sock:
        for byte in frame("x" * 100)[:-1]:
            sock.send(bytes([byte]))
            assert wire.receive() == [] and not wire.ended
        sock.send(frame("x" * 100)[-1:])
        sock.detach()
    assert receive(wire, 1) == ["x" * 100]


def test_the_end(ends: Ends) -> None:
    wire, connection = ends
    connection.send_bytes(encode(["last"]))
    connection.close()
    assert receive(wire, 1) == ["last"]
    assert wire.receive() == []
    assert wire.ended and not wire.problem
    wire.send(["never read"])
    assert not wire.wants_to_write
    wire.close()


def test_a_broken_pipe_leaves_what_was_sent(ends: Ends) -> None:
    wire, connection = ends
    connection.send_bytes(encode(["result"]))
    connection.close()
    for _ in range(3):
        wire.send(["x"])
    assert receive(wire, 1) == ["result"]


# -- what is no message --------------------------------------------------------------------------------------


class Creates:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


WHOLE = frame("x" * 200)
FOREIGN: dict[str, tuple[bytes, str]] = {
    "noise": (b"\x01" + os.urandom(500), "not Fluid's"),
    "text": (b"hello world, from a C library that writes to the wrong descriptor\n", "not Fluid's: b'hello world"),
    "one byte": (b"\0", "not Fluid's"),
    "the mark, and then text": (WHOLE[:8] + b"hello world, hello world", "not Fluid's"),
    "a wrong length": (WHOLE[:15] + b"\xff" + WHOLE[16:], "not Fluid's"),
    "a length beyond the limit": (struct.pack("!8sQQ", WHOLE[:8], 1 << 62, (1 << 64) - 1 - (1 << 62)), "not Fluid's"),
    "a frame of multiprocessing": (struct.pack("!i", 5) + pickle.dumps([1]), "not Fluid's"),
    "text within a frame": (WHOLE[:100] + b"hello" + WHOLE[100:], "does not end where it should"),
    "a frame cut off by another": (WHOLE[:100] + frame("y"), "cut off after 76 bytes"),
    "no data": (b"".join(framed(b"hello")), "ValidationError"),
    "an empty body": (b"".join(framed(b"")), "DecodeError"),
    "half of the data": (b"".join(framed(encode(["x" * 200])[:100])), "DecodeError"),
    "no list": (b"".join(framed(encode({"a": 5}))), "ValidationError"),
    "a pickle": (b"".join(framed(pickle.dumps([1]))), "ValidationError"),
    "text that is none": (b"".join(framed(encode(["xxxx"]).replace(b"xxxx", b"\xff\xfe\xfd\xfc"))), "DecodeError"),
    "lists in lists": (b"".join(framed(b"\x91" * (1 << 14))), "RecursionError"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_message_ends_the_connection(ends: Ends, kind: str) -> None:
    wire, connection = ends
    data, wanted = FOREIGN[kind]
    connection.send_bytes(encode(["before"]))
    with socket.socket(fileno=connection.fileno()) as sock:
        sock.sendall(data)
        sock.detach()
    assert wire.receive() == ["before"], "what came before it counts"
    assert wire.ended and wanted in wire.problem


@pytest.mark.parametrize("kind", [kind for kind, (_, why) in FOREIGN.items() if "not Fluid" in why or "end" in why])
def test_the_end_that_blocks_reads_by_the_same_rules(kind: str) -> None:
    theirs, end = socket.socketpair()
    with theirs:
        theirs.sendall(b"".join(framed(b"before")) + FOREIGN[kind][0] + bytes(24))
    ours = FramedConnection(end)
    assert ours.recv_bytes() == b"before"
    with pytest.raises(FrameError, match=FOREIGN[kind][1].split(":")[0]):
        ours.recv_bytes()
    ours.close()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_unpickled(ends: Ends, tmp_path: Path, protocol: int) -> None:
    wire, connection = ends
    pickled = pickle.dumps([Creates(str(tmp_path / "created"))], protocol)
    connection.send_bytes(encode([pickled]))
    connection.send_bytes(pickled)
    assert wire.receive() == [pickled] and wire.ended
    assert not (tmp_path / "created").exists()
    pickle.loads(pickled)
    assert (tmp_path / "created").exists()


def test_a_message_that_stays_unfinished_is_given_up(ends: Ends) -> None:
    wire, connection = ends
    with socket.socket(fileno=connection.fileno()) as sock:
        for part in (WHOLE[:5], WHOLE[5:50], WHOLE[50:90]):
            sock.sendall(part)
            assert wire.receive() == []
            for _ in range(5):
                wire.look()
            assert not wire.ended, "each part gives it more time"
        sock.detach()
    wire.look()
    assert wire.ended and wire.problem == "a message was not finished"


def test_a_quiet_lane_is_waited_for(ends: Ends) -> None:
    wire, connection = ends
    connection.send_bytes(encode(["a"]))
    assert receive(wire, 1) == ["a"]
    for _ in range(1000):
        wire.look()
    assert not wire.ended


def test_what_is_too_long_is_refused() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return LONGEST_BODY + 1

    with pytest.raises(FrameError, match="too long: the limit is 68719476736 bytes"):
        framed(Long())


def test_a_long_body_may_hold_the_mark() -> None:
    body = WHOLE[:8] * 1000 + b"x" * (1 << 17)
    buffer, data = FrameBuffer(), b"".join(framed(body))
    for begin in range(0, len(data), 1000):
        buffer.add(data[begin : begin + 1000])
        found = [bytes(each) for each in buffer.bodies()]
    assert found == [body] and not buffer.is_unfinished
