"""The driver's links to its lanes: what is to be sent to each, and waiting for all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluid.backends.base import LaneConnected, Launcher
from fluid.backends.lanes.waiting import Waiter
from fluid.backends.lanes.wire import Wire

#: Stands for the launcher among the numbers of the lanes.
_LAUNCHER = "launcher"


@dataclass(slots=True, eq=False)
class Link:
    """A lane as the driver sees it.

    Attributes:
        wire: its connection, once it has one.
        outbox: messages not yet given to the wire.
        known: keys of the trainables it has been sent.
        offset: seconds by which its clock is behind the driver's.
        leaving: it was told to end, and is not missed.
        kill_at: when to kill it if it is still there.
    """

    lane_id: int
    wire: Wire | None = None
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
        woken: :meth:`Links.wake` was called.
    """

    news: bool
    readable: list[Link]
    woken: bool


class Links:
    """The links to all lanes there are, by number of the lane.

    Args:
        launcher: it is waited for together with the lanes.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._links: dict[int, Link] = {}
        #: Those with messages in their outbox.
        self._dirty: dict[int, Link] = {}
        self._waiter = Waiter()

    def __contains__(self, lane_id: object) -> bool:
        return lane_id in self._links

    def __getitem__(self, lane_id: int) -> Link:
        return self._links[lane_id]

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def __len__(self) -> int:
        return len(self._links)

    def get(self, lane_id: int) -> Link | None:
        """The link to a lane, if it is there."""
        return self._links.get(lane_id)

    def add(self, lane_id: int) -> Link:
        """Notes that a lane is being started; what is sent to it waits until it has connected."""
        link = self._links[lane_id] = Link(lane_id)
        return link

    def connect(self, connected: LaneConnected) -> None:
        """Takes the connection of a lane; closes it if the lane is not there any more."""
        link = self._links.get(connected.lane_id)
        if link is None:
            connected.socket.close()
            return
        link.wire = Wire(connected.socket)
        link.host = connected.host
        self._waiter.watch(link.lane_id, link.wire)
        self._dirty[link.lane_id] = link

    def disconnect(self, link: Link) -> None:
        """Closes a connection, if there is one; the lane stays."""
        self._waiter.drop(link.lane_id)
        if link.wire is not None:
            link.wire.close()
            link.wire = None

    def remove(self, link: Link) -> None:
        """Notes that a lane is gone."""
        self._links.pop(link.lane_id, None)
        self._dirty.pop(link.lane_id, None)
        self.disconnect(link)

    def put(self, link: Link, message: Any) -> None:
        """Has a message sent with the next :meth:`flush`."""
        link.outbox.append(message)
        self._dirty[link.lane_id] = link

    def flush(self) -> None:
        """Sends what waits in the outboxes of lanes that have connected."""
        for link in self._dirty.values():
            if link.wire is not None and link.outbox:
                batch, link.outbox = link.outbox, []
                link.wire.send(batch)
                self._waiter.watch(link.lane_id, link.wire)
        self._dirty = {lane_id: link for lane_id, link in self._dirty.items() if link.outbox}

    def wait(self, seconds: float | None) -> Waited:
        """Waits once for lanes, the launcher and :meth:`wake`, and sends on what could not be sent before."""
        self._waiter.watch(_LAUNCHER, self._launcher)
        ready, woken = self._waiter.wait(seconds)
        news, readable = False, []
        for key, can_read, can_write in ready:
            if key is _LAUNCHER:
                news = True
            elif (link := self._links.get(key)) is not None and link.wire is not None:
                if can_write:
                    link.wire.flush()
                    self._waiter.watch(key, link.wire)
                if can_read:
                    readable.append(link)
        return Waited(news, readable, woken)

    def wake(self) -> None:
        """Ends the waiting, in progress or the next; may be called from any thread, also after the end."""
        self._waiter.wake()

    def close(self) -> None:
        """Lets go of every descriptor."""
        for link in self._links.values():
            if link.wire is not None:
                link.wire.close()
        self._links.clear()
        self._waiter.close()
