"""What backends of real lanes share: commands to messages, messages to events, over any launcher."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from fluid._clock import Clock, MonotonicClock
from fluid._logs import logger_of
from fluid.backends.base import Backend, DeviceBinding, LaneConnected, LaneDying, LaneSuperseded, LaneText, Launcher
from fluid.backends.lanes.checkpoints import CheckpointPlaces, LaneRetention, OfHosts
from fluid.backends.lanes.connections import LaneConnection, LaneConnections
from fluid.backends.lanes.elastic import OfTrial
from fluid.backends.lanes.launches import LaneLaunches
from fluid.backends.lanes.registry import HostPayloads, Registry
from fluid.backends.lanes.routing import TrialRouter
from fluid.backends.lanes.times import not_before
from fluid.elastic.messages import require_process_group
from fluid.engine.commands import (
    Answer,
    Command,
    DumpStacks,
    KillLane,
    LimitMemory,
    LimitRows,
    StartLane,
    StopLane,
)
from fluid.engine.events import CleanUpLasts, Event, LaneLost, LaneOutdated, TrialFailed, TrialReleased, TrialSaved
from fluid.errors import FluidError, parse_duration, require_one_of
from fluid.keeping import WorstKept
from fluid.lane.errors import one_line
from fluid.lane.policy import POLICIES
from fluid.lane.protocol import (
    CheckpointReport,
    CleanUpBegun,
    DropTrainable,
    FromMember,
    LaneLogged,
)
from fluid.resources import Device
from fluid.trainables.payload import TrialPayload

# -- forked --------------------------------------------------------------------------------------
#
# Pools of lanes in processes that are forked from the driver: the lanes are the driver's.


class Forkable(Protocol):
    """What has descriptors that a process forked from the driver must close."""

    def abandon(self) -> None:
        """Closes them there."""
        ...


_all: weakref.WeakSet[Forkable] = weakref.WeakSet()


def close_when_forked(one: Forkable) -> None:
    """Has an object abandon what it owns in each process that is forked from now on."""
    _all.add(one)


def _abandon_all() -> None:
    for one in list(_all):
        with suppress(Exception):
            one.abandon()


os.register_at_fork(after_in_child=_abandon_all)


# -- pool ----------------------------------------------------------------------------------------


#: Seconds a lane has to end by itself before it is killed.
DEFAULT_GRACE_S = 2.0
#: Seconds that it has if the code of a trial cleans up there: what that writes is nowhere else.
_LAST_CLEAN_UP_S = 60.0
#: Seconds after which the engine is told of a clean-up.
_LONG_CLEAN_UP_S = 1.0
#: Seconds between two looks at the launcher's processes.
_LOOK_S = 2.0
#: Seconds to wait for the launcher to report a lane whose connection has ended.
_POST_MORTEM_S = 2.0

_log = logger_of(__name__)

_OfLane = (StopLane, KillLane, Answer, LimitRows)
#: About trials, wherever they are.
_Untracked = (DumpStacks, LimitMemory)
_ENDS_CLEAN_UP = (TrialReleased, TrialFailed, TrialSaved, FromMember)


class LanePool(Backend):
    """Lanes on a set of devices; implements :class:`fluid.backends.base.Backend` but for finding devices.

    Args:
        devices: what lanes can be started on.
        launcher: starts them; the pool owns it from now on.
        bind: tells how a lane is bound to a device.
        grace: seconds a lane has to end by itself before it is killed.
        process_group: what the lanes of one trial talk through: ``"torch"`` or ``"horovod"``.
        clock: for the driver; lanes have their own.

    Attributes:
        places: tells hosts what to do with checkpoints.
        retention: tells lanes of checkpoints that outlive the run.
    """

    forwards_output = True

    def __init__(
        self,
        devices: Sequence[Device],
        launcher: Launcher,
        bind: Callable[[Device], DeviceBinding],
        *,
        grace: float = DEFAULT_GRACE_S,
        process_group: str = "torch",
        clock: Clock | None = None,
    ) -> None:
        self._devices = {device.index: device for device in devices}
        self._launcher = launcher
        self._bind = bind
        self._grace = grace
        self._clock = clock or MonotonicClock()
        payloads = HostPayloads(launcher)
        self._registry = Registry(launcher.preload, payloads)
        self._lanes = LaneConnections(launcher)
        self.places = CheckpointPlaces(launcher, self._lanes, self._registry)
        self.retention = LaneRetention(self._lanes)
        self._starts = LaneLaunches(launcher, self._lanes, self.retention.tell, self._clock)
        self._router = TrialRouter(
            self._lanes, self._registry, payloads, self._clock, process_group, launcher.checkpoints_at
        )
        #: The least number above those of all lanes so far, and the numbers below it that no lane has had.
        self._next_lane = 0
        self._no_lanes = set[int]()
        self._events: list[Event] = []
        #: The session's, which takes log records; ``None`` where it takes none.
        self._take_records: Callable[[LaneLogged], None] | None = None
        self._latest = self._clock.now()
        #: When the launcher is to look at its processes.
        self._look_at = self._latest + _LOOK_S
        self._owner = os.getpid()
        self._closed = False
        close_when_forked(self)

    # -- the interface of a backend ------------------------------------------------------------------------

    def devices(self) -> list[Device]:
        """Returns the devices, in order of their index."""
        return [self._devices[index] for index in sorted(self._devices)]

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Adds devices, before lanes are started on them."""
        self._devices |= {device.index: device for device in devices}

    def now(self) -> float:
        """Returns the time, seconds, on the clock of the events."""
        return self._clock.now()

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        """Takes what a trial is: see :meth:`fluid.backends.base.Backend.register`."""
        self._registry.register(trial_id, payload)

    def forget(self, trial_id: str) -> None:
        """Drops a trial that no command will name again: see :meth:`fluid.backends.base.Backend.forget`."""
        rule = self._registry.rule(trial_id)
        for dropped in self._registry.forget(trial_id):
            for lane in self._lanes:
                if dropped in lane.known:
                    lane.known.discard(dropped)
                    self._lanes.put(lane, DropTrainable(dropped))
        self._router.forget(trial_id)
        self.places.forget(trial_id, keep_newest=rule is not None and rule.how == "last")
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
        """Waits for events: see :meth:`fluid.backends.base.Backend.poll`."""
        self._check_open()
        deadline = None if timeout is None else self._clock.now() + timeout
        woken = False
        while True:
            left = None if deadline is None else deadline - self._clock.now()
            woken |= self._turn(0.0 if self._events else left)
            if self._events or woken or (deadline is not None and self._clock.now() >= deadline):
                return self._take()

    def forward_output(self) -> None:
        """Makes lanes that are started from now on forward what their trials print."""
        self._launcher.forward_output()

    def read_output(self) -> list[LaneText]:
        """Returns what was printed: see :meth:`fluid.backends.base.Backend.read_output`."""
        return self._launcher.read_output()

    def hear_records(self, take: Callable[[LaneLogged], None]) -> None:
        """Hands log records on: see :meth:`fluid.backends.base.Backend.hear_records`."""
        self._take_records = take

    def set_bar(self, group: str, bar: WorstKept | None, room: int | None) -> None:
        """Tells lanes what is worth keeping: see :meth:`fluid.backends.base.Backend.set_bar`."""
        self.retention.set_bar(group, bar, room)

    def discard_kept(self, host: str, path: str, *, demote: bool) -> None:
        """Removes a checkpoint on another machine: see :meth:`fluid.backends.base.Backend.discard_kept`."""
        self.places.discard(host, path, demote=demote)

    def fetch_kept(self, host: str, path: str, target: str) -> None:
        """Copies a checkpoint from another machine: see :meth:`fluid.backends.base.Backend.fetch_kept`."""
        self._launcher.fetch(host, path, target)

    def wake(self) -> None:
        """Makes :meth:`poll` return; may be called from any thread, also once the pool is closed."""
        self._lanes.wake()

    def end(self) -> list[Event]:
        """Ends every lane, and waits a while for that: see :meth:`fluid.backends.base.Backend.end`."""
        self._check_open()
        self._router.hears_all = True
        for lane in self._lanes:
            self._let_go(lane)
        self._lanes.flush()
        self._await_ends(self._clock.now() + self._grace)
        if names := sorted(lane.cleaning_up for lane in self._lanes if lane.cleaning_up):
            _log.warning("waiting up to %g s for the clean-up of %s", _LAST_CLEAN_UP_S, ", ".join(names))
            self._await_ends(self._clock.now() + _LAST_CLEAN_UP_S)
        return self._take()

    def _await_ends(self, deadline: float) -> None:
        while self._lanes and (left := deadline - self._clock.now()) > 0.0:
            self._turn(left)

    def close(self) -> None:
        """Ends every lane; no process is left when it returns. Closing twice is harmless."""
        if self._closed or os.getpid() != self._owner:
            return
        try:
            self.end()
        finally:  # Also when interrupted.
            self._closed = True
            self.places.close()
            try:
                self._launcher.close()
            finally:
                self._lanes.close()

    # -- commands ------------------------------------------------------------------------------------------

    def _check(self, command: Command, started: set[int]) -> None:
        """Refuses what this backend cannot do. A lane that was there and has died is no error: it was reported."""
        if isinstance(command, StartLane):
            for device_id in command.device_ids:
                if device_id not in self._devices:
                    raise FluidError(f"{command}: there is no device {device_id}")
            if self._was_there(command.lane_id):
                raise FluidError(f"{command}: there is, or was, a lane of that number")
            return
        if isinstance(command, OfHosts):
            return
        if not isinstance(command, (*_OfLane, *_Untracked, OfTrial)):
            raise FluidError(f"{command} is no command for a backend")
        lanes = (command.lane_id,) if isinstance(command, _OfLane) else command.lane_ids
        if not isinstance(command, (*_OfLane, *_Untracked)):
            self._router.check(command)
        for lane_id in lanes:
            if not self._was_there(lane_id) and lane_id not in started:
                raise FluidError(f"{command}: lane {lane_id} was never started")

    def _execute(self, command: Command) -> None:
        if isinstance(command, StartLane):
            self._start_lane(command)
        elif isinstance(command, StopLane):
            self._stop_lane(command.lane_id)
        elif isinstance(command, KillLane):
            self._kill_lane(command)
        elif isinstance(command, DumpStacks):
            for lane_id in filter(self._lanes.is_up, command.lane_ids):
                self._launcher.dump_stacks(lane_id, command.trial_id)
        elif isinstance(command, LimitMemory):
            self._lanes.send(command.lane_ids[0], command)
        elif isinstance(command, (LimitRows, Answer)):
            self._lanes.send(command.lane_id, command)
        elif isinstance(command, OfHosts):
            self.places.execute(command)
        elif isinstance(command, OfTrial):
            self._events += self._router.execute(command)

    # -- lanes ---------------------------------------------------------------------------------------------

    def _was_there(self, lane_id: int) -> bool:
        return lane_id < self._next_lane and lane_id not in self._no_lanes

    def _start_lane(self, command: StartLane) -> None:
        self._no_lanes.update(range(self._next_lane, command.lane_id))
        self._no_lanes.discard(command.lane_id)
        self._next_lane = max(self._next_lane, command.lane_id + 1)
        lane = self._lanes.add(command.lane_id)
        try:
            binding = DeviceBinding.joined([self._bind(self._devices[device_id]) for device_id in command.device_ids])
            lane.threads = binding.threads
            self._starts.begin(lane, binding)
        except (FluidError, OSError) as error:
            self._lost(lane, f"could not be started: {error}")

    def _stop_lane(self, lane_id: int) -> None:
        lane = self._lanes.get(lane_id)
        if lane is not None:
            self._let_go(lane)
            self._events += self._router.lane_leaves(lane_id)

    def _kill_lane(self, command: KillLane) -> None:
        lane = self._lanes.get(command.lane_id)
        if lane is not None and not lane.leaving:
            lane.killed_because = command.reason
            self._kill_soon(lane)

    def _kill_soon(self, lane: LaneConnection) -> None:
        """Kills a lane, whose end the launcher will report."""
        if self._starts.cancel(lane):
            self._lost(lane, "was killed before it was started")
            return
        lane.kill_at = min(lane.kill_at or float("inf"), self._clock.now() + _POST_MORTEM_S)
        self._launcher.kill(lane.lane_id)

    def _let_go(self, lane: LaneConnection) -> None:
        if not lane.leaving:
            lane.leaving = True
            if self._starts.cancel(lane):
                self._lost(lane, "")
                return
            self._set_end(lane)
            self._lanes.put(lane, StopLane(lane.lane_id))

    def _set_end(self, lane: LaneConnection) -> None:
        """Gives a lane that was told to end its time, which is longer for a clean-up than for an iteration."""
        lane.kill_at = self._clock.now() + (_LAST_CLEAN_UP_S if lane.cleaning_up else self._grace)

    # -- what happens --------------------------------------------------------------------------------------

    def _turn(self, wait: float | None) -> bool:
        """Waits once and deals with what comes; returns whether :meth:`wake` was called."""
        waited = self._lanes.wait(self._until_next_look(wait))
        if waited.launcher:
            self._poll_launcher()
        for lane in waited.readable:
            self._receive(lane)
        self._act_on_time()
        if self._clock.now() >= self._starts.due_at:
            self._starts.act(self._lost, self._kill_soon)
        if self._clock.now() >= self._look_at:
            self._look_at = self._clock.now() + _LOOK_S
            self._launcher.look()
            self._look_at_lanes()
        self._lanes.flush()
        return waited.woken

    def _look_at_lanes(self) -> None:
        for lane in self._lanes:
            if lane.socket is not None:
                lane.socket.look()
                if lane.socket.problem:
                    self._distrust(lane, lane.socket.problem)

    def _poll_launcher(self) -> None:
        for report in self._launcher.poll():
            if isinstance(report, LaneConnected):
                self._lanes.connect(report)
            elif isinstance(report, CheckpointReport):
                self._events += self.places.hear(report, self._clock.now())
            elif (lane := self._lanes.get(report.lane_id)) is None:
                continue
            elif isinstance(report, LaneDying):
                lane.kill_at = None  # The launcher reports its end without fail.
            elif isinstance(report, LaneSuperseded):
                self._events.append(LaneOutdated(self._clock.now(), report.lane_id))
            else:
                self._drain(lane)
                if report.blameless or not self._starts.again(lane):
                    self._lost(lane, report.reason, blameless=report.blameless, culprit=report.culprit)

    def _receive(self, lane: LaneConnection) -> None:
        sock = lane.socket
        if sock is None or lane.lane_id not in self._lanes:
            return
        messages = sock.receive()
        try:
            for message in messages:
                if getattr(message, "lane_id", lane.lane_id) != lane.lane_id:
                    raise ValueError(f"{message} is of another lane")
                self._take_in(lane, message)
        except Exception as error:  # What trials' code has made the lane send may fit nothing.
            self._distrust(lane, one_line(error))
            return
        if sock.problem:
            self._distrust(lane, sock.problem)
            return
        if sock.ended and lane.socket is not None:
            # The launcher will report soon how it ended.
            self._lanes.disconnect(lane)
            lane.kill_at = min(lane.kill_at or float("inf"), self._clock.now() + _POST_MORTEM_S)

    def _distrust(self, lane: LaneConnection, problem: str) -> None:
        """Kills a lane that has sent what is no message: what else it sends is not believed. The others go on."""
        self._lanes.disconnect(lane)
        lane.killed_because = lane.killed_because or f"sent what cannot be read: {problem}"
        self._kill_soon(lane)

    def _drain(self, lane: LaneConnection) -> None:
        """Reads all that a lane wrote before it died: results it had finished count."""
        while lane.socket is not None and lane.lane_id in self._lanes:
            before = len(self._events)
            self._receive(lane)
            if len(self._events) == before:
                return

    def _take_in(self, lane: LaneConnection, message: Any) -> None:
        if isinstance(message, LaneLogged):
            if self._take_records is not None:
                self._take_records(message)
        elif isinstance(message, CleanUpBegun):
            lane.cleaning_up, lane.cleaning_since = message.trial_id or f"lane {lane.lane_id}", self._clock.now()
            lane.tell_at = lane.cleaning_since + _LONG_CLEAN_UP_S
            if lane.leaving:
                self._set_end(lane)
        elif not self._starts.hear(lane, message):
            if isinstance(message, _ENDS_CLEAN_UP):
                lane.cleaning_up, lane.tell_at = "", None
            self._events += self._router.hear(lane, message)
            self.places.hear_lane(lane, message)

    def _lost(self, lane: LaneConnection, reason: str, *, blameless: bool = False, culprit: str | None = None) -> None:
        self._lanes.remove(lane)
        self._starts.ended(lane, blameless=blameless)
        self._router.lane_is_gone(lane.lane_id)
        self.places.lane_is_gone(lane)
        if not lane.leaving:
            reason = lane.killed_because or reason
            self._events.append(
                LaneLost(
                    self._clock.now(),
                    lane.lane_id,
                    reason,
                    culprit=culprit,
                    blameless=blameless,
                    failed_position=lane.failed_position,
                )
            )
            self._events += self._router.lane_leaves(lane.lane_id)

    def _take(self) -> list[Event]:
        """Hands events out in order of time, which never goes back: an engine relies on it."""
        events, self._events = self._events, []
        events.sort(key=lambda event: event.at)  # Stable, and those of one lane are in order.
        if events:
            events = not_before(events, self._latest)
            self._latest = events[-1].at
        return events

    def _until_next_look(self, wait: float | None) -> float:
        due = [at for lane in self._lanes for at in (lane.kill_at, lane.tell_at) if at is not None]
        at = min([self._look_at, self._starts.due_at, *due])
        left = at - self._clock.now()
        return max(0.0, left if wait is None else min(wait, left))

    def _act_on_time(self) -> None:
        now = self._clock.now()
        for lane in self._lanes:
            if lane.tell_at is not None and now >= lane.tell_at:
                lane.tell_at = None
                self._events.append(CleanUpLasts(now, lane.cleaning_up, lane.lane_id, lane.cleaning_since))
            if lane.kill_at is not None and now >= lane.kill_at:
                self._launcher.kill(lane.lane_id)
                self._lost(lane, "closed its connection")

    def _check_open(self) -> None:
        if self._closed:
            raise FluidError("this backend was closed")

    def abandon(self) -> None:
        """In a process forked from the driver: copies of the connections must not outlive the driver there."""
        if not self._closed:
            self._closed = True
            self._launcher.abandon()
            self._lanes.close()


# -- backend -------------------------------------------------------------------------------------
#
# What the local and the Ray backend have in common, wherever their devices and processes come from.


_Self = TypeVar("_Self", bound="LaneBackend")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _of_pool(
    method: Callable[Concatenate[LanePool, _Arguments], _Result],
) -> Callable[Concatenate[LaneBackend, _Arguments], _Result]:
    """Makes a method of a backend that calls the same one of its pool."""

    @functools.wraps(method)
    def call(self: LaneBackend, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return method(self._pool, *args, **kwargs)

    return call


class LaneBackend(Backend):
    """Implements :class:`fluid.backends.base.Backend` by a pool of lanes. Use it as a context, or close it.

    It is an object of its own because the finalizer holds the pool: one that is not closed is closed when it is
    garbage, or at the end of the interpreter.

    Args:
        pool: the lanes; the backend owns it from now on.
    """

    forwards_output = True

    def __init__(self, pool: LanePool) -> None:
        self._pool = pool
        self._finalizer = weakref.finalize(self, pool.close)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    devices = _of_pool(LanePool.devices)
    add_devices = _of_pool(LanePool.add_devices)
    now = _of_pool(LanePool.now)
    register = _of_pool(LanePool.register)
    forget = _of_pool(LanePool.forget)
    execute = _of_pool(LanePool.execute)
    poll = _of_pool(LanePool.poll)
    end = _of_pool(LanePool.end)
    wake = _of_pool(LanePool.wake)
    forward_output = _of_pool(LanePool.forward_output)
    read_output = _of_pool(LanePool.read_output)
    hear_records = _of_pool(LanePool.hear_records)
    set_bar = _of_pool(LanePool.set_bar)
    discard_kept = _of_pool(LanePool.discard_kept)
    fetch_kept = _of_pool(LanePool.fetch_kept)

    def close(self) -> None:
        """Ends every lane; no process is left when it returns. Closing twice is harmless."""
        self._finalizer()


def require_lane_options(*, grace: float | str, lane_policy: str, process_group: str) -> float:
    """Checks the options of lanes that every such backend has; returns the seconds of grace.

    Raises:
        InvalidFieldError: an argument cannot be used.
        MissingDependencyError: Horovod is asked for and not installed.
    """
    require_one_of("lane_policy", lane_policy, tuple(POLICIES))
    require_process_group(process_group)
    return parse_duration("grace", grace, zero=True)


def modules_to_load(preload: Sequence[str] | None, likely: Sequence[str]) -> list[str]:
    """Returns the modules to load for lanes from the start: those named, or the likely ones the driver has loaded."""
    return [name for name in likely if name in sys.modules] if preload is None else list(preload)
