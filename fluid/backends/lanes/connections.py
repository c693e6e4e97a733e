"""The driver's connections to its lanes: what is to be sent to each, and one selector that waits for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluid.backends.base import LaneConnected, Launcher
from fluid.backends.hosts.framed_socket import FramedSocket
from fluid.backends.hosts.selector import WakeableSelector
from fluid.engine.deadlines import Deadlines
from fluid.lane import messages as m
from fluid.processes.open_files import allow_open_files

#: Stands for the launcher among the numbers of the lanes.
_LAUNCHER = "launcher"
#: Descriptors of the driver for a lane, the connection and one while it starts; and for all else.
_FILES_PER_LANE, _OTHER_FILES = 2, 256


@dataclass(slots=True, eq=False)
class LaneConnection:
    """A lane as the driver sees it.

    Attributes:
        socket: its connection, once it has one.
        outbox: messages not yet given to the socket.
        known: keys of the trainables it has been sent.
        offset: seconds by which its clock is behind the driver's.
        leaving: whether it was told to end; its end is then no loss to report. Written by :class:`LaneConnections`.
        kill_at: when to kill it if it has not ended, seconds; ``None`` for never. Written by :class:`LaneConnections`.
        killed_because: why the engine had it killed; empty if it did not.
    """

    lane_id: int
    socket: FramedSocket | None = None
    host: str = "localhost"
    outbox: list[Any] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    offset: float = 0.0
    leaving: bool = False
    kill_at: float | None = None
    killed_because: str = ""


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
        #: The lanes of each machine that were not told to end; no empty ones.
        self._by_host: dict[str, dict[int, LaneConnection]] = {}
        #: By when lanes are to have ended, by their connection.
        self._deadlines = Deadlines()
        #: The lanes that were sent each trainable, by its key; no empty ones.
        self._knowing: dict[int, set[int]] = {}
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
        self._by_host.setdefault(connection.host, {})[lane_id] = connection
        allow_open_files(_FILES_PER_LANE * len(self._connections) + _OTHER_FILES)
        return connection

    def leave(self, connection: LaneConnection, kill_at: float) -> None:
        """Tells a lane to end, by a time in seconds."""
        self._leave_host(connection)
        connection.leaving = True
        self.kill_at(connection, kill_at)
        self.put(connection, m.Shutdown())

    def kill_at(self, connection: LaneConnection, at: float | None) -> None:
        """Sets when to kill a lane if it has not ended, seconds; ``None`` for never."""
        connection.kill_at = at
        if at is None:
            self._deadlines.clear(connection)
        elif self._connections.get(connection.lane_id) is connection:
            self._deadlines.set(connection, at)

    @property
    def earliest_kill(self) -> float | None:
        """When the next lane is to be killed, seconds; ``None`` for none."""
        return self._deadlines.earliest

    def pop_overdue(self, now: float) -> list[LaneConnection]:
        """The lanes that should have ended by now, each once, the most overdue first."""
        return [lane for lane in self._deadlines.pop_due(now) if isinstance(lane, LaneConnection)]

    def one_per_host(self) -> list[LaneConnection]:
        """A lane of each machine that was not told to end."""
        return [next(iter(lanes.values())) for lanes in self._by_host.values()]

    def learns(self, connection: LaneConnection, key: int) -> bool:
        """Records that a lane is sent a trainable; returns whether that is new to it."""
        knowing = self._knowing.setdefault(key, set())
        if connection.lane_id in knowing:
            return False
        connection.known.add(key)
        knowing.add(connection.lane_id)
        return True

    def drop_trainable(self, key: int) -> None:
        """Tells the lanes that know a trainable to drop it."""
        for lane_id in sorted(self._knowing.pop(key, ())):
            connection = self._connections[lane_id]
            connection.known.discard(key)
            self.put(connection, m.DropTrainable(key))

    def connect(self, connected: LaneConnected) -> None:
        """Takes the connection of a lane; closes it if the lane is gone."""
        connection = self._connections.get(connected.lane_id)
        if connection is None:
            connected.socket.close()
            return
        connection.socket = FramedSocket(connected.socket)
        if not connection.leaving:
            self._leave_host(connection)
            self._by_host.setdefault(connected.host, {})[connection.lane_id] = connection
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
        lane_id = connection.lane_id
        if self._connections.pop(lane_id, None) is not None:
            self._leave_host(connection)
            for key in connection.known:
                self._knowing[key].discard(lane_id)
                if not self._knowing[key]:
                    del self._knowing[key]
        self._deadlines.clear(connection)
        self._dirty.pop(lane_id, None)
        self.disconnect(connection)

    def _leave_host(self, connection: LaneConnection) -> None:
        lanes = self._by_host.get(connection.host, {})
        lanes.pop(connection.lane_id, None)
        if not lanes:
            self._by_host.pop(connection.host, None)

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
            if connection.socket is not None and connection.outbox:
                batch, connection.outbox = connection.outbox, []
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
