"""The pump: the one thread of a session that owns the engine and the backend.

It gives events of the backend to the engine, and the engine's commands to the backend. Other threads hand it their
calls, which it runs between two events. A call that the engine refuses changes nothing; any other error that follows
a change of the engine ends the session, as the engine and the lanes may then differ.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from fluid._clock import timestamp, wall_seconds
from fluid._clock_hold import NO_HOLD
from fluid.backends.base import Backend
from fluid.backends.virtual import ReplayingBackend, VirtualBackend
from fluid.engine.commands import Notice, TrialNotice
from fluid.engine.events import Alarm, DeviceAdded, DeviceDraining, Event, LaneReady, Tick
from fluid.engine.requests import ReportRequest, RequestAnswered
from fluid.engine.state import EngineState
from fluid.errors import FluidError, InvalidFieldError
from fluid.keeping import NOTHING, Retention
from fluid.session.alerts import Alerts
from fluid.session.batches import apart, earlier
from fluid.session.departures import Departures
from fluid.session.device_scaling import DeviceScaling
from fluid.session.drain_waits import DrainWaits
from fluid.session.ending import WORK, limit_reached, take_last
from fluid.session.inbox import GroupInbox
from fluid.session.keeper import Keeper
from fluid.session.limit_reached import LimitReachedError, ended_early
from fluid.session.results import TrialRequest
from fluid.session.run_folder import RunFolder
from fluid.session.ticks import Ticks
from fluid.sizing.goals import NO_GOALS, Goals

T = TypeVar("T")
_log = logging.getLogger(__name__)

#: Seconds between two checks, by a thread that waits for an answer, that the pump still runs.
_PUMP_CHECK = 1.0


class Pump:
    """Runs a session's engine over its backend, in a thread of its own, until it is closed.

    Args:
        state: the engine.
        backend: what carries its commands out; closed with the pump.
        folder: what happens is written there; closed with the pump.
        facts: what ``session.json`` says of the session.
        keep: which checkpoints outlive the session.
        goals: when all is to have ended, and what that may cost.

    Attributes:
        inboxes: the groups of the session, by id. Written by the pump's thread only.
        keeper: follows which checkpoints outlive the session.
        began: when the session began, seconds on the clock of the events.
        scaling: decides how many devices the session holds.
        hold: of the session's clock.
    """

    def __init__(
        self,
        state: EngineState,
        backend: Backend,
        folder: RunFolder,
        facts: Mapping[str, Any],
        keep: Retention = NOTHING,
        goals: Goals = NO_GOALS,
    ) -> None:
        self.inboxes: dict[str, GroupInbox] = {}
        self._state, self._backend, self._folder = state, backend, folder
        #: What ``session.json`` is to say, and what it says.
        self._facts = {**facts, **(backend.facts if isinstance(backend, ReplayingBackend) else {})}
        self._written: dict[str, Any] = {}
        #: Calls of inboxes that are still to be made, in order.
        self._notifications: deque[Callable[[], None]] = deque()
        self._notifying = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._ticks = Ticks(state)
        self.hold = backend.hold if isinstance(backend, VirtualBackend) else NO_HOLD
        self.hold.take()  # A deadline must not pass before the first trials are submitted.
        self._drains = DrainWaits(self.handle, backend.now, self.hold)
        self._departures = Departures(self._group_of, self.hold)
        self._alerts = Alerts(state, folder.path, self.inboxes, resumable=not self.hold.is_virtual)
        self.keeper = Keeper(keep, state, backend, folder.path, handle=self.handle, post=self._post)
        self.began = backend.now()
        self._facts["clock"] = {"at": self.began, "time": timestamp()}
        if goals.deadline_s is not None:
            self._facts["deadline_at"] = wall_seconds() + goals.deadline_s
        self.scaling = DeviceScaling(state, backend, self.handle, goals, self.began, self._finish_early)
        #: Why the session ends by itself, once its deadline has come or its budget is spent.
        self._limit: LimitReachedError | None = None
        self._closing = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fluid-pump", daemon=True)
        self._thread.start()

    # -- from any thread -----------------------------------------------------------------------------------

    def call(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in the pump's thread, between two events; returns or raises what it does.

        Raises:
            FluidError: the session has ended.
        """
        if self._closing or self._broken is not None:
            raise self._closed_error() from self._broken
        if self.is_in_thread:
            return work()
        answer: Future[T] = Future()
        self._calls.put((work, answer))
        self._backend.wake()
        return self._await(answer)

    def act(self, work: Callable[[], T]) -> T:
        """The same for a thread that submits: a virtual clock stands still until it waits for the session again."""
        if not self.is_in_thread:
            self.hold.take()
        return self.call(work)

    def drain(self, device_id: int | None, deadline_s: float) -> tuple[str, ...]:
        """Drains a device, or the session where that is ``None``; waits until that has ended.

        Returns:
            Ids of the trials that were not saved.

        Raises:
            InvalidFieldError: the device is not in use.
            FluidError: the session has ended, or this is the pump's thread.
        """
        if self.is_in_thread:
            raise FluidError("a listener cannot wait for a drain: drain in another thread")
        answer: Future[tuple[str, ...]] = self.act(lambda: self._drains.begin(device_id, deadline_s))
        unsaved: tuple[str, ...] = self._await(answer)
        return unsaved

    def await_departures(self, group_id: str, timeout_s: float) -> tuple[str, ...]:
        """Waits until the stopped trials of a group have left their lanes, and so were cleaned up.

        Returns:
            Ids of those that have not after ``timeout_s`` seconds.

        Raises:
            FluidError: the session has ended, or this is the pump's thread.
        """
        if self.is_in_thread:
            raise FluidError("a listener cannot wait for trials to be cleaned up: wait in another thread")
        self.hold.await_done(self.call(lambda: self._departures.wait_for(group_id)), timeout_s)
        left: tuple[str, ...] = self.call(lambda: self._departures.of(group_id))
        return left

    def _group_of(self, trial_id: str) -> str | None:
        trial = self._state.trials.get(trial_id)
        return None if trial is None else trial.group_id

    def _await(self, answer: Future[T]) -> T:
        while not answer.done():
            self.hold.await_done(answer, _PUMP_CHECK, looks=True)
            if not self._thread.is_alive() and not answer.done():
                raise self._closed_error() from self._broken
        return answer.result()

    @property
    def has_ended(self) -> bool:
        """Whether the pump was closed, or an error has ended it."""
        return self._closing or self._broken is not None

    @property
    def is_in_thread(self) -> bool:
        """Whether the pump's thread asks."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Ends the thread, and with it the backend; waits until both are gone, unless the thread itself calls it."""
        self._closing = True
        self.hold.let_go()
        self._backend.wake()
        if not self.is_in_thread:
            self._thread.join()

    def _closed_error(self) -> FluidError:
        error = self._broken or self._limit
        return FluidError("the executor is closed") if error is None else ended_early(error, "the executor is closed")

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
        if self._broken is not None or (self._limit is not None and any(isinstance(one, WORK) for one in events)):
            raise self._closed_error() from self._broken
        try:
            commands = self._state.handle(*events)
        except InvalidFieldError:
            raise
        except BaseException as error:
            self._broken = error
            raise
        with self._ending_on_error():
            if accepted is not None:
                accepted()
            self._folder.journal(events, commands)
            self._backend.execute([command for command in commands if not isinstance(command, Notice)])
        with self._ending_on_error():
            self.scaling.heard(events, commands)
        self._departures.follow(events, commands)
        self.keeper.follow(events, commands)
        self._alerts.look(commands)
        notices = [self._notification(notice) for notice in commands if isinstance(notice, TrialNotice)]
        self.notify(*notices, *self._drains.ended(commands))  # Who waits for a drain has heard all before it.

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
        self._calls.put((call, Future()))
        self._backend.wake()

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
        try:
            devices = self._backend.devices()
            self._facts["devices"] = [asdict(device) for device in devices]
            self._write_facts()
            self.scaling.begin(devices)
            for device in devices:
                self.handle(DeviceAdded(self._backend.now(), device))
            while not self._closing and self._broken is None:
                self._turn()
            if self._broken is None:
                self.keeper.await_pending(lambda seconds: self._handle_all(self._backend.poll(seconds)))
                self.notify(*map(self._notification, take_last(self._backend, self._state, self._folder, self.keeper)))
                self.keeper.finish()
                self._answer_calls()  # Of the thread that brings checkpoints here.
        except BaseException as error:
            self._broken = error
        if self._broken is not None:
            _log.error("the session has ended early: %r", self._broken, exc_info=self._broken)
        try:
            self._end(self._broken or self._limit or FluidError("the executor was closed"))
        except BaseException:
            _log.exception("the session could not be closed in order")
        self.hold.end()

    def _end(self, reason: BaseException) -> None:
        """Ends everything, each part also where another one fails: the last callback first."""
        with contextlib.ExitStack() as rest:
            rest.callback(self._folder.close)
            rest.callback(lambda: self._folder.write_profile(self._state.profile))
            rest.callback(lambda: self._write_facts(closed=self._backend.now()))
            rest.callback(self._backend.close)
            for inbox in reversed(self.inboxes.values()):
                rest.callback(inbox.break_off, reason)
            rest.callback(self._refuse_calls)
            rest.callback(self._alerts.at_close)

    def _finish_early(self, reason: str, seconds: float) -> None:
        """Saves all trials within so many seconds, and ends the session; one whose trials have all ended stays."""

        def saved(answer: Future[tuple[str, ...]]) -> None:
            if answer.exception() is None:
                self._limit = limit_reached(reason, self._state, self._folder, answer.result(), self.hold)
                if self._limit.unfinished:
                    _log.warning("%s", self._limit)
                    self._closing = True

        self._drains.begin(None, seconds).add_done_callback(saved)

    def _write_facts(self, **last: Any) -> None:
        how = self._backend.sharing
        facts = {**self._facts, "sharing": how.way, "sharing_why": how.why, **self.scaling.sizing.facts, **last}
        if facts != self._written:
            self._folder.write_session(**facts)
            self._written = facts

    def _turn(self) -> None:
        """One round: the user's calls, then what the backend reports, then a tick or an alarm if one is due."""
        answered = self._answer_calls()
        if self._broken is not None:
            return
        begun = self._backend.now()
        scale_at = self.scaling.act(begun)
        until, wake_at = self._ticks.until(begun), earlier(self._state.alarm_at, scale_at)
        events = self._backend.poll(earlier(until, None if wake_at is None else max(0.0, wake_at - begun)))
        waited = self._backend.now() - begun
        if events:
            self._ticks.heard(events)
            self._handle_all(events)
            if any(isinstance(event, LaneReady) for event in events) or self.scaling.sizing.owes_facts(begun):
                self._write_facts()  # The backend may have given MPS up before it started the lane.
        quiet = not events and (not answered or self.hold.is_virtual)  # There, the caller waits by now.
        settled = quiet and until is not None and self._backend.now() >= begun + until
        if self._broken is None and (self._ticks.is_overdue(self._backend.now(), waited) or settled):
            self._tick()
        # Only if it was due before poll() began: what lanes had reported by then is known now. It may have removed the
        # deadline. A wait that a suspension of the driver interrupts may end without it.
        alarm_at = self._state.alarm_at
        if self._broken is None and alarm_at is not None and begun >= alarm_at:
            self.handle(Alarm(self._backend.now()))

    def _handle_all(self, events: list[Event]) -> None:
        for together in apart(events):
            # The user may have removed a device of a node that drains.
            used = self._state.occupancy.residents
            self.handle(*(one for one in together if not isinstance(one, DeviceDraining) or one.device_id in used))

    def _tick(self) -> None:
        began = self._backend.now()
        self.handle(Tick(began))
        self._ticks.ticked(began, self._backend.now())

    def _answer_calls(self) -> bool:
        answered = False
        for work, answer in self._waiting_calls():
            answered = True
            try:
                result = work()
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)
            if self._broken is not None:
                break
        return answered

    def _waiting_calls(self) -> Iterator[tuple[Callable[[], Any], Future[Any]]]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._calls.get_nowait()

    def _refuse_calls(self) -> None:
        for _, answer in self._waiting_calls():
            answer.set_exception(self._closed_error())
        self._departures.give_up()
        self._drains.give_up(self._closed_error())
