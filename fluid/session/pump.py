"""The pump: the one thread of a session that owns the engine and the backend.

It gives events of the backend to the engine, and the engine's commands to the backend. Other threads hand it their
calls, which it runs between two events. A call that the engine refuses changes nothing; any other error that follows
a change of the engine ends the session, as the engine and the lanes may then differ.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from fluid._clock import read_clock, wall_seconds
from fluid._logs import logger_of
from fluid.backends.base import Backend
from fluid.engine.commands import Command, NoteDrained, Notice, ReportRequest, StopLane, StopTrial, TrialNotice
from fluid.engine.events import (
    Alarm,
    BudgetExtended,
    DeviceAdded,
    DeviceDraining,
    Event,
    FailRequested,
    GroupSubmitted,
    LaneLost,
    LaneReady,
    RequestAnswered,
    SessionDraining,
    StopRequested,
    Tick,
    TrialFailed,
    TrialReleased,
    TrialsAdded,
    TrialSaved,
    TrialStarted,
)
from fluid.errors import FluidError, InvalidFieldError
from fluid.joint.membership import Entry, Membership, lost_error
from fluid.keeping import NOTHING, Keep
from fluid.policies.engine import EngineState
from fluid.results.run_files import PROFILE, SESSION
from fluid.results.runs import closing_facts
from fluid.session.alerts import Alerts
from fluid.session.ending import Endings, take_last
from fluid.session.folder.folder import RunFolder
from fluid.session.folder.keeper import Keeper
from fluid.session.inbox import GroupInbox
from fluid.session.joint.content import GroupContent
from fluid.session.joint.session import JointSession
from fluid.session.listeners import LimitReachedError, TrialRequest, ended_early
from fluid.session.options import IdleLanes
from fluid.session.scaling.group_deadlines import GroupDeadlines
from fluid.session.scaling.scaling import DeviceScaling, apart, earlier
from fluid.session.status_reader import StatusReader
from fluid.session.waits import SessionFuture, SessionWaits
from fluid.sizing.goals import NO_GOALS, Goals
from fluid.waiting.waits import AwaitedThread

#: The submitter has this long to answer what ended before the engine resizes trials.
SETTLING_S = 0.005
#: Where events keep coming, as with thousands of devices, a tick comes so many seconds after one was first wanted.
LATEST_TICK_S = 0.25
#: Such ticks take at most this share of the time of the session's thread: with thousands of devices one takes tens of
#: milliseconds (benchmarks/cluster.py).
MOST_TICKING = 0.02
#: An idle device is kept free for the median of so many of the latest set-ups, and not longer than this.
LATEST_SETUPS = 5
LONGEST_SETUP_S = 1.0

# -- ticks ---------------------------------------------------------------------------------------
#
# Ticks: when the pump lets the engine rebalance and preempt.


class Ticks:
    """Decides when a tick comes: once no event has come for a while, or at the latest a while after one was wanted.

    Args:
        state: the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        #: Seconds that the latest trials took to be set up.
        self._setups: deque[float] = deque([0.0], maxlen=LATEST_SETUPS)
        #: Since when the engine wants a tick and events come one after another; ``None`` if it wants none.
        self._wanted_at: float | None = None
        #: Before that, a tick comes only where no event does.
        self._pause_until = 0.0

    def heard(self, events: Iterable[Event]) -> None:
        """Learns from events how long set-ups take."""
        self._setups += [event.seconds for event in events if isinstance(event, TrialStarted)]

    def until(self, now: float) -> float | None:
        """Seconds without an event after which a tick is due; ``None`` if none is.

        Ray Tune adds the next trial only after it has seen the last result. So an idle device is kept free for one
        set-up time before a running trial is widened onto it: this is 2-competitive, as in ski rental.
        """
        if not self._state.wants_tick:
            return None
        if not self._state.only_spreads:
            return SETTLING_S
        return max(SETTLING_S, self._state.changed_at + self._kept_free() - now)

    def is_overdue(self, now: float, waited: float) -> bool:
        """Whether a tick is due although events keep coming; has to be asked after each wait for events.

        Args:
            now: seconds.
            waited: how long the latest wait for events took, seconds.
        """
        if not self._state.wants_tick:
            self._wanted_at = None
            return False
        if self._wanted_at is None or waited >= SETTLING_S:
            self._wanted_at = now
        if now < max(self._wanted_at + LATEST_TICK_S, self._pause_until):
            return False
        return not self._state.only_spreads or now >= self._wanted_at + self._kept_free()

    def ticked(self, began: float, ended: float) -> None:
        """Learns how long a tick took: it sets how soon the next one may come although events keep coming."""
        self._wanted_at = None
        self._pause_until = ended + (ended - began) * (1.0 / MOST_TICKING - 1.0)

    def _kept_free(self) -> float:
        """Seconds for which an idle device is kept free."""
        return min(statistics.median_low(self._setups), LONGEST_SETUP_S)


# -- departures ----------------------------------------------------------------------------------
#
# Trials that lanes were told to stop and have not cleaned up yet, and who waits for that.


class Departures:
    """Follows the departures of stopped trials. Used in the session's thread only.

    Args:
        group_of: returns the group of a trial; ``None`` if the trial was forgotten.
        waits: of the session.
    """

    def __init__(self, group_of: Callable[[str], str | None], waits: SessionWaits) -> None:
        self._group_of = group_of
        self._waits = waits
        #: The group of each trial that is about to leave a lane, by lane.
        self._leaving: dict[int, dict[str, str]] = {}
        #: The group and the trial, or any of the group where that is ``None``, for which a future waits.
        self._waiting: list[tuple[str, str | None, SessionFuture]] = []

    def follow(self, events: Iterable[Event], commands: Iterable[Command]) -> None:
        """Takes what happened, and what the engine answered."""
        if self._leaving:
            for event in events:
                if isinstance(event, (TrialReleased, TrialFailed)) or (isinstance(event, TrialSaved) and event.dropped):
                    if event.lane_id is not None:
                        self._has_left(event.lane_id, event.trial_id)
                elif isinstance(event, LaneLost):
                    self._leaving.pop(event.lane_id, None)
        for command in commands:
            if isinstance(command, StopTrial):
                group_id = self._group_of(command.trial_id)
                if group_id is not None:
                    for lane_id in command.lane_ids:
                        self._leaving.setdefault(lane_id, {})[command.trial_id] = group_id
            elif isinstance(command, StopLane):
                self._leaving.pop(command.lane_id, None)
        for group_id, trial_id, answer in list(self._waiting):
            if not self._leaves(group_id, trial_id):
                self._waiting.remove((group_id, trial_id, answer))
                answer.set_result(None)

    def of(self, group_id: str) -> tuple[str, ...]:
        """Ids of a group's stopped trials that lanes have not cleaned up."""
        leaving = {trial for trials in self._leaving.values() for trial, group in trials.items() if group == group_id}
        return tuple(sorted(leaving))

    def wait_for(self, group_id: str, trial_id: str | None = None) -> SessionFuture:
        """Returns what is set when all stopped trials of a group, or one of them, have left their lanes."""
        answer = SessionFuture(self._waits)
        if self._leaves(group_id, trial_id):
            self._waiting.append((group_id, trial_id, answer))
        else:
            answer.set_result(None)
        return answer

    def give_up(self) -> None:
        """Ends all waiting, as the session ends."""
        for *_, answer in self._waiting:
            answer.set_result(None)
        self._waiting.clear()

    def _leaves(self, group_id: str, trial_id: str | None) -> bool:
        leaving = self.of(group_id)
        return bool(leaving) if trial_id is None else trial_id in leaving

    def _has_left(self, lane_id: int, trial_id: str) -> None:
        leaving = self._leaving.get(lane_id, {})
        leaving.pop(trial_id, None)
        if not leaving:
            self._leaving.pop(lane_id, None)


# -- drain waits ---------------------------------------------------------------------------------
#
# Those who wait for the end of a drain.


class DrainWaits:
    """Begins drains, and tells those who wait when they have ended. For the session's thread.

    Args:
        handle: gives the engine an event.
        now: tells the time.
        waits: of the session.
    """

    def __init__(self, handle: Callable[[Event], None], now: Callable[[], float], waits: SessionWaits) -> None:
        self._handle = handle
        self._waits = waits
        self._now = now
        #: By device; the session's where that is ``None``.
        self._waiting: dict[int | None, list[SessionFuture]] = {}

    def begin(self, device_id: int | None, deadline_s: float) -> SessionFuture:
        """Begins to drain a device, or the session where that is ``None``.

        Args:
            device_id: the device.
            deadline_s: seconds until its end at the latest.

        Returns:
            Gets the ids of the trials that were not saved.

        Raises:
            InvalidFieldError: the device is not in use.
        """
        answer = SessionFuture(self._waits)
        waiting = self._waiting.setdefault(device_id, [])
        waiting.append(answer)
        now = self._now()
        try:
            if device_id is None:
                self._handle(SessionDraining(now, now + deadline_s))
            else:
                self._handle(DeviceDraining(now, device_id, now + deadline_s))
        except BaseException:
            waiting.remove(answer)
            raise
        return answer

    def ended(self, commands: Iterable[Command]) -> list[Callable[[], None]]:
        """Returns what answers those whose drain has ended."""
        return [partial(self._answer, command) for command in commands if isinstance(command, NoteDrained)]

    def _answer(self, drained: NoteDrained) -> None:
        for answer in self._waiting.pop(drained.device_id, ()):
            answer.set_result(drained.unsaved)

    def give_up(self, error: BaseException) -> None:
        """Tells all that the session has ended before."""
        waiting, self._waiting = self._waiting, {}
        for answers in waiting.values():
            for one in answers:
                one.set_exception(error)


# -- handed calls --------------------------------------------------------------------------------
#
# Calls that other threads hand to the session's thread, which makes them between two events.


T = TypeVar("T")


class _HandedCall(SessionFuture):
    """A call: either the session's thread takes it, and makes it wholly, or an interrupted caller takes it back."""

    def __init__(self, waits: SessionWaits, work: Callable[[], Any]) -> None:
        super().__init__(waits)
        self.work = work
        self._taken = threading.Lock()

    def take(self) -> bool:
        """Takes the call; returns whether the caller or the session's thread had not taken it before."""
        return self._taken.acquire(blocking=False)


class HandedCalls:
    """The calls of one session.

    Args:
        waits: of the session.
        wake: has the session's thread look for calls.
    """

    def __init__(self, waits: SessionWaits, wake: Callable[[], None]) -> None:
        self._waits = waits
        self._wake = wake
        self._handed: queue.SimpleQueue[_HandedCall] = queue.SimpleQueue()

    def make(self, work: Callable[[], T]) -> T:
        """Has a call made, and returns or raises what it does. An interrupt ends the wait.

        The call was then made, or is being made, or never will be.
        """
        request = _HandedCall(self._waits, work)
        try:
            self._handed.put(request)
            self._wake()
            made: T = request.result()
            return made
        except BaseException:
            request.take()
            raise

    def post(self, work: Callable[[], None]) -> None:
        """Has a call made, without waiting for it."""
        self._handed.put(_HandedCall(self._waits, work))
        self._wake()

    # -- in the session's thread ---------------------------------------------------------------------------

    def answer(self, is_over: Callable[[], bool]) -> bool:
        """Makes the calls that there are, until the session is over; returns whether there was any."""
        answered = False
        for request in self._waiting():
            if not request.take():
                continue
            answered = True
            try:
                result = request.work()
            except BaseException as error:
                request.set_exception(error)
            else:
                request.set_result(result)
            if is_over():
                break
        return answered

    def refuse(self, error: Callable[[], FluidError]) -> None:
        """Refuses the calls that there are, each with an error of its own."""
        for request in self._waiting():
            request.take()
            request.set_exception(error())

    def _waiting(self) -> Iterator[_HandedCall]:
        with suppress(queue.Empty):
            while True:
                yield self._handed.get_nowait()


# -- pump ----------------------------------------------------------------------------------------


#: Seconds between two looks at the run folder.
_LOOK_S = 2.0
_log = logger_of(__name__)


class Pump:
    """Runs a session's engine over its backend, in a thread of its own, until it is closed.

    Args:
        state: the engine.
        backend: what carries its commands out; closed with the pump.
        folder: what happens is written there; closed with the pump.
        facts: what ``session.json`` says of the session.
        keep: which checkpoints outlive the session.
        goals: when all is to have ended, and what that may cost.
        membership: in the shared folder whose sweeps the session works with others; ``None`` for a session by itself.
        quiet: whether only what goes wrong is told in warnings; what the session comes to is then information.

    Attributes:
        inboxes: the groups of the session, by id. Written by the pump's thread only.
        joint: what the session does in a shared folder; ``None`` for a session by itself.
        keeper: follows which checkpoints outlive the session.
        began: when the session began, seconds on the clock of the events.
        scaling: decides how many devices the session holds.
        deadlines: follows those of its groups.
        hold: of the session's clock.
        waits: who waits for the session.
        endings: why it runs no further trials.
        drains, departures: those who wait for drains, and for trials to be cleaned up.
    """

    def __init__(
        self,
        state: EngineState,
        backend: Backend,
        folder: RunFolder,
        facts: Mapping[str, Any],
        keep: Keep = NOTHING,
        goals: Goals = NO_GOALS,
        membership: Membership | None = None,
        quiet: bool = False,
    ) -> None:
        self.quiet = quiet
        self._news = logging.INFO if quiet else logging.WARNING
        self.inboxes: dict[str, GroupInbox] = {}
        self._state = state
        self._backend = backend
        self._folder = folder
        #: What ``session.json`` is to say, and what it says.
        self._facts = {**facts, **backend.facts}
        self._written: dict[str, Any] = {}
        #: Calls of inboxes that are still to be made, in order.
        self._notifications: deque[Callable[[], None]] = deque()
        self._notifying = False
        self._ticks = Ticks(state)
        self.hold = backend.hold
        self.hold.take()  # A deadline must not pass before the first trials are submitted.
        self.waits = SessionWaits(self.hold, self._closed_error, lambda: self.endings.over)
        self._idle_lanes = IdleLanes(state.lanes, backend, state.planner.c)
        self._calls = HandedCalls(self.waits, backend.wake)
        self.endings = Endings(state, folder.path, rehearsed=self.hold.is_virtual)
        self.drains = DrainWaits(self.handle, backend.now, self.waits)
        self.departures = Departures(self._group_of, self.waits)
        self._alerts = Alerts(state, folder.path, self.inboxes, resumable=not self.hold.is_virtual, news=self._news)
        self.keeper = Keeper(keep, state, backend, folder.path, handle=self.handle, post=self._post)
        self.began = backend.now()
        clock = read_clock()._replace(at=self.began)
        self._facts["clock"] = folder.begin(clock._replace(name="") if backend.is_virtual else clock)
        if goals.deadline_s is not None:
            self._facts["deadline_at"] = wall_seconds() + goals.deadline_s
        self.scaling = DeviceScaling(state, backend, self.handle, goals, self.began, self._finish_early)
        self.deadlines = GroupDeadlines(
            *(state, self.inboxes, backend.now, goals.odds), stop=self._stop_late, note=self._deliver
        )
        self.scaling.sizing.due_of = self.deadlines.due_of
        #: Why the session ends by itself, once its deadline has come or its budget is spent.
        self._limit: LimitReachedError | None = None
        #: When to look at the run folder again; ``None`` for never.
        self._look_at: float | None = None if backend.is_virtual else self.began
        self._closing = False
        self._broken: BaseException | None = None
        self.joint: JointSession | None = None
        if membership is not None:
            membership.hear(self._heard, self._lost_folder)
            self.joint = JointSession(
                *(state, membership, backend.now, self.handle),
                extend=lambda event: self.extend(self._inbox_of(event.trial_id), event),
                stop=lambda event: self._inbox_of(event.trial_id).stop(event.trial_id, event.outcome),
                deliver=self._deliver,
                post=self._post,
                name_of=lambda group_id: self.inboxes[group_id].group.name,
                left=self._left,
            )
            self._alerts.others = self.joint.others
        #: What the log tells as the session ends.
        self._last_entries: list[Entry] = []
        self._thread = AwaitedThread("fluid-pump", self._run)
        self._thread.start()

    # -- from any thread -----------------------------------------------------------------------------------

    def call(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in the pump's thread, between two events; returns or raises what it does.

        Raises:
            FluidError: the session has ended.
        """
        if self._closing or self._broken is not None:
            raise self._closed_error()
        return work() if self.is_in_thread else self._calls.make(work)

    def act(self, work: Callable[[], T]) -> T:
        """The same for a thread that submits: a virtual clock stands still until it waits for the session again."""
        if not self.is_in_thread:
            self.hold.take()
        return self.call(work)

    def work(self, work: Callable[[], T]) -> T:
        """The same for what lets trials run; it is refused where none will."""

        def done() -> T:
            self.endings.require_open()
            return work()

        return self.act(done)

    def _group_of(self, trial_id: str) -> str | None:
        trial = self._state.trials.get(trial_id)
        return None if trial is None else trial.group_id

    @property
    def names_files(self) -> bool:
        """Whether a warning has told where the log of a trial is."""
        return self._alerts.names_files

    @property
    def has_ended(self) -> bool:
        """Whether the pump was closed, or an error has ended it."""
        return self._closing or self._broken is not None

    def require_open(self) -> None:
        """Refuses what needs trials to run, where none will any more.

        Raises:
            FluidError: why.
        """
        if self.has_ended:
            raise self._closed_error()
        self.endings.require_open()

    @property
    def over(self) -> FluidError | None:
        """Why no trial will run any more; ``None`` while trials may."""
        return self._closed_error() if self.has_ended else self.endings.over

    @property
    def is_in_thread(self) -> bool:
        """Whether the pump's thread asks."""
        return self.waits.is_in_thread

    def close(self) -> None:
        """Ends the thread, and with it the backend; waits until both are gone.

        It does not wait in the thread itself, nor in that of a session for which this one waits.

        Raises:
            FluidError: the thread has not ended in time; the error says where it is.
        """
        self._closing = True
        self.hold.let_go()
        self._backend.wake()
        self.waits.await_end()

    def _closed_error(self) -> FluidError:
        cause = self._broken or self._limit
        error = FluidError("the executor is closed") if cause is None else ended_early(cause, "the executor is closed")
        error.__cause__ = self._broken
        return error

    # -- in the pump's thread ------------------------------------------------------------------------------

    def handle(self, *events: Event, accepted: Callable[[], None] | None = None) -> None:
        """Gives the engine events, and carries out what it decides.

        Args:
            events: what happened, at one instant.
            accepted: called when the engine has accepted the events, before its commands are executed.

        Raises:
            InvalidFieldError: the engine refused an event; nothing has changed.
            BaseException: anything else that goes wrong. It ends the session, as the engine, the files and the lanes
                may no longer agree.
        """
        if self._broken is not None:
            raise self._closed_error()
        try:
            commands = self._state.handle(*events)
        except InvalidFieldError:
            raise
        except BaseException as error:
            self._broken = error
            raise
        commands = self._withhold(commands)
        with self._ending_on_error():
            if accepted is not None:
                accepted()
            self._folder.journal(events, commands)
            self._backend.execute([command for command in commands if not isinstance(command, Notice)])
        self._tell(events, commands)

    def handle_new(
        self,
        event: GroupSubmitted | TrialsAdded,
        accepted: Callable[[], None],
        name: str,
        content: GroupContent,
    ) -> None:
        """Gives the engine new trials of a group of that name; in a shared folder they are held until its log says."""
        if self.joint is None:
            self.handle(event, accepted=accepted)
            return
        self.handle(event, *self.joint.holding(event.trials), accepted=accepted)
        self.joint.submitted(name, content)

    def stop(self, inbox: GroupInbox, event: StopRequested | FailRequested, accepted: Callable[[], None]) -> None:
        """Stops a trial of a group; in a shared folder, one of another driver ends when that says so."""
        if self.joint is None or self.joint.stops(event, inbox.group.name):
            self.handle(event, accepted=accepted)
        else:
            accepted()

    def _stop_late(self, inbox: GroupInbox, trial_id: str) -> None:
        """Stops a trial that cannot end by its group's deadline."""
        self.stop(inbox, StopRequested(self._backend.now(), trial_id), partial(inbox.stop, trial_id, None))

    def extend(self, inbox: GroupInbox, event: BudgetExtended) -> None:
        """Gives a trial of a group further iterations, and has waiters wait for it again."""

        def accepted() -> None:
            follow_up = event.follow_up_iterations
            inbox.change(partial(inbox.group.extend, follow_up_iterations=follow_up), event.trial_id, event.iterations)
            if not self._state.trials[event.trial_id].state.ended:
                self.notify(partial(inbox.reopen, event.trial_id))

        self.handle(event, accepted=accepted)

    def _inbox_of(self, trial_id: str) -> GroupInbox:
        return self.inboxes[self._state.trials[trial_id].group_id]

    def _deliver(self, *notices: Notice, events: Sequence[Event] = (), others: bool = False) -> None:
        """Writes and tells what the log of a shared folder tells.

        Args:
            notices: what is told of trials, or of devices.
            events: what had happened, for the journal.
            others: whether it happened to other drivers.
        """
        with self._ending_on_error():
            self._folder.journal(events, notices, others=others)
        self._tell((), [notice for notice in notices if isinstance(notice, TrialNotice)])

    def _left(self, name: str, trial_id: str) -> None:
        for inbox in self.inboxes.values():
            if inbox.group.name == name:
                self.notify(partial(inbox.take_left, trial_id))

    def _heard(self, entries: list[Entry]) -> None:
        """Takes entries of the log of a shared folder; called in the membership's thread."""
        if self.has_ended:
            self._last_entries += entries
        else:
            self._post(partial(self._apply, entries))

    def _apply(self, entries: list[Entry]) -> None:
        assert self.joint is not None
        with self._ending_on_error():
            self.joint.apply(entries)

    def _lost_folder(self, error: BaseException) -> None:
        """Ends the session, as the shared folder cannot be used any more; called in the membership's thread."""

        def end() -> None:
            self._broken = self._broken or lost_error(error)

        self._post(end)

    def _tell(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        with self._ending_on_error():
            self.scaling.heard(events, commands)
            self.deadlines.heard(events, commands)
        self.departures.follow(events, commands)
        self.keeper.follow(events, commands)
        self._alerts.look(commands)
        if self.endings.look(commands):
            for inbox in self.inboxes.values():
                inbox.wake()
        notices = [self._notification(notice) for notice in commands if isinstance(notice, TrialNotice)]
        self.notify(*notices, *self.drains.ended(commands))  # Who waits for a drain has heard all before it.

    def _notification(self, notice: TrialNotice) -> Callable[[], None]:
        inbox = self.inboxes[notice.group_id]
        if not isinstance(notice, ReportRequest):
            return partial(inbox.take, notice)
        request = TrialRequest(notice.trial_id, notice.payload, partial(self._answer, notice))
        return partial(inbox.take_request, request)

    def _answer(self, asked: ReportRequest, payload: bytes, failed: bool) -> None:
        """Hands the submitter's answer to the engine, from any thread; without effect once the session has ended."""

        def answer() -> None:
            at, trial, lane, number = self._backend.now(), asked.trial_id, asked.lane_id, asked.request_id
            self.handle(RequestAnswered(at, trial, lane, request_id=number, payload=payload, failed=failed))

        if self._closing or self._broken is not None:
            return
        if self.is_in_thread:
            answer()
        else:
            self._post(answer)

    def _post(self, call: Callable[[], None]) -> None:
        """Has a call made in the pump's thread, from any thread; it is not waited for."""
        self._calls.post(call)

    def notify(self, *notifications: Callable[[], None]) -> None:
        """Makes calls of inboxes, in order; those that a listener causes while it is called come after it."""
        self._notifications += notifications
        if self._notifying:
            return
        self._notifying = True
        try:
            with self._ending_on_error():
                while self._notifications:
                    self._notifications.popleft()()
        finally:
            self._notifying = False

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Ends the session on any error, also where the caller catches it."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise

    def _run(self) -> None:
        self.waits.begin()
        try:
            self._work()
        finally:
            self.waits.end()

    def _work(self) -> None:
        try:
            devices = self._backend.devices()
            self._facts["devices"] = [asdict(device) for device in devices]
            self._write_facts()
            self.scaling.begin(devices)
            for device in devices:
                self.handle(DeviceAdded(self._backend.now(), device))
            if self.joint is not None:
                self.joint.membership.start({device.index: device.kind for device in devices})
            while not self._closing and self._broken is None:
                self._turn()
            if self._broken is None:
                self.keeper.await_pending(self._turn_for)
                self._calls.answer(lambda: self._broken is not None)  # Of the thread that brings checkpoints here.
                last = take_last(self._backend, self._state, self._withhold, self._folder, self.keeper)
                self.notify(*map(self._notification, last))
                if self.joint is not None:
                    self.joint.leave()
                    self.joint.membership.close()
                    self._calls.answer(lambda: self._broken is not None)
                    self._apply(self._last_entries)
                self.keeper.finish()
                self._calls.answer(lambda: self._broken is not None)  # Of the thread that brings checkpoints here.
        except BaseException as error:
            self._broken = error
        if self._broken is not None:
            # A full disk and the like need no traceback; calls raise the error with it.
            told = None if isinstance(self._broken, (OSError, FluidError)) else self._broken
            _log.error("the session has ended early: %s: %s", type(self._broken).__name__, self._broken, exc_info=told)
        try:
            self._end(self._broken or self._limit or FluidError("the executor was closed"))
        except (
            OSError
        ) as error:  # Of the environment, such as a full disk: where in Fluid it came up does not help the user.
            _log.warning("the session could not be closed in order: %s", error)
        except BaseException:
            _log.exception("the session could not be closed in order")
        self.hold.end()

    def _withhold(self, commands: list[Command]) -> list[Command]:
        return commands if self.joint is None else self.joint.withhold(commands)

    def _turn_for(self, seconds: float) -> None:
        """A round, as the session ends: what the backend reports within so many seconds, then the calls."""
        self._handle_all(self._backend.poll(seconds))
        self._calls.answer(lambda: self._broken is not None)

    def _end(self, reason: BaseException) -> None:
        """Ends everything, each part also where another one fails: the last callback first."""
        with contextlib.ExitStack() as rest:
            rest.callback(self._folder.close)
            rest.callback(
                _write_last,
                {
                    SESSION: self._write_closing_facts,
                    PROFILE: lambda: self._folder.write_profile(self._state.profile),
                },
            )
            rest.callback(self._backend.close)
            if self.joint is not None:
                rest.callback(self.joint.membership.close)
            for inbox in reversed(self.inboxes.values()):
                rest.callback(inbox.break_off, reason)
            rest.callback(self._refuse_calls)
            rest.callback(self._alerts.at_close)

    def _finish_early(self, reason: str, seconds: float) -> None:
        """Saves all trials within so many seconds, and ends the session; one whose trials have all ended stays."""
        self.endings.reason = reason

        def saved(answer: Future[tuple[str, ...]]) -> None:
            drained = self.endings.drained
            if answer.exception() is None and drained is not None and drained.unfinished:
                self._limit, self._closing = drained, True
                _log.log(self._news, "%s", drained)

        self.drains.begin(None, seconds).add_done_callback(saved)

    def _write_facts(self, **last: Any) -> None:
        how = self._backend.sharing
        facts = {**self._facts, "sharing": how.way, "sharing_why": how.why, **self.scaling.sizing.facts, **last}
        if facts != self._written:
            self._folder.write_session(**facts)
            self._written = facts

    def _write_closing_facts(self) -> None:
        standings = StatusReader(self._state, self.inboxes).closing()
        self._write_facts(closed=self._backend.now() + self._folder.shift, **closing_facts(standings))

    def _turn(self) -> None:
        """One round: the user's calls, then what the backend reports, then a tick or an alarm if one is due."""
        answered = self._calls.answer(lambda: self._broken is not None)
        if self._broken is not None:
            return
        begun = self._backend.now()
        self._look_at_folder(begun)
        scale_at = earlier(self.scaling.act(begun), self.deadlines.act(begun))
        if self._closing:  # The session ends, and the backend may have nothing more to report.
            return
        until, wake_at = self._ticks.until(begun), earlier(earlier(self._state.alarm_at, scale_at), self._look_at)
        events = self._backend.poll(earlier(until, None if wake_at is None else max(0.0, wake_at - begun)))
        waited = self._backend.now() - begun
        if events:
            self._ticks.heard(events)
            self._handle_all(events)
            if any(isinstance(event, LaneReady) for event in events) or self.scaling.sizing.owes_facts(begun):
                self._write_facts()  # The backend may have given MPS up before it started the lane.
                self._idle_lanes.look(begun)
        quiet = not events and (not answered or self.hold.is_virtual)  # There, the caller waits by now.
        settled = quiet and until is not None and self._backend.now() >= begun + until
        if self._broken is None and (self._ticks.is_overdue(self._backend.now(), waited) or settled):
            self._tick()
        if self.joint is not None and self._broken is None:
            self.joint.claims.look()
        # Only if it was due before poll() began: what lanes had reported by then is known now. It may have removed the
        # deadline. A wait that a suspension of the driver interrupts may end without it.
        alarm_at = self._state.alarm_at
        if self._broken is None and alarm_at is not None and begun >= alarm_at:
            self.handle(Alarm(self._backend.now()))

    def _look_at_folder(self, now: float) -> None:
        """Ends the session if its run folder was deleted or moved; a virtual clock's session does not look."""
        if self._look_at is not None and now >= self._look_at:
            self._look_at = now + _LOOK_S
            try:
                self._folder.look()
            except FluidError:
                self._alerts.resumable = False  # The error says where, if it can be resumed.
                raise

    def _handle_all(self, events: list[Event]) -> None:
        for together in apart(events):
            # The user may have removed a device of a node that drains.
            used = self._state.occupancy.residents
            self.handle(*(one for one in together if not isinstance(one, DeviceDraining) or one.device_id in used))

    def _tick(self) -> None:
        began = self._backend.now()
        self.handle(Tick(began))
        self._ticks.ticked(began, self._backend.now())

    def _refuse_calls(self) -> None:
        self._calls.refuse(self._closed_error)
        self.departures.give_up()
        self.drains.give_up(self._closed_error())


def _write_last(files: Mapping[str, Callable[[], None]]) -> None:
    """Writes files as the session ends. What trials did is not in them: where the disk is full, one line says so."""
    failed: dict[str, OSError] = {}
    for name, write in files.items():
        try:
            write()
        except OSError as error:
            failed[name] = error
    if failed:
        names, were = " and ".join(failed), "were" if len(failed) > 1 else "was"
        text = "%s %s not written as the session ended (%s); the session can be resumed without"
        _log.warning(text, names, were, next(iter(failed.values())))
