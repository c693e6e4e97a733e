"""The driver's end of a connection to a lane: it never blocks.

It speaks the format of ``multiprocessing.connection.Connection``, which the lane uses: a message is preceded by
its length, four bytes, or four bytes of -1 and eight of length beyond 2 GiB. That class only blocks, and so few lines
are not worth a dependency.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from fluid.lane.messages import decode, encode

_SHORT = struct.Struct("!i")
_LONG = struct.Struct("!Q")
_LONGEST_SHORT = 0x7FFFFFFF
#: Bytes asked of the system at once.
_CHUNK = 1 << 18
#: Bytes read before the caller gets to see what has come: one lane must not keep the driver from the others.
_MOST_AT_ONCE = 1 << 24


def limit_lane_buffer(sock: socket.socket) -> None:
    """Limits how far a lane may be ahead of the driver, so that answers are not stuck behind thousands of reports.

    Args:
        sock: the lane's end.
    """
    # TCP counts what the other machine has not acknowledged yet; a socket pair has no such delay.
    size = 1 << 14 if sock.family == socket.AF_UNIX else 1 << 16
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


class FramedSocket:
    """A framed, non-blocking connection.

    Args:
        sock: a connected stream socket; the object owns it from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()
        #: The other end has closed, or the connection broke: nothing will come any more.
        self.ended = False

    @property
    def wants_to_write(self) -> bool:
        """Whether the other end has not yet taken all that was sent."""
        return bool(self._outgoing) and not self.ended

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        return self._socket.fileno()

    def send(self, messages: Sequence[Any]) -> None:
        """Sends a batch of messages, or keeps what the system does not take now; see :meth:`flush`."""
        data = encode(messages)
        header = _SHORT.pack(len(data)) if len(data) <= _LONGEST_SHORT else _SHORT.pack(-1) + _LONG.pack(len(data))
        if len(data) <= _CHUNK:
            self._outgoing.append(memoryview(header + data))
        else:
            self._outgoing += (memoryview(header), memoryview(data))
        self.flush()

    def flush(self) -> None:
        """Hands over as much as the system takes now."""
        while self._outgoing and not self.ended:
            view = self._outgoing[0]
            try:
                taken = self._socket.send(view)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                # What the lane sent before it went can still be read.
                self._outgoing.clear()
                return
            if taken == len(view):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = view[taken:]

    def receive(self) -> list[Any]:
        """Returns the messages that have arrived in full; sets :attr:`ended` at the end of the connection."""
        budget = _MOST_AT_ONCE
        while budget > 0 and not self.ended:
            try:
                data = self._socket.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
            self._incoming += data
            budget -= len(data)
            if len(data) < _CHUNK:
                break  # Nearly always all there is; if not, the selector says so again.
        return self._messages()

    def close(self) -> None:
        """Closes the connection; doing so twice is harmless."""
        self.ended = True
        self._outgoing.clear()
        self._socket.close()

    def _messages(self) -> list[Any]:
        messages: list[Any] = []
        start = 0
        while (frame := self._frame(start)) is not None:
            begin, end = frame
            with memoryview(self._incoming) as view, view[begin:end] as body:
                messages += decode(body)
            start = end
        del self._incoming[:start]
        return messages

    def _frame(self, start: int) -> tuple[int, int] | None:
        """Returns where the body of the message at ``start`` begins and ends, once it has arrived in full."""
        begin = start + _SHORT.size
        if len(self._incoming) < begin:
            return None
        (length,) = _SHORT.unpack_from(self._incoming, start)
        if length < 0:
            begin += _LONG.size
            if len(self._incoming) < begin:
                return None
            (length,) = _LONG.unpack_from(self._incoming, begin - _LONG.size)
        end = begin + length
        return (begin, end) if len(self._incoming) >= end else None
