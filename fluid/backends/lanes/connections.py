"""The driver's links to its lanes: what is to be sent to each, and waiting for all of them at once."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fluid.backends.base import LaneConnected, Launcher
from fluid.backends.lanes.framed_socket import FramedSocket

#: Stands for the launcher among the numbers of the lanes.
_LAUNCHER = "launcher"


class Watched(Protocol):
    """Something with a descriptor."""

    @property
    def wants_to_write(self) -> bool:
        """Whether to tell also when it becomes writable."""
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
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._reader, selectors.EVENT_READ)
        #: Descriptor and events registered, by key.
        self._known: dict[Any, tuple[int, int]] = {}

    def watch(self, key: Any, watched: Watched) -> None:
        """Puts something in, or notes that its descriptor, or what it waits for, has changed."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if watched.wants_to_write else 0)
        wanted = (watched.fileno(), events)
        if self._known.get(key) == wanted:
            return
        self.drop(key)
        if wanted[0] >= 0:
            self._selector.register(wanted[0], events, (key,))
            self._known[key] = wanted

    def drop(self, key: Any) -> None:
        """Takes something out, before or after its descriptor was closed; it need not be there."""
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

    def wake(self) -> None:
        """Ends the waiting, in progress or the next; may be called from any thread, also after the end."""
        with suppress(OSError):  # The pipe is full: it is awake. Or closed: nobody waits.
            os.write(self._writer, b"x")

    def close(self) -> None:
        """Closes what is its own."""
        self._selector.close()
        # Closed last and not reused by wake(), which may run in another thread at this moment.
        reader, writer, self._reader, self._writer = self._reader, self._writer, -1, -1
        os.close(reader)
        os.close(writer)


@dataclass(slots=True, eq=False)
class LaneConnection:
    """A lane as the driver sees it.

    Attributes:
        socket: its connection, once it has one.
        outbox: messages not yet given to the socket.
        known: keys of the trainables it has been sent.
        offset: seconds by which its clock is behind the driver's.
        leaving: it was told to end, and is not missed.
        kill_at: when to kill it if it is still there.
    """

    lane_id: int
    socket: FramedSocket | None = None
    host: str = "localhost"
    outbox: list[Any] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    offset: float = 0.0
    leaving: bool = False
    kill_at: float | None = None


class Waited(NamedTuple):
    """What came of waiting.

    Attributes:
        news: the launcher has something to say.
        readable: links on which something has come.
        woken: :meth:`LaneConnections.wake` was called.
    """

    news: bool
    readable: list[LaneConnection]
    woken: bool


class LaneConnections:
    """The links to all lanes there are, by number of the lane.

    Args:
        launcher: it is waited for together with the lanes.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._connections: dict[int, LaneConnection] = {}
        #: Those with messages in their outbox.
        self._dirty: dict[int, LaneConnection] = {}
        self._selector = WakeableSelector()

    def __contains__(self, lane_id: object) -> bool:
        return lane_id in self._connections

    def __getitem__(self, lane_id: int) -> LaneConnection:
        return self._connections[lane_id]

    def __iter__(self) -> Iterator[LaneConnection]:
        return iter(list(self._connections.values()))

    def __len__(self) -> int:
        return len(self._connections)

    def get(self, lane_id: int) -> LaneConnection | None:
        """The link to a lane, if it is there."""
        return self._connections.get(lane_id)

    def add(self, lane_id: int) -> LaneConnection:
        """Notes that a lane is being started; what is sent to it waits until it has connected."""
        connection = self._connections[lane_id] = LaneConnection(lane_id)
        return connection

    def connect(self, connected: LaneConnected) -> None:
        """Takes the connection of a lane; closes it if the lane is not there any more."""
        connection = self._connections.get(connected.lane_id)
        if connection is None:
            connected.socket.close()
            return
        connection.socket = FramedSocket(connected.socket)
        connection.host = connected.host
        self._selector.watch(connection.lane_id, connection.socket)
        self._dirty[connection.lane_id] = connection

    def disconnect(self, connection: LaneConnection) -> None:
        """Closes a connection, if there is one; the lane stays."""
        self._selector.drop(connection.lane_id)
        if connection.socket is not None:
            connection.socket.close()
            connection.socket = None

    def remove(self, connection: LaneConnection) -> None:
        """Notes that a lane is gone."""
        self._connections.pop(connection.lane_id, None)
        self._dirty.pop(connection.lane_id, None)
        self.disconnect(connection)

    def is_up(self, lane_id: int) -> bool:
        """Whether a lane is there, or being started, and was not told to end."""
        connection = self._connections.get(lane_id)
        return connection is not None and not connection.leaving

    def send(self, lane_id: int, message: Any) -> None:
        """Sends a message with the next :meth:`flush`, if the lane is up."""
        if self.is_up(lane_id):
            self.put(self._connections[lane_id], message)

    def put(self, connection: LaneConnection, message: Any) -> None:
        """Has a message sent with the next :meth:`flush`."""
        connection.outbox.append(message)
        self._dirty[connection.lane_id] = connection

    def flush(self) -> None:
        """Sends what waits in the outboxes of lanes that have connected."""
        for connection in self._dirty.values():
            if connection.socket is not None and connection.outbox:
                batch, connection.outbox = connection.outbox, []
                connection.socket.send(batch)
                self._selector.watch(connection.lane_id, connection.socket)
        self._dirty = {lane_id: connection for lane_id, connection in self._dirty.items() if connection.outbox}

    def wait(self, seconds: float | None) -> Waited:
        """Waits once for lanes, the launcher and :meth:`wake`, and sends on what could not be sent before."""
        self._selector.watch(_LAUNCHER, self._launcher)
        ready, woken = self._selector.wait(seconds)
        news, readable = False, []
        for key, can_read, can_write in ready:
            if key is _LAUNCHER:
                news = True
            elif (connection := self._connections.get(key)) is not None and connection.socket is not None:
                if can_write:
                    connection.socket.flush()
                    self._selector.watch(key, connection.socket)
                if can_read:
                    readable.append(connection)
        return Waited(news, readable, woken)

    def wake(self) -> None:
        """Ends the waiting, in progress or the next; may be called from any thread, also after the end."""
        self._selector.wake()

    def close(self) -> None:
        """Lets go of every descriptor."""
        for connection in self._connections.values():
            if connection.socket is not None:
                connection.socket.close()
        self._connections.clear()
        self._selector.close()
