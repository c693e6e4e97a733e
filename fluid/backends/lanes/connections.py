"""The driver's connections to its lanes: what is to be sent to each, and one selector that waits for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluid.backends.base import LaneConnected, Launcher
from fluid.backends.hosts.sockets import FramedSocket, WakeableSelector
from fluid.lane.protocol import FromLane
from fluid.wire import decoder

#: Stands for the launcher among the numbers of the lanes.
_LAUNCHER = "launcher"
_decode = decoder(FromLane)


@dataclass(slots=True, eq=False)
class LaneConnection:
    """A lane as the driver sees it.

    Attributes:
        socket: its connection, once it has one.
        outbox: messages not yet given to the socket.
        threads: its CPU threads.
        known: keys of the trainables it has been sent.
        trials: those that it was told to set up, and has not got rid of.
        offset: seconds by which its clock is behind the driver's.
        leaving: whether it was told to end; its end is then no loss to report.
        cleaning_up: the trial whose code cleans up there; empty if none does.
        cleaning_since: since when, seconds.
        tell_at: when to tell that it lasts; ``None`` if it was told, and if none does.
        kill_at: when to kill it if it has not ended, seconds.
        killed_because: why it ends, if it was killed or has told that itself; empty otherwise.
        failed_position: which of its devices it cannot use, from 0; ``None`` if it has not told.
    """

    lane_id: int
    socket: FramedSocket | None = None
    host: str = "localhost"
    outbox: list[Any] = field(default_factory=list)
    threads: int = 1
    known: set[int] = field(default_factory=set)
    trials: set[str] = field(default_factory=set)
    offset: float = 0.0
    leaving: bool = False
    cleaning_up: str = ""
    cleaning_since: float = 0.0
    tell_at: float | None = None
    kill_at: float | None = None
    killed_because: str = ""
    failed_position: int | None = None


class Deferred(NamedTuple):
    """Stands for a message in an outbox; it, and those behind it, wait until it is known.

    Attributes:
        resolve: returns the message for a lane; ``None`` if it is not known yet.
    """

    resolve: Callable[[LaneConnection], Any | None]


class Waited(NamedTuple):
    """What came of waiting.

    Attributes:
        launcher: whether the launcher has something to report.
        readable: connections on which messages have arrived.
        woken: :meth:`LaneConnections.wake` was called.
    """

    launcher: bool
    readable: list[LaneConnection]
    woken: bool


class LaneConnections:
    """The connections to all lanes, by number of the lane.

    Args:
        launcher: polled when its descriptor is ready.
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
        """The connection to a lane, if the lane is there."""
        return self._connections.get(lane_id)

    def add(self, lane_id: int) -> LaneConnection:
        """Adds a lane that is being started; messages for it wait until it has connected."""
        connection = self._connections[lane_id] = LaneConnection(lane_id)
        return connection

    def connect(self, connected: LaneConnected) -> None:
        """Takes the connection of a lane; closes it if the lane is gone."""
        connection = self._connections.get(connected.lane_id)
        if connection is None:
            connected.socket.close()
            return
        connection.socket = FramedSocket(connected.socket, _decode)
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
        """Removes a lane that is gone."""
        self._connections.pop(connection.lane_id, None)
        self._dirty.pop(connection.lane_id, None)
        self.disconnect(connection)

    def is_up(self, lane_id: int) -> bool:
        """Whether a lane runs, or is being started, and was not told to end."""
        connection = self._connections.get(lane_id)
        return connection is not None and not connection.leaving

    def send(self, lane_id: int, message: Any) -> None:
        """Sends a message with the next :meth:`flush`, if the lane is up."""
        if self.is_up(lane_id):
            self.put(self._connections[lane_id], message)

    def put(self, connection: LaneConnection, message: Any) -> None:
        """Sends a message with the next :meth:`flush`."""
        connection.outbox.append(message)
        self._dirty[connection.lane_id] = connection

    def flush(self) -> None:
        """Sends what waits in the outboxes of lanes that have connected."""
        for connection in self._dirty.values():
            if connection.socket is not None and (batch := _take_known(connection)):
                connection.socket.send(batch)
                self._selector.watch(connection.lane_id, connection.socket)
        self._dirty = {lane_id: connection for lane_id, connection in self._dirty.items() if connection.outbox}

    def wait(self, seconds: float | None) -> Waited:
        """Waits once for lanes, the launcher and :meth:`wake`, and sends on what could not be sent before."""
        self._selector.watch(_LAUNCHER, self._launcher)
        ready, woken = self._selector.wait(seconds)
        launcher, readable = False, []
        for key, can_read, can_write in ready:
            if key is _LAUNCHER:
                launcher = True
            elif (connection := self._connections.get(key)) is not None and connection.socket is not None:
                if can_write:
                    connection.socket.flush()
                    self._selector.watch(key, connection.socket)
                if can_read:
                    readable.append(connection)
        return Waited(launcher, readable, woken)

    def wake(self) -> None:
        """Ends the waiting, in progress or the next; may be called from any thread, also after the end."""
        self._selector.wake()

    def close(self) -> None:
        """Closes every descriptor."""
        for connection in self._connections.values():
            if connection.socket is not None:
                connection.socket.close()
        self._connections.clear()
        self._selector.close()


def _take_known(connection: LaneConnection) -> list[Any]:
    """Takes the messages out of an outbox up to the first one that is not known yet."""
    batch = []
    for message in connection.outbox:
        known = message.resolve(connection) if isinstance(message, Deferred) else message
        if known is None:
            break
        batch.append(known)
    del connection.outbox[: len(batch)]
    return batch
