"""Starts lanes as Ray actors. What may wait for Ray is done in a thread of its own, see :mod:`.helper`."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fluid.backends.base import LaneConnected, LaneExited
from fluid.backends.ray.cluster import RayDevices
from fluid.backends.ray.folders import HERE, Home, Session
from fluid.backends.ray.helper import Helper
from fluid.backends.ray.lane_actor import Assignment, LaneStart, Preload
from fluid.backends.ray.lane_listener import AuthenticatedConnection, LaneListener
from fluid.backends.ray.processes import Processes
from fluid.elastic.messages import LOOPBACK
from fluid.lane.culprit_note import read_running_trial
from fluid.lane.messages import encode
from fluid.lane.policy import DEFAULT_POLICY
from fluid.resources import Device

_LENGTH = struct.Struct("!i")


@dataclass(slots=True)
class _Actor:
    """An actor, from its start to its end.

    Attributes:
        device_id: whose bundle it is in.
        place: what it is bound to; any device there is as good.
        lane_id: the lane it is; ``None`` while it waits to become one.
        socket: its connection, while it waits.
        connected: whether it has come.
    """

    number: int
    device_id: int
    place: str
    host: str
    lane_id: int | None
    socket: socket.socket | None = None
    connected: bool = False


class RayLauncher:
    """Implements :class:`fluid.backends.base.Launcher` over Ray.

    Where a lane has come it keeps one more actor ready, so that the next lane there need not wait for a process to
    start and to load what trials import.

    Args:
        devices: what lanes can be started on; the launcher owns them from now on.
        session: the folders.
        preload: modules to load first.
        spares: whether to keep actors ready.
        policy: which trial a lane runs next if several have iterations left.
    """

    def __init__(
        self,
        devices: RayDevices,
        session: Session,
        preload: Sequence[str],
        *,
        spares: bool,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self._devices = devices
        self._session = session
        self._spares = spares
        self._policy = policy
        self._modules = list(dict.fromkeys(preload))
        self._key = secrets.token_bytes(32)
        self._home = Home(session, HERE)
        with open(session.marker, "wb"):
            pass
        #: register() of a trial may preload from another thread than the one that polls.
        self._lock = threading.RLock()
        self._actors: dict[int, _Actor] = {}
        self._by_lane: dict[int, _Actor] = {}
        #: Device of every lane there ever was.
        self._device_ids: dict[int, int] = {}
        #: Places where an actor ended before it had come: no more are kept ready there.
        self._barren: set[str] = set()
        self._next = 0
        self._exits: deque[LaneExited] = deque()
        self._processes = Processes()
        self._selector = selectors.EpollSelector()
        self._doorman = LaneListener(self._key, self._selector)
        self._wake_reader, self._wake_writer = os.pipe()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_pipe)
        self._helper = Helper(devices, session, self._wake)

    # -- the interface of a launcher -----------------------------------------------------------------------

    @property
    def wants_to_write(self) -> bool:
        return False

    def launch(self, lane_id: int, device: Device) -> LaneConnected | None:
        place = self._devices.place_of(device.index)
        with self._lock:
            self._device_ids[lane_id] = device.index
            waiting = [actor for actor in self._actors.values() if actor.lane_id is None and actor.place == place]
            # Those that are there first.
            for actor in sorted(waiting, key=lambda actor: not actor.connected):
                if not actor.connected or self._send(actor, Assignment(lane_id)):
                    return self._become(actor, lane_id)
            self._start(device, place, lane_id)
        return None

    def kill(self, lane_id: int) -> None:
        with self._lock:
            actor = self._by_lane.get(lane_id)
            if actor is not None:
                self._helper.kill(actor.number)

    def preload(self, modules: Sequence[str]) -> None:
        with self._lock:
            new = [name for name in dict.fromkeys(modules) if name not in self._modules]
            if new:
                self._modules += new
                for actor in self._actors.values():
                    if actor.lane_id is None:
                        self._send(actor, Preload(tuple(new)))

    def fileno(self) -> int:
        return self._selector.fileno()

    def news(self) -> list[LaneConnected | LaneExited]:
        with self._lock:
            for key, _ in self._selector.select(0):
                key.data()
            news = [connected for arrival in self._doorman.arrivals() for connected in self._admit(arrival)]
            exited = [exited for number, reason in self._helper.ended() for exited in self._bury(number, reason)]
            exited += [self._exits.popleft() for _ in range(len(self._exits))]
            return [*news, *exited]

    def culprit(self, lane_id: int) -> str | None:
        # A note on another machine cannot be read, and naming nobody is then the truth.
        return read_running_trial(self._home.note(lane_id))

    def close(self) -> None:
        try:
            for actor in self._actors.values():
                if actor.socket is not None:
                    actor.socket.close()
            self._helper.close([host for host in self._devices.hosts if host != HERE])
            self._processes.end()
        finally:
            self._let_go_of_descriptors()
            with suppress(OSError):
                os.unlink(self._session.marker)
            self._home.leave(clear=True)
            self._devices.close()

    def abandon(self) -> None:
        self._let_go_of_descriptors()

    # -- for the backend -----------------------------------------------------------------------------------

    @property
    def run_folder(self) -> str:
        return self._session.run_folder

    def device_of(self, lane_id: int) -> int:
        """The device of a lane, be it gone or not."""
        return self._device_ids[lane_id]

    def changes(self, *, knock: bool = False) -> tuple[list[int], list[Device]]:
        """Returns devices that were lost, and that came back, since it was last asked.

        Args:
            knock: whether to look at this moment.
        """
        return self._helper.changes(knock=knock)

    def on_change(self, call: object) -> None:
        """Has a function called, in another thread, when there are changes."""
        self._helper.on_change = call  # type: ignore[assignment]

    # -- actors --------------------------------------------------------------------------------------------

    def _start(self, device: Device, place: str, lane_id: int | None) -> None:
        actor = _Actor(self._next, device.index, place, device.host, lane_id)
        self._next += 1
        self._actors[actor.number] = actor
        if lane_id is not None:
            self._by_lane[lane_id] = actor
        # On its own machine nothing is open to the network.
        address = self._doorman.listen(LOOPBACK if device.host == HERE else self._devices.ip)
        start = LaneStart(
            number=actor.number,
            address=address,
            key=self._key,
            session=self._session,
            host=device.host,
            driver_ip=self._devices.ip,
            spread=self._devices.hosts != {HERE},
            kind=device.kind,
            bounded=device.memory_bytes is not None,
            visible=self._devices.visible_for(device.index),
            threads=1,
            share=1.0 / max(1, sum(other.host == device.host for other in self._devices.devices)),
            modules=tuple(self._modules),
            folder=os.getcwd(),
            policy=self._policy,
        )
        self._helper.start(actor.number, device.index, start)

    def _become(self, actor: _Actor, lane_id: int) -> LaneConnected | None:
        actor.lane_id = lane_id
        self._by_lane[lane_id] = actor
        connection, actor.socket = actor.socket, None
        if connection is None:
            return None
        self._provide(actor)
        return LaneConnected(lane_id, connection, actor.host)

    def _admit(self, arrival: AuthenticatedConnection) -> Iterator[LaneConnected]:
        actor = self._actors.get(arrival.number)
        if actor is None or actor.connected:
            arrival.socket.close()
            return
        actor.connected, actor.socket = True, arrival.socket
        if actor.host == HERE:
            self._processes.watch(arrival.pid, arrival.birth)
        if actor.lane_id is None:
            return
        if self._send(actor, Assignment(actor.lane_id)):
            connected = self._become(actor, actor.lane_id)
            assert connected is not None
            yield connected

    def _provide(self, actor: _Actor) -> None:
        """Keeps one more actor ready beside one that has come, once nobody waits for one there any more."""
        if not self._spares or actor.place in self._barren:
            return
        others = [other for other in self._actors.values() if other.place == actor.place]
        if all(other.connected and other.lane_id is not None for other in others):
            self._start(self._devices[actor.device_id], actor.place, None)

    def _send(self, actor: _Actor, message: Assignment | Preload) -> bool:
        """Sends to an actor that waits, if it is there; returns whether it could be."""
        if actor.socket is None:
            return False
        data = encode([message])
        frame = _LENGTH.pack(len(data)) + data
        with suppress(OSError):
            if actor.socket.send(frame) == len(frame):
                return True
        self._helper.kill(actor.number)
        return False

    def _bury(self, number: int, reason: str) -> Iterator[LaneExited]:
        actor = self._actors.pop(number, None)
        if actor is None:
            return
        if actor.socket is not None:
            actor.socket.close()
        if actor.lane_id is not None:
            self._by_lane.pop(actor.lane_id, None)
            yield LaneExited(actor.lane_id, reason)
        elif not actor.connected:
            self._barren.add(actor.place)

    # -- descriptors ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with suppress(OSError):  # The pipe is full: there is news. Or closed: nobody reads it.
            os.write(self._wake_writer, b"x")

    def _drain_pipe(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)

    def _let_go_of_descriptors(self) -> None:
        self._doorman.close()
        self._selector.close()
        self._processes.close()
        # Closed last and not reused by _wake(), which may run in another thread at this moment.
        reader, writer, self._wake_reader, self._wake_writer = self._wake_reader, self._wake_writer, -1, -1
        for descriptor in (reader, writer):
            if descriptor >= 0:
                os.close(descriptor)
