"""An end of a connection that never blocks: the driver's to a lane, and both ends of that to a host on another node.

A lane's end is a :class:`fluid.processes.frames.FramedConnection`.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from fluid.lane.errors import one_line
from fluid.lane.protocol import decode, encode
from fluid.processes.frames import FrameBuffer, FrameError, framed

#: Bytes asked of the system at once.
_CHUNK = 1 << 18
#: Bytes read before the caller gets to see what has come: one lane must not keep the driver from the others.
_MOST_AT_ONCE = 1 << 24
#: Looks, 2 s apart, at an unfinished message of which nothing comes; at the next one it is given up. A lane sends a
#: message in one call of the system: on one machine that takes milliseconds. After an outage of a network of less than
#: 15 s, which ends no connection (:func:`fluid.processes.handshake.keep_alive`), TCP may wait as long again.
_LOCAL_LOOKS, _REMOTE_LOOKS = 5, 20


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

    Attributes:
        ended: whether the other end has closed, the connection broke, or there is a ``problem``: nothing will come any
            more.
        problem: what is wrong with what has come, in one line; empty if nothing is.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._outgoing: deque[memoryview] = deque()
        self._incoming = FrameBuffer()
        self._most_looks = _LOCAL_LOOKS if sock.family == socket.AF_UNIX else _REMOTE_LOOKS
        #: Looks since anything has come.
        self._looks = 0
        self.ended = False
        self.problem = ""

    @property
    def wants_to_write(self) -> bool:
        """Whether the other end has not yet taken all that was sent."""
        return bool(self._outgoing) and not self.ended

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        return self._socket.fileno()

    def send(self, messages: Sequence[Any]) -> None:
        """Sends a batch of messages, or keeps what the system does not take now; see :meth:`flush`."""
        self._outgoing.extend(map(memoryview, framed(encode(messages))))
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
            self._incoming.add(data)
            self._looks = 0
            budget -= len(data)
            if len(data) < _CHUNK:
                break  # Nearly always all there is; if not, the selector says so again.
        messages: list[Any] = []
        try:
            for body in self._incoming.bodies():
                messages += decode(body)
        except BaseException as error:  # A pickle may raise anything.
            if may_be_own(error):
                raise
            self._give_up(str(error) if isinstance(error, FrameError) else one_line(error))
        return messages

    def look(self) -> None:
        """Gives up a message that stays unfinished; to be called every 2 s, after :meth:`receive`.

        Looks are counted, not seconds: while this process is stopped, the other one may be as well.
        """
        if self._incoming.is_unfinished and not self.ended:
            self._looks += 1
            if self._looks > self._most_looks:
                self._give_up("a message was not finished")

    def _give_up(self, problem: str) -> None:
        self.ended, self.problem = True, problem
        self._incoming = FrameBuffer()

    def close(self) -> None:
        """Closes the connection; doing so twice is harmless."""
        self.ended = True
        self._outgoing.clear()
        self._socket.close()


def may_be_own(error: BaseException) -> bool:
    """Whether a signal may have raised an exception, as Ctrl-C does, and not what has come over a connection.

    Signals are handled in the main thread; the session's own thread is another.
    """
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
