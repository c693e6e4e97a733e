"""Starts lanes as Ray actors; :mod:`fluid.backends.ray.actor_supervisor` has the thread that may wait for Ray."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fluid._clock import MonotonicClock
from fluid.backends.base import LaneConnected, LaneExited
from fluid.backends.hosts.folders import HERE, HostFolders, SessionFolders
from fluid.backends.hosts.listener import AuthenticatedConnection, LaneListener
from fluid.backends.hosts.stack_copies import request_stacks
from fluid.backends.ray.actor_supervisor import ActorSupervisor
from fluid.backends.ray.devices import RayDevices
from fluid.backends.ray.lane_actor import Assignment, LaneStart, Preload
from fluid.backends.ray.nodes import NodeChanges
from fluid.backends.ray.process_handles import ProcessHandles
from fluid.elastic.messages import LOOPBACK
from fluid.lane.culprit_note import read_running_trial
from fluid.lane.messages import encode
from fluid.lane.policy import DEFAULT_POLICY
from fluid.lane.stack_dump import DUMP_SIGNAL
from fluid.processes.children import is_stopped
from fluid.processes.session_mark import kill_marked
from fluid.resources import Device

#: Seconds that an actor may be stopped before it is killed.
_STOPPED_S = 5.0
#: Seconds that Ray may take to take the devices back, after the supervisor has ended.
_DEVICES_S = 3.5
_LENGTH = struct.Struct("!i")


@dataclass(slots=True)
class _Actor:
    """An actor, from its start to its end.

    Attributes:
        device_id: the device whose bundle it is in.
        place: what it is bound to (:meth:`RayDevices.place_of`); any device there is as good.
        lane_id: the lane it is; ``None`` for a spare, which may become one.
        socket: its connection, while it is a spare.
        connected: whether it has connected.
        pid: its process, once it has connected on the driver's machine; -1 otherwise.
    """

    number: int
    device_id: int
    place: str
    host: str
    lane_id: int | None
    socket: socket.socket | None = None
    connected: bool = False
    pid: int = -1


class RayLauncher:
    """Implements :class:`fluid.backends.base.Launcher` over Ray.

    Beside a lane that has connected it keeps a spare actor, so that the next lane there need not wait for a process
    to start and to load what trials import.

    Args:
        devices: what lanes can be started on; the launcher owns them from now on.
        session: the folders.
        preload: modules to load first.
        spares: whether to keep spare actors.
        policy: which trial a lane runs next if several have iterations left.
    """

    def __init__(
        self,
        devices: RayDevices,
        session: SessionFolders,
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
        self._home = HostFolders(session, HERE)
        with open(session.marker, "wb"):
            pass
        #: register() of a trial may preload from another thread than the one that polls.
        self._lock = threading.RLock()
        self._actors: dict[int, _Actor] = {}
        self._by_lane: dict[int, _Actor] = {}
        #: Device of every lane there ever was.
        self._device_ids: dict[int, int] = {}
        #: Places where an actor ended before it had connected: they get no spares.
        self._failed_places: set[str] = set()
        self._next = 0
        #: Actors of this machine that were stopped at the last look, and since when; and those that were killed for it.
        self._stopped: dict[int, float] = {}
        self._killed: set[int] = set()
        self._clock = MonotonicClock()
        self._exits: deque[LaneExited] = deque()
        self._processes = ProcessHandles()
        self._selector = selectors.EpollSelector()
        self._listener = LaneListener(self._key, self._selector)
        self._wake_reader, self._wake_writer = os.pipe()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_pipe)
        self._supervisor = ActorSupervisor(devices, session, self._wake)

    # -- the interface of a launcher -----------------------------------------------------------------------

    @property
    def wants_to_write(self) -> bool:
        """Never: what is sent to spares is a few bytes."""
        return False

    def launch(self, lane_id: int, device: Device) -> LaneConnected | None:
        """Makes a lane of a spare on the device, or starts an actor, which :meth:`poll` tells of later."""
        place = self._devices.place_of(device.index)
        with self._lock:
            self._device_ids[lane_id] = device.index
            waiting = [actor for actor in self._actors.values() if actor.lane_id is None and actor.place == place]
            # Those that have connected first.
            for actor in sorted(waiting, key=lambda actor: not actor.connected):
                if not actor.connected or self._send(actor, Assignment(lane_id)):
                    return self._assign(actor, lane_id)
            self._start(device, place, lane_id)
        return None

    def kill(self, lane_id: int) -> None:
        """Kills a lane; :meth:`poll` tells when it is gone."""
        with self._lock:
            actor = self._by_lane.get(lane_id)
            if actor is not None:
                # Ray asks the process to end itself, which a stopped one cannot.
                self._processes.send_signal(actor.pid, signal.SIGKILL)
                self._supervisor.kill(actor.number)

    def dump_stacks(self, lane_id: int, trial_id: str) -> None:
        """Has a lane's stacks written to the log of the trial that runs there, soon; on this machine only."""
        with self._lock:
            actor = self._by_lane.get(lane_id)
        if actor is not None and actor.pid >= 0:
            pid, send = actor.pid, self._processes.send_signal
            request_stacks(self.run_folder, lane_id, trial_id, lambda: send(pid, DUMP_SIGNAL))

    def preload(self, modules: Sequence[str]) -> None:
        """Loads what trials are going to import, in spares and in actors that are started from now on."""
        with self._lock:
            new = [name for name in dict.fromkeys(modules) if name not in self._modules]
            if new:
                self._modules += new
                for actor in self._actors.values():
                    if actor.lane_id is None:
                        self._send(actor, Preload(tuple(new)))

    def fileno(self) -> int:
        """A descriptor that is readable when there is news."""
        return self._selector.fileno()

    def poll(self) -> list[LaneConnected | LaneExited]:
        """Returns the lanes that have connected, and those that have ended, since the last call."""
        with self._lock:
            for key, _ in self._selector.select(0):
                key.data()
            made = self._listener.authenticated()
            connected = [lane for connection in made for lane in self._connect_actor(connection)]
            exited = [exited for number, reason in self._supervisor.ended() for exited in self._remove(number, reason)]
            exited += [self._exits.popleft() for _ in range(len(self._exits))]
            return [*connected, *exited]

    def look(self) -> None:
        """Kills actors of this machine that have been stopped (SIGSTOP) for some seconds."""
        with self._lock:
            now = self._clock.now()
            stopped = {actor.number: actor for actor in self._actors.values() if is_stopped(actor.pid)}
            for number, actor in stopped.items():
                if now - self._stopped.get(number, now) >= _STOPPED_S:
                    self._killed.add(number)
                    self._processes.send_signal(actor.pid, signal.SIGKILL)
            self._stopped = {number: self._stopped.get(number, now) for number in stopped}

    def culprit(self, lane_id: int) -> str | None:
        """Returns the trial whose code ran when a lane of this machine died, if any."""
        # A note on another machine cannot be read: the culprit is unknown then.
        return read_running_trial(self._home.note(lane_id))

    def close(self) -> None:
        """Ends every actor, clears the folders and gives the devices back."""
        try:
            for actor in self._actors.values():
                if actor.socket is not None:
                    actor.socket.close()
            self._supervisor.close([host for host in self._devices.hosts if host != HERE])
            self._processes.end()
            kill_marked(self._session.token)
        finally:
            self._close_descriptors()
            with suppress(OSError):
                os.unlink(self._session.marker)
            self._home.leave(clear=True)
            self._devices.close(_DEVICES_S)

    def abandon(self) -> None:
        """Called in a process forked from the driver: closes descriptors that are the driver's."""
        self._close_descriptors()

    # -- for the backend -----------------------------------------------------------------------------------

    @property
    def run_folder(self) -> str:
        return self._session.run_folder

    def device_of(self, lane_id: int) -> int:
        """The device of a lane, also of one that is gone."""
        return self._device_ids[lane_id]

    def changes(self, *, probe: bool = False) -> NodeChanges:
        """Returns how devices and nodes have changed since it was last asked.

        Args:
            probe: whether to ask the nodes at this moment.
        """
        return self._supervisor.changes(probe=probe)

    def ask(self, count: int) -> None:
        """Asks Ray for devices, in another thread: see :meth:`fluid.backends.ray.devices.RayDevices.ask`."""
        self._supervisor.ask(count)

    def give_back(self, index: int) -> None:
        """Gives Ray a device back, in another thread."""
        self._supervisor.give_back(index)

    def on_change(self, call: Callable[[], None]) -> None:
        """Sets what is called, in another thread, when there are changes."""
        self._supervisor.on_change = call

    # -- actors --------------------------------------------------------------------------------------------

    def _start(self, device: Device, place: str, lane_id: int | None) -> None:
        actor = _Actor(self._next, device.index, place, device.host, lane_id)
        self._next += 1
        self._actors[actor.number] = actor
        if lane_id is not None:
            self._by_lane[lane_id] = actor
        # On its own machine nothing is open to the network.
        address = self._listener.listen(LOOPBACK if device.host == HERE else self._devices.ip)
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
        self._supervisor.start(actor.number, device.index, start)

    def _assign(self, actor: _Actor, lane_id: int) -> LaneConnected | None:
        actor.lane_id = lane_id
        self._by_lane[lane_id] = actor
        connection, actor.socket = actor.socket, None
        if connection is None:
            return None
        self._start_spare(actor)
        return LaneConnected(lane_id, connection, actor.host)

    def _connect_actor(self, made: AuthenticatedConnection) -> Iterator[LaneConnected]:
        actor = self._actors.get(made.hello.number)
        if actor is None or actor.connected:
            made.socket.close()
            return
        actor.connected, actor.socket = True, made.socket
        if actor.host == HERE:
            self._processes.watch(made.hello.pid, made.hello.start_time)
            actor.pid = made.hello.pid
        if actor.lane_id is None:
            return
        if self._send(actor, Assignment(actor.lane_id)):
            connected = self._assign(actor, actor.lane_id)
            assert connected is not None
            yield connected

    def _start_spare(self, actor: _Actor) -> None:
        """Starts a spare beside an actor that has connected, once every other actor there is a connected lane."""
        if not self._spares or actor.place in self._failed_places:
            return
        others = [other for other in self._actors.values() if other.place == actor.place]
        if all(other.connected and other.lane_id is not None for other in others):
            self._start(self._devices[actor.device_id], actor.place, None)

    def _send(self, actor: _Actor, message: Assignment | Preload) -> bool:
        """Sends to a spare that has connected; returns whether that worked."""
        if actor.socket is None:
            return False
        data = encode([message])
        frame = _LENGTH.pack(len(data)) + data
        with suppress(OSError):
            if actor.socket.send(frame) == len(frame):
                return True
        self._supervisor.kill(actor.number)
        return False

    def _remove(self, number: int, reason: str) -> Iterator[LaneExited]:
        actor = self._actors.pop(number, None)
        if actor is None:
            return
        if actor.socket is not None:
            actor.socket.close()
        if actor.lane_id is not None:
            self._by_lane.pop(actor.lane_id, None)
            was_stopped = number in self._killed
            why = f"was stopped (SIGSTOP) for {_STOPPED_S:.0f} s" if was_stopped else reason
            yield LaneExited(actor.lane_id, why, was_stopped)
        elif not actor.connected:
            self._failed_places.add(actor.place)

    # -- descriptors ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with suppress(OSError):  # The pipe is full: the driver is awake. Or closed: the session is over.
            os.write(self._wake_writer, b"x")

    def _drain_pipe(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)

    def _close_descriptors(self) -> None:
        self._listener.close()
        self._selector.close()
        self._processes.close()
        # Closed last: _wake() may run in another thread at this moment, and must not write to a descriptor used again.
        reader, writer, self._wake_reader, self._wake_writer = self._wake_reader, self._wake_writer, -1, -1
        for descriptor in (reader, writer):
            if descriptor >= 0:
                os.close(descriptor)
