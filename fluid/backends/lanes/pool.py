"""What backends of real lanes share: commands to messages, messages to events, over any launcher."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fluid._clock import Clock, MonotonicClock
from fluid.backends.base import LaneExited, Launcher, Watchdog
from fluid.backends.lanes.connections import LaneConnection, LaneConnections
from fluid.backends.lanes.elastic import ElasticTrials
from fluid.backends.lanes.migration import Migrations
from fluid.backends.lanes.registry import Registry
from fluid.backends.lanes.translate import message_of, to_event
from fluid.engine.commands import (
    Call,
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
from fluid.lane import messages as m
from fluid.resources import Device

#: Seconds a lane has to end by itself before it is killed.
DEFAULT_GRACE_S = 2.0
#: Seconds to wait for the launcher to say what became of a lane whose connection has ended.
_POST_MORTEM_S = 2.0

_OfTrial = (StartTrial, RunIteration, Pause, Save, StopTrial, Call, Resize)


class LanePool:
    """Lanes on a set of devices; implements :class:`fluid.backends.base.Backend` but for finding devices.

    Args:
        devices: what lanes can be started on.
        launcher: starts them; the pool owns it from now on.
        grace: seconds a lane has to end by itself before it is killed.
        process_group: what the lanes of one trial talk through: ``"torch"`` or ``"horovod"``.
        clock: for the driver; lanes have their own.
        guard: of what all lanes depend on, if there is such a thing; the pool owns it from now on.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        launcher: Launcher,
        *,
        grace: float = DEFAULT_GRACE_S,
        process_group: str = "torch",
        clock: Clock | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._devices = {device.index: device for device in devices}
        self._launcher = launcher
        self._grace = grace
        self._clock = clock or MonotonicClock()
        self._registry = Registry(launcher.preload)
        self._migrations = Migrations()
        self._elastic = ElasticTrials(self, process_group)
        self._lanes = LaneConnections(launcher)
        #: Every lane there ever was.
        self._lane_ids: set[int] = set()
        self._events: list[Event] = []
        self._latest = self._clock.now()
        self._owner = os.getpid()
        self._closed = False
        self._watchdog = watchdog
        #: Deaths that are not told before the guard has looked, and lanes that are not started before it is ready.
        self._deaths: list[LaneLost] = []
        self._postponed: list[StartLane] = []
        _pools.add(self)
        if watchdog is not None:
            watchdog.start(self.wake)

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
        self._elastic.forget(trial_id)
        one_per_host = {lane.host: lane for lane in self._lanes if not lane.leaving}
        for lane in one_per_host.values():
            self._lanes.put(lane, m.DeleteCheckpoints(trial_id))
        self._lanes.flush()

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
        self._lanes.flush()

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
        self._lanes.wake()

    def close(self) -> None:
        """Ends every lane; no process is left when it returns. Closing twice is harmless."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        try:
            for lane in self._lanes:
                self._let_go(lane)
            self._lanes.flush()
            deadline = self._clock.now() + self._grace
            while self._lanes and (left := deadline - self._clock.now()) > 0.0:
                self._turn(left)
        finally:  # Also when interrupted.
            try:
                self._launcher.close()
            finally:
                if self._watchdog is not None:
                    self._watchdog.close()
                self._lanes.close()

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
        several = len(lane_ids) > 1 or (isinstance(command, Resize) and len(command.old_lane_ids) > 1)
        if several and not isinstance(command, (StopLane, StopTrial)) and not self.is_elastic(command.trial_id):
            raise FluidError(f"{command}: this trial can run in one lane only")
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
                self._elastic.lane_lost(command.lane_id)
        elif (
            isinstance(command, _OfTrial) and not self._migrations.hold(command) and not self._elastic.execute(command)
        ):
            if not isinstance(command, Resize):
                self._pass_on(command)
            elif command.old_lane_ids[0] in self._lanes:
                self._pass_on(self._migrations.begin(command, self._clock.now()))

    def _pass_on(self, command: StartTrial | RunIteration | Pause | Save | StopTrial | Call) -> None:
        if isinstance(command, StartTrial):
            self.set_up(command.lane_ids[0], command)
            return
        # The first lane answers for all, but each is rid of a trial by itself.
        for lane_id in command.lane_ids if isinstance(command, StopTrial) else command.lane_ids[:1]:
            self.send(lane_id, message_of(command))

    # -- what trials in several lanes need -----------------------------------------------------------------

    def is_up(self, lane_id: int) -> bool:
        """Whether a lane is there, and not told to end."""
        return lane_id in self._lanes and not self._lanes[lane_id].leaving

    def is_elastic(self, trial_id: str) -> bool:
        """Whether a trial can span several devices."""
        return self._registry.is_elastic(trial_id)

    def set_up(self, lane_id: int, command: StartTrial, membership: m.Membership | None = None) -> None:
        """Has a lane set a trial up; with ``membership``, as one of several."""
        if self.is_up(lane_id):
            lane = self._lanes[lane_id]
            key, config = self._registry.look_up(command.trial_id)
            if key not in lane.known:
                lane.known.add(key)
                self._lanes.put(lane, self._registry.shipment(key))
            start = message_of(command, key, config)
            self._lanes.put(
                lane, start._replace(membership=membership) if isinstance(start, m.StartResident) else start
            )

    def send(self, lane_id: int, message: Any) -> None:
        """Sends a lane a message, if it is up."""
        if self.is_up(lane_id):
            self._lanes.put(self._lanes[lane_id], message)

    def obey(self, command: Command) -> None:
        """Carries a command out that was checked before."""
        self._execute(command)

    def report(self, event: Event) -> None:
        """Has :meth:`poll` return an event."""
        self._events.append(event)

    # -- lanes ---------------------------------------------------------------------------------------------

    def _start_lane(self, command: StartLane) -> None:
        self._lane_ids.add(command.lane_id)
        self._lanes.add(command.lane_id)
        if self._watchdog is None or self._watchdog.is_ready:
            self._launch(command)
        else:
            self._postponed.append(command)

    def _launch(self, command: StartLane) -> None:
        lane = self._lanes[command.lane_id]
        try:
            connected = self._launcher.launch(command.lane_id, self._devices[command.device_id])
        except (FluidError, OSError) as error:
            self._lost(lane, f"could not be started: {error}")
            return
        if connected is not None:
            self._lanes.connect(connected)

    def _let_go(self, lane: LaneConnection) -> None:
        if not lane.leaving:
            lane.leaving = True
            lane.kill_at = self._clock.now() + self._grace
            self._lanes.put(lane, m.Shutdown())

    # -- what happens --------------------------------------------------------------------------------------

    def _turn(self, wait: float | None) -> bool:
        """Waits once and deals with what comes; returns whether :meth:`wake` was called."""
        waited = self._lanes.wait(self._until_next_kill(wait))
        if waited.news:
            self._read_news()
        for lane in waited.readable:
            self._receive(lane)
        self._kill_overdue()
        if self._watchdog is not None and not self._closed:
            self._handle_device_fault(self._watchdog)
        self._lanes.flush()
        return waited.woken

    def _read_news(self) -> None:
        for news in self._launcher.news():
            if isinstance(news, LaneExited):
                lane = self._lanes.get(news.lane_id)
                if lane is not None:
                    self._drain(lane)
                    self._lost(lane, news.reason)
            else:
                self._lanes.connect(news)

    def _receive(self, lane: LaneConnection) -> None:
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
            self._lanes.disconnect(lane)
            lane.kill_at = min(lane.kill_at or float("inf"), self._clock.now() + _POST_MORTEM_S)

    def _drain(self, lane: LaneConnection) -> None:
        """Reads all that a lane wrote before it died: results it had finished count."""
        while lane.wire is not None and lane.lane_id in self._lanes:
            before = len(self._events)
            self._receive(lane)
            if len(self._events) == before:
                return

    def _take_in(self, lane: LaneConnection, message: Any) -> None:
        if isinstance(message, m.LaneWarm) and lane.host != "localhost":
            lane.offset = self._clock.now() - message.at
        if isinstance(message, m.FromMember):
            if not lane.leaving:
                self._elastic.hear(lane.lane_id, message, message.at + lane.offset)
            return
        event = to_event(message, lane.lane_id, lane.host, message.at + lane.offset)
        event, commands = self._migrations.translate(event)
        if not lane.leaving:
            self._events.append(event)
            self._elastic.follow(event)
        for command in commands:
            self._execute(command)

    def _lost(self, lane: LaneConnection, reason: str) -> None:
        self._lanes.remove(lane)
        self._migrations.lane_lost(lane.lane_id)
        if not lane.leaving:
            culprit = self._launcher.culprit(lane.lane_id)
            lost = LaneLost(self._clock.now(), lane.lane_id, reason, culprit)
            if self._watchdog is None:
                self._events.append(lost)
            else:
                # Its successor is of no use if what lanes depend on has failed with it.
                self._watchdog.request_check()
                (self._deaths if self._watchdog.is_checking else self._events).append(lost)
            self._elastic.lane_lost(lane.lane_id)

    def _handle_device_fault(self, watchdog: Watchdog) -> None:
        """Ends all lanes if what they depend on has failed, and goes on once that is clear, or started again.

        Lanes that died before that was found out are the suspects, by the trials that ran in them; the trials of
        those that are ended are not to blame.
        """
        looking, problem = (
            watchdog.is_checking,
            watchdog.problem,
        )  # In this order: it ends to look once it has found one.
        if problem:
            for lane in self._lanes:
                self._drain(lane)
                self._launcher.kill(lane.lane_id)
                if lane.lane_id in self._lanes:
                    self._end_for(problem, lane)
            watchdog.restart()
        if problem or not looking:
            self._events += self._deaths
            self._deaths.clear()
        if self._postponed and watchdog.is_ready:
            postponed, self._postponed = self._postponed, []
            for command in postponed:
                if command.lane_id in self._lanes:
                    self._launch(command)

    def _end_for(self, problem: str, lane: LaneConnection) -> None:
        died = lane.kill_at is not None and not lane.leaving  # only what became of it is not known yet
        leaving, lane.leaving = lane.leaving, lane.leaving or not died
        self._lost(lane, "closed its connection")
        if not leaving and not died:
            self._events.append(LaneLost(self._clock.now(), lane.lane_id, problem, blameless=True))

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
        kills = [lane.kill_at for lane in self._lanes if lane.kill_at is not None]
        if not kills:
            return wait if wait is None else max(0.0, wait)
        left = max(0.0, min(kills) - self._clock.now())
        return left if wait is None else max(0.0, min(wait, left))

    def _kill_overdue(self) -> None:
        now = self._clock.now()
        for lane in self._lanes:
            if lane.kill_at is not None and now >= lane.kill_at:
                self._launcher.kill(lane.lane_id)
                self._lost(lane, "closed its connection")

    def _check_open(self) -> None:
        if self._closed:
            raise FluidError("this backend was closed")

    def _abandon(self) -> None:
        """In a process forked from the driver: copies of the connections must not outlive the driver there."""
        if not self._closed:
            self._closed = True
            self._launcher.abandon()
            self._lanes.close()


_pools: weakref.WeakSet[LanePool] = weakref.WeakSet()


def _abandon_all() -> None:
    for pool in list(_pools):
        with suppress(Exception):
            pool._abandon()


os.register_at_fork(after_in_child=_abandon_all)
