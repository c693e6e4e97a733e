"""What a lane and the server of another machine's checkpoints say to each other.

On a connection of :mod:`fluid.processes.handshake` the lane sends a :class:`CheckpointRequest`. The answer is a
:class:`Refusal`, or a :class:`Manifest`, the contents of its files one after the other, and a :class:`SendReport`. If
the checkpoint turns out to be damaged, the lane sends another request.

A message is JSON, preceded by its length. The contents are as they are in the files, or, if they are compressed, a
stream of zlib in pieces, each preceded by its length, and a length of 0 at the end.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import NamedTuple

from fluid.processes.handshake import derive_key

#: The length of a message or of a piece.
LENGTH = struct.Struct("!I")
#: Bytes sent, received and compressed at a time.
PIECE = 1 << 20
#: Seconds without any progress after which either side gives up.
STALL_S = 60.0
#: Longest message: a manifest of a million files.
_LONGEST = 1 << 28


class CheckpointRequest(NamedTuple):
    """From the lane: send a checkpoint, or the best one that can replace it.

    Attributes:
        path: where it was written.
        without: places on the server's machine of those that were sent and found to be damaged.
        rate: of recent transfers from there, bytes per second; ``None`` if it is not known.
    """

    path: str
    without: list[str]
    rate: float | None


class Manifest(NamedTuple):
    """From the server: which checkpoint follows.

    Attributes:
        place: its folder on the server's machine.
        folders: paths of the folders in it, relative to it, parents first.
        files: of each of its files the path relative to it, the mode, and the length in bytes.
        links: of each symbolic link to something else than a file the path relative to it, and what it points to.
        compressed: whether the contents are.
    """

    place: str
    folders: list[str]
    files: list[tuple[str, int, int]]
    links: list[tuple[str, str]]
    compressed: bool

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, _, size in self.files)


class SendReport(NamedTuple):
    """From the server, after the contents: the seconds in which it was not busy compressing."""

    seconds: float


class Refusal(NamedTuple):
    """From the server: why no checkpoint follows."""

    reason: str


_KINDS = {kind.__name__: kind for kind in (CheckpointRequest, Manifest, SendReport, Refusal)}
Message = CheckpointRequest | Manifest | SendReport | Refusal


def checkpoint_key(key: bytes) -> bytes:
    """Returns the key for these connections.

    Args:
        key: the session's.
    """
    return derive_key(key, b"checkpoints")


def send_message(sock: socket.socket, message: Message) -> None:
    """Sends a message."""
    data = json.dumps([type(message).__name__, *message]).encode()
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive_message(sock: socket.socket) -> Message:
    """Receives a message.

    Raises:
        OSError: the connection has ended or stalls, or what came is no message.
    """
    (length,) = LENGTH.unpack(receive_exactly(sock, LENGTH.size))
    if length > _LONGEST:
        raise ConnectionError(f"a message of {length} bytes is too long")
    try:
        kind, *values = json.loads(receive_exactly(sock, length))
        return _KINDS[kind](*values)
    except (ValueError, TypeError, KeyError) as error:
        raise ConnectionError(f"what was received is no message: {error!r}") from error


def receive_exactly(sock: socket.socket, size: int) -> bytearray:
    """Receives so many bytes.

    Raises:
        OSError: the connection has ended or stalls.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the other side closed the connection")
        view = view[count:]
    return data
