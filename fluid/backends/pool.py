"""What backends of real lanes share: commands to messages, messages to events, over any launcher."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fluid import lane_messages as m
from fluid._clock import Clock, MonotonicClock
from fluid.backends.base import LaneConnected, LaneExited, Launcher
from fluid.backends.moves import Moves
from fluid.backends.registry import Registry
from fluid.backends.translate import message_of, to_event
from fluid.backends.waiting import Waiter
from fluid.backends.wire import Wire
from fluid.engine.commands import (
    Command,
    Pause,
    Resize,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopLane,
    StopTrial,
)
from fluid.engine.events import Event, LaneLost
from fluid.errors import FluidError
from fluid.resources import Device

#: Seconds a lane has to end by itself before it is killed.
DEFAULT_GRACE_S = 2.0
#: Seconds to wait for the launcher to say what became of a lane whose connection has ended.
_POST_MORTEM_S = 2.0

#: Stands for the launcher among the numbers of the lanes.
_LAUNCHER = "launcher"
_OfTrial = (StartTrial, RunIteration, Pause, Save, StopTrial, Resize)


@dataclass(slots=True)
class _Lane:
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


class LanePool:
    """Lanes on a set of devices; implements :class:`fluid.backends.base.Backend` but for finding devices.

    Args:
        devices: what lanes can be started on.
        launcher: starts them; the pool owns it from now on.
        grace: seconds a lane has to end by itself before it is killed.
        clock: for the driver; lanes have their own.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        launcher: Launcher,
        *,
        grace: float = DEFAULT_GRACE_S,
        clock: Clock | None = None,
    ) -> None:
        self._devices = {device.index: device for device in devices}
        self._launcher = launcher
        self._grace = grace
        self._clock = clock or MonotonicClock()
        self._registry = Registry(launcher.preload)
        self._moves = Moves()
        self._lanes: dict[int, _Lane] = {}
        #: Every lane there ever was.
        self._lane_ids: set[int] = set()
        #: Lanes with messages in their outbox.
        self._dirty: dict[int, _Lane] = {}
        self._events: list[Event] = []
        self._latest = self._clock.now()
        self._waiter = Waiter()
        self._owner = os.getpid()
        self._closed = False
        _pools.add(self)

    # -- the interface of a backend ------------------------------------------------------------------------

    def devices(self) -> list[Device]:
        """Returns the devices, in order of their index."""
        return [self._devices[index] for index in sorted(self._devices)]

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Makes further devices known, before lanes are started on them."""
        self._devices |= {device.index: device for device in devices}

    def now(self) -> float:
        """Returns the time, seconds, on the clock of the events."""
        return self._clock.now()

    def register(self, trial_id: str, trainable: Any, config: Mapping[str, Any]) -> None:
        """Says what a trial is: see :meth:`fluid.backends.base.Backend.register`."""
        self._registry.register(trial_id, trainable, config)

    def forget(self, trial_id: str) -> None:
        """Says that no command will name a trial any more; its checkpoints are deleted."""
        self._registry.forget(trial_id)
        one_per_host = {lane.host: lane for lane in self._lanes.values() if not lane.leaving}
        for lane in one_per_host.values():
            self._put(lane, m.Forget(trial_id))
        self._flush()

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out: see :meth:`fluid.backends.base.Backend.execute`.

        Raises:
            FluidError: a command cannot be carried out; then none of them was.
        """
        self._check_open()
        started = {command.lane_id for command in commands if isinstance(command, StartLane)}
        for command in commands:
            self._check(command, started)
        for command in commands:
            self._execute(command)
        self._flush()

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Waits for something to happen: see :meth:`fluid.backends.base.Backend.poll`."""
        self._check_open()
        deadline = None if timeout is None else self._clock.now() + timeout
        woken = False
        while True:
            left = None if deadline is None else deadline - self._clock.now()
            woken |= self._turn(0.0 if self._events else left)
            if self._events or woken or (deadline is not None and self._clock.now() >= deadline):
                return self._take()

    def wake(self) -> None:
        """Makes :meth:`poll` return; may be called from any thread, also once the pool is closed."""
        self._waiter.wake()

    def close(self) -> None:
        """Ends every lane; no process is left when it returns. Closing twice is harmless."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        try:
            for lane in list(self._lanes.values()):
                self._let_go(lane)
            self._flush()
            deadline = self._clock.now() + self._grace
            while self._lanes and (left := deadline - self._clock.now()) > 0.0:
                self._turn(left)
        finally:  # Also when interrupted.
            self._launcher.close()
            self._let_go_of_descriptors()

    # -- commands ------------------------------------------------------------------------------------------

    def _check(self, command: Command, started: set[int]) -> None:
        """Refuses what this backend cannot do. A lane that was there and has died is no error: it was reported."""
        if isinstance(command, StartLane):
            if command.device_id not in self._devices:
                raise FluidError(f"{command}: there is no such device")
            if command.lane_id in self._lane_ids:
                raise FluidError(f"{command}: there is, or was, a lane of that number")
            return
        if not isinstance(command, (StopLane, *_OfTrial)):
            raise FluidError(f"{command} is no command for a backend")
        lane_ids = (command.lane_id,) if isinstance(command, StopLane) else command.lane_ids
        if len(lane_ids) != 1 or (isinstance(command, Resize) and len(command.old_lane_ids) != 1):
            raise FluidError(f"{command}: this backend runs a trial on one lane only")
        for lane_id in lane_ids:
            if lane_id not in self._lane_ids and lane_id not in started:
                raise FluidError(f"{command}: lane {lane_id} was never started")
        if isinstance(command, (StartTrial, Resize)) and command.trial_id not in self._registry:
            raise FluidError(f"{command}: the trial was not registered")

    def _execute(self, command: Command) -> None:
        if isinstance(command, StartLane):
            self._start_lane(command)
        elif isinstance(command, StopLane):
            lane = self._lanes.get(command.lane_id)
            if lane is not None:
                self._let_go(lane)
        elif isinstance(command, _OfTrial) and not self._moves.defer(command):
            if not isinstance(command, Resize):
                self._pass_on(command)
            elif command.old_lane_ids[0] in self._lanes:
                self._pass_on(self._moves.begin(command, self._clock.now()))

    def _pass_on(self, command: StartTrial | RunIteration | Pause | Save | StopTrial) -> None:
        lane = self._lanes.get(command.lane_ids[0])
        if lane is None or lane.leaving:
            return
        if isinstance(command, StartTrial):
            key, config = self._registry.look_up(command.trial_id)
            if key not in lane.known:
                lane.known.add(key)
                self._put(lane, self._registry.shipment(key))
            self._put(lane, message_of(command, key, config))
        else:
            self._put(lane, message_of(command))

    def _start_lane(self, command: StartLane) -> None:
        self._lane_ids.add(command.lane_id)
        lane = self._lanes[command.lane_id] = _Lane(command.lane_id)
        try:
            connected = self._launcher.launch(command.lane_id, self._devices[command.device_id])
        except (FluidError, OSError) as error:
            self._lost(lane, f"could not be started: {error}")
            return
        if connected is not None:
            self._connect(connected)

    def _let_go(self, lane: _Lane) -> None:
        if not lane.leaving:
            lane.leaving = True
            lane.kill_at = self._clock.now() + self._grace
            self._put(lane, m.Shutdown())

    def _put(self, lane: _Lane, message: Any) -> None:
        lane.outbox.append(message)
        self._dirty[lane.lane_id] = lane

    def _flush(self) -> None:
        for lane in self._dirty.values():
            if lane.wire is not None and lane.outbox:
                batch, lane.outbox = lane.outbox, []
                lane.wire.send(batch)
                self._waiter.watch(lane.lane_id, lane.wire)
        self._dirty = {lane_id: lane for lane_id, lane in self._dirty.items() if lane.outbox}

    # -- what happens --------------------------------------------------------------------------------------

    def _turn(self, wait: float | None) -> bool:
        """Waits once and deals with what comes; returns whether :meth:`wake` was called."""
        self._waiter.watch(_LAUNCHER, self._launcher)
        ready, woken = self._waiter.wait(self._until_next_kill(wait))
        for key, readable, writable in ready:
            if key is _LAUNCHER:
                self._read_news()
            elif (lane := self._lanes.get(key)) is not None and lane.wire is not None:
                if writable:
                    lane.wire.flush()
                    self._waiter.watch(key, lane.wire)
                if readable:
                    self._receive(lane)
        self._kill_overdue()
        self._flush()
        return woken

    def _read_news(self) -> None:
        for news in self._launcher.news():
            if isinstance(news, LaneExited):
                lane = self._lanes.get(news.lane_id)
                if lane is not None:
                    self._drain(lane)
                    self._lost(lane, news.reason)
            else:
                self._connect(news)

    def _connect(self, connected: LaneConnected) -> None:
        lane = self._lanes.get(connected.lane_id)
        if lane is None:
            connected.socket.close()
            return
        lane.wire = Wire(connected.socket)
        lane.host = connected.host
        self._waiter.watch(lane.lane_id, lane.wire)
        self._dirty[lane.lane_id] = lane

    def _receive(self, lane: _Lane) -> None:
        wire = lane.wire
        if wire is None or lane.lane_id not in self._lanes:
            return
        try:
            messages = wire.receive()
        except Exception as error:  # Not in our format: whatever wrote this is not to be trusted any further.
            wire.close()
            self._launcher.kill(lane.lane_id)
            self._lost(lane, f"sent what cannot be read: {error}")
            return
        for message in messages:
            self._take_in(lane, message)
        if wire.ended and lane.wire is not None:
            # The launcher knows what became of it, and will tell soon.
            self._disconnect(lane)
            lane.kill_at = min(lane.kill_at or float("inf"), self._clock.now() + _POST_MORTEM_S)

    def _drain(self, lane: _Lane) -> None:
        """Reads all that a lane wrote before it died: results it had finished count."""
        while lane.wire is not None and lane.lane_id in self._lanes:
            before = len(self._events)
            self._receive(lane)
            if len(self._events) == before:
                return

    def _take_in(self, lane: _Lane, message: Any) -> None:
        if isinstance(message, m.Ready) and lane.host != "localhost":
            lane.offset = self._clock.now() - message.at
        event = to_event(message, lane.lane_id, lane.host, message.at + lane.offset)
        event, commands = self._moves.follow(event)
        if not lane.leaving:
            self._events.append(event)
        for command in commands:
            self._execute(command)

    def _lost(self, lane: _Lane, reason: str) -> None:
        self._lanes.pop(lane.lane_id, None)
        self._dirty.pop(lane.lane_id, None)
        self._disconnect(lane)
        self._moves.lane_lost(lane.lane_id)
        if not lane.leaving:
            culprit = self._launcher.culprit(lane.lane_id)
            self._events.append(LaneLost(self._clock.now(), lane.lane_id, reason, culprit))

    def _disconnect(self, lane: _Lane) -> None:
        self._waiter.drop(lane.lane_id)
        if lane.wire is not None:
            lane.wire.close()
            lane.wire = None

    def _take(self) -> list[Event]:
        """Hands events out in order of time, which never goes back: an engine relies on it."""
        events, self._events = self._events, []
        events.sort(key=lambda event: event.at)  # Stable, and those of one lane are in order.
        for index, event in enumerate(events):
            if event.at < self._latest:
                object.__setattr__(event, "at", self._latest)  # Nobody else has seen it yet.
            self._latest = events[index].at
        return events

    # -- waiting -------------------------------------------------------------------------------------------

    def _until_next_kill(self, wait: float | None) -> float | None:
        kills = [lane.kill_at for lane in self._lanes.values() if lane.kill_at is not None]
        if not kills:
            return wait if wait is None else max(0.0, wait)
        left = max(0.0, min(kills) - self._clock.now())
        return left if wait is None else max(0.0, min(wait, left))

    def _kill_overdue(self) -> None:
        now = self._clock.now()
        for lane in list(self._lanes.values()):
            if lane.kill_at is not None and now >= lane.kill_at:
                self._launcher.kill(lane.lane_id)
                self._lost(lane, "closed its connection")

    def _check_open(self) -> None:
        if self._closed:
            raise FluidError("this backend was closed")

    def _let_go_of_descriptors(self) -> None:
        for lane in self._lanes.values():
            if lane.wire is not None:
                lane.wire.close()
        self._lanes.clear()
        self._waiter.close()

    def _abandon(self) -> None:
        """In a process forked from the driver: copies of the connections must not outlive the driver there."""
        if not self._closed:
            self._closed = True
            self._launcher.abandon()
            self._let_go_of_descriptors()


_pools: weakref.WeakSet[LanePool] = weakref.WeakSet()


def _abandon_all() -> None:
    for pool in list(_pools):
        with suppress(Exception):
            pool._abandon()


os.register_at_fork(after_in_child=_abandon_all)
