"""Frames: how messages follow each other on a connection between processes of a session.

What a process writes on a connection need not come from Fluid: code of a trial may write to a descriptor that it closed
before, and that is now a connection's. So a frame has marks by which it is told from anything else before its body is
looked at: its head is a mark, the length of the body, and the complement of that length; behind the body comes another
mark. Bytes between or within frames move one of the marks away from its place. A body is not summed: sockets and pipes
lose and change nothing.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

_BEGIN = bytes.fromhex("f1d5a2c40e97b86b")
_END = bytes.fromhex("8e3bd1674ca905fa")
_HEAD = struct.Struct(f"!{len(_BEGIN)}sQQ")
_ALL_ONES = (1 << 64) - 1
#: Bytes of the longest body. One holds what a trial reports or returns at once; both ends have it in memory as a whole.
LONGEST_BODY = 1 << 36
#: Longest body that is copied to be sent with its head in one piece.
_SHORT = 1 << 16


class FrameError(ValueError):
    """What was received is no frame, or what is to be sent is too long for one."""


def framed(body: bytes) -> list[bytes]:
    """Returns the parts of a frame, to be sent one after the other; only one for a short body.

    Raises:
        FrameError: the body is longer than :data:`LONGEST_BODY`.
    """
    size = len(body)
    if size > LONGEST_BODY:
        raise FrameError(f"a message of {size} bytes is too long: the limit is {LONGEST_BODY} bytes")
    head = _HEAD.pack(_BEGIN, size, _ALL_ONES - size)
    return [head + body + _END] if size <= _SHORT else [head, body, _END]


class FrameBuffer:
    """Bytes as they are received, in pieces of any size, and the frames among them."""

    def __init__(self) -> None:
        self._data = bytearray()
        #: Up to where the body of an unfinished frame was searched for the head of another one.
        self._searched = 0

    @property
    def is_unfinished(self) -> bool:
        """Whether part of a frame has come, and the rest has not."""
        return bool(self._data)

    def add(self, data: bytes) -> None:
        """Takes what was received next."""
        self._data += data

    def bodies(self) -> Iterator[memoryview]:
        """Yields the bodies of the frames that are whole, and removes them; each is valid until the next one.

        Raises:
            FrameError: what follows is no frame. What came before it was yielded.
        """
        start = 0
        try:
            while (end := self._body_end(start)) is not None:
                with memoryview(self._data) as view, view[start + _HEAD.size : end] as body:
                    start, self._searched = end + len(_END), 0
                    yield body
        finally:
            del self._data[:start]

    def _body_end(self, start: int) -> int | None:
        """Returns where the body of the frame at ``start`` ends, once it is whole."""
        data = self._data
        begin = start + _HEAD.size
        if len(data) < begin:
            if not _BEGIN.startswith(bytes(data[start : start + len(_BEGIN)])):
                raise _foreign(data[start:])
            return None
        mark, length, complement = _HEAD.unpack_from(data, start)
        if mark != _BEGIN or length + complement != _ALL_ONES or length > LONGEST_BODY:
            raise _foreign(data[start:begin])
        end: int = begin + length
        if len(data) >= end + len(_END):
            if not data.startswith(_END, end):
                raise FrameError(f"a message of {length} bytes does not end where it should")
            return end
        self._search(start)
        return None

    def _search(self, start: int) -> None:
        """Looks for a frame within one that is not whole: its sender has gone on to another, and will not finish it."""
        data, at = self._data, start + max(self._searched, _HEAD.size)
        while (at := data.find(_BEGIN, at)) >= 0 and len(data) >= at + _HEAD.size:
            _, length, complement = _HEAD.unpack_from(data, at)
            if length + complement == _ALL_ONES:
                raise FrameError(f"a message was cut off after {at - start - _HEAD.size} bytes")
            at += 1
        self._searched = max(_HEAD.size, (at if at >= 0 else len(data) - len(_BEGIN) + 1) - start)


def _foreign(data: bytes | bytearray) -> FrameError:
    return FrameError(f"what came is not Fluid's: {bytes(data[:32])!r}")


class FramedConnection:
    """A process's end of a connection that blocks; :class:`fluid.backends.hosts.sockets.FramedSocket` does not.

    Args:
        connection: a connected stream socket, or its descriptor; the object owns it from now on.
    """

    def __init__(self, connection: socket.socket | int) -> None:
        self._socket = socket.socket(fileno=connection) if isinstance(connection, int) else connection
        self._socket.settimeout(None)  # There may be a default for new ones.

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        return self._socket.fileno()

    def send_bytes(self, body: bytes) -> None:
        """Sends a frame; blocks until the system has taken it.

        Raises:
            FrameError: the body is too long.
            OSError: the other end is gone.
        """
        parts = framed(body)
        if len(parts) == 1:
            self._socket.sendall(parts[0])
        else:
            self._send_all(parts)

    def recv_bytes(self, stall: float | None = None) -> bytearray:
        """Waits for a frame; returns its body.

        Args:
            stall: longest time in which nothing comes, seconds; ``None`` for no limit.

        Raises:
            EOFError: the other end has closed the connection.
            FrameError: what came is no frame.
            OSError: the connection is broken, or stalls.
        """
        if stall is None:
            return self._receive_frame()
        self._socket.settimeout(stall)
        try:
            return self._receive_frame()
        finally:
            self._socket.settimeout(None)

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()

    def _receive_frame(self) -> bytearray:
        head = self._receive(_HEAD.size)
        mark, length, complement = _HEAD.unpack(head)
        if mark != _BEGIN or length + complement != _ALL_ONES or length > LONGEST_BODY:
            raise _foreign(head)
        data = self._receive(length + len(_END))
        if not data.endswith(_END):
            raise FrameError(f"a message of {length} bytes does not end where it should")
        del data[length:]
        return data

    def _send_all(self, parts: Sequence[bytes]) -> None:
        # In one call, so that no other thread that holds the interpreter for long comes between head and body.
        views = [memoryview(part) for part in parts]
        while views:
            sent = self._socket.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data
