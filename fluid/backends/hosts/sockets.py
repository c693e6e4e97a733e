"""Accepts connections of lanes on any machine, once they are authenticated (:mod:`fluid.processes.handshake`).

One silent client must not keep the driver from its lanes, so nothing blocks here. Both servers of a session use it:
that of lanes' connections to the driver, and that of checkpoints.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fluid.lane.errors import one_line
from fluid.processes.frames import FrameBuffer, FrameError, framed
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
from fluid.wire import encode

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


# -- selector ------------------------------------------------------------------------------------
#
# Waits for several descriptors, and can be woken from any thread.


class Watched(Protocol):
    """Something with a descriptor."""

    @property
    def wants_to_write(self) -> bool:
        """Whether to wait also until it becomes writable."""
        ...

    def fileno(self) -> int:
        """Its descriptor; -1 while it has none."""
        ...


class ReadyDescriptor(NamedTuple):
    """A descriptor that can be read from or written to; ``key`` names it."""

    key: Any
    readable: bool
    writable: bool


class WakeableSelector:
    """A set of descriptors to wait on, and a way to end the waiting."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._reader, selectors.EVENT_READ)
        #: Descriptor and events registered, by key.
        self._known: dict[Any, tuple[int, int]] = {}

    def watch(self, key: Any, watched: Watched) -> None:
        """Adds a descriptor, or updates it after it, or what to wait for, has changed."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if watched.wants_to_write else 0)
        wanted = (watched.fileno(), events)
        if self._known.get(key) == wanted:
            return
        self.drop(key)
        if wanted[0] >= 0:
            self._selector.register(wanted[0], events, (key,))
            self._known[key] = wanted

    def drop(self, key: Any) -> None:
        """Removes a descriptor, before or after it was closed; it need not be there."""
        known = self._known.pop(key, None)
        if known is not None:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(known[0])

    def wait(self, seconds: float | None) -> tuple[list[ReadyDescriptor], bool]:
        """Waits once; returns what is ready, and whether :meth:`wake` was called."""
        ready = []
        woken = False
        for key, mask in self._selector.select(seconds):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(self._reader, 4096)
                woken = True
            else:
                can_read, can_write = bool(mask & selectors.EVENT_READ), bool(mask & selectors.EVENT_WRITE)
                ready.append(ReadyDescriptor(key.data[0], can_read, can_write))
        return ready, woken

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`wait` would return at once."""
        return self._selector.fileno()

    def wake(self) -> None:
        """Ends the waiting, in progress or the next; may be called from any thread, also after the end."""
        with suppress(OSError):  # The pipe is full: poll() will return. Or closed: the pool is.
            os.write(self._writer, b"x")

    def close(self) -> None:
        """Closes the selector and its pipe."""
        self._selector.close()
        # Closed last: wake() may run in another thread at this moment, and must not write to a descriptor used again.
        reader, writer, self._reader, self._writer = self._reader, self._writer, -1, -1
        os.close(reader)
        os.close(writer)


# -- framed socket -------------------------------------------------------------------------------
#
# An end of a connection that never blocks: the driver's to a lane, and both ends of that to a host on another node.
#
# A lane's end is a :class:`fluid.processes.frames.FramedConnection`.


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
        decode: reads what comes: see :func:`fluid.wire.decoder`.

    Attributes:
        ended: whether the other end has closed, the connection broke, or there is a ``problem``: nothing will come any
            more.
        problem: what is wrong with what has come, in one line; empty if nothing is.
    """

    def __init__(self, sock: socket.socket, decode: Callable[[memoryview], list[Any]]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decode = decode
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
                messages += self._decode(body)
        except Exception as error:  # No batch of frames, or not of those that are expected here.
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
