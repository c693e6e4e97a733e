"""What the engine has reported of one TrialGroup. The session's thread writes it, the group's handle reads it."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from fluid._clock_hold import NO_HOLD, ClockHold
from fluid.engine.commands import Report, ReportCall, ReportEnd, ReportStart, TrialNotice
from fluid.engine.events import Failure
from fluid.engine.savability import ReportUnsavable
from fluid.engine.set_back import ReportSetBack
from fluid.errors import FluidError, InvalidFieldError
from fluid.results.records import Result
from fluid.results.submitted import SubmittedTrial, shown_state, submitted_trial
from fluid.session.best import BestSoFar, BestTracker
from fluid.session.change_waits import ChangeWaits
from fluid.session.earlier_results import GroupResults
from fluid.session.results import CallFailedError, TrialListener, TrialRequest, broken_off, exception_of
from fluid.session.status import GroupFacts
from fluid.trainables.driver_link import RequestRefusedError
from fluid.trainables.pickling import unpack_metrics
from fluid.trialgroup import Trial, TrialGroup, TrialState

_log = logging.getLogger(__name__)


class GroupInbox:
    """The results, ends and answers of one group.

    Only the session's thread writes, by :meth:`take` and the methods below it; any thread may read and wait.

    Args:
        group_id: the group's id within the session.
        group: the group as the user holds it.
        listener: gets every start, result and end as it happens; ``None`` to keep results for the handle.
        hold: of the session's clock.
    """

    def __init__(
        self, group_id: str, group: TrialGroup, listener: TrialListener | None = None, hold: ClockHold = NO_HOLD
    ) -> None:
        self.group_id = group_id
        self.group = group
        self.listener = listener
        self._lock, self._hold = threading.Lock(), hold
        self._changes = ChangeWaits(self._lock, hold)
        self._results: list[Result] = []
        self._states: dict[str, TrialState] = {}
        self._failures: dict[str, Failure] = {}
        #: Of an earlier session: the outcomes that its submitter gave, by trial id; whether it forgot trials.
        self.outcomes: Mapping[str, TrialState] = {}
        self.has_forgotten = False
        #: Trials that were forgotten, by id; ``None`` until a handle asks for them.
        self._forgotten: dict[str, SubmittedTrial] | None = None
        #: Trials that have not ended.
        self._open: set[str] = {trial.id for trial in group.active}
        #: What an earlier session reported; ``None`` if none did.
        self._earlier: GroupResults | None = None
        #: Seconds from the clock of this session to that of the first one.
        self._clock_offset = 0.0
        self._first_start: float | None = None
        self._last_end: float | None = None
        self._tracker = BestTracker(group.search)
        for trial in group.active:
            self._tracker.enter(trial)
        #: When the first iteration of this session began, how many have ended, and the sum of their seconds.
        self._began_at: float | None = None
        self._ended = 0
        self._ended_seconds = 0.0
        #: Why the session ended; ``None`` while it goes on.
        self._broken: BaseException | None = None
        self._next_call = 0
        #: Calls that were not answered: number -> method and the caller's future.
        self._calls: dict[int, tuple[str, Future[Any]]] = {}

    # -- from any thread -----------------------------------------------------------------------------------

    def results(self) -> Iterator[Result]:
        """Gives every result from the first one on, as it comes, until all trials have ended.

        Raises:
            FluidError: the session ended before the trials did.
        """
        if self._earlier is not None:
            yield from self._earlier.read(self._config_of)
        position = 0
        while True:
            with self._lock:
                fresh = self._await_more(position)
                if not fresh and not self._open:
                    return
            yield from fresh
            position += len(fresh)

    def _await_more(self, position: int) -> list[Result]:
        """Waits for results after the first so many, or the end; returns them."""
        self._changes.wait_until(lambda: position < len(self._results) or not self._open or self._broken is not None)
        if position == len(self._results) and self._open:
            self._raise_if_broken()
        return self._results[position:]

    def wait(self, timeout: float | None) -> bool:
        """Waits until all trials have ended, for at most ``timeout`` seconds; returns whether they have.

        Raises:
            FluidError: the session ended before the trials did.
        """
        with self._lock:
            ended = self._changes.wait_until(lambda: not self._open or self._broken is not None, timeout)
            if self._open:
                self._raise_if_broken()
            return ended

    @property
    def done(self) -> bool:
        """Whether all trials have ended."""
        with self._lock:
            return not self._open

    @property
    def makespan(self) -> float | None:
        """Seconds from the first start to the last finish so far; ``None`` before the first iteration ended."""
        with self._lock:
            if self._first_start is None or self._last_end is None:
                return None
            return self._last_end - self._first_start

    @property
    def states(self) -> dict[str, TrialState]:
        """How trials ended, by id, for those that have."""
        with self._lock:
            return {trial_id: state for trial_id, state in self._states.items() if trial_id not in self._open}

    @property
    def failures(self) -> dict[str, Failure]:
        """Why trials failed for good, by id."""
        with self._lock:
            return dict(self._failures)

    def keep_forgotten(self) -> None:
        """Keeps, from now on, trials that are forgotten: the group's user asks for all."""
        with self._lock:
            if self._forgotten is None:
                self._forgotten = {}

    @property
    def forgotten(self) -> dict[str, SubmittedTrial]:
        """The trials that were forgotten since :meth:`keep_forgotten` was called first, by id."""
        with self._lock:
            return dict(self._forgotten or {})

    @property
    def places(self) -> Callable[[str], int]:
        """Gives the place of a trial, by its id, in the group's order of submission."""
        return self._tracker.place_of

    @property
    def best(self) -> BestSoFar | None:
        """The best result so far, by the metric of the group's search; ``None`` if there is none."""
        with self._lock:
            return self._tracker.best()

    @property
    def facts(self) -> GroupFacts:
        """What the status of the session shows of the group."""
        with self._lock:
            return GroupFacts(
                name=self.group.name,
                search=self.group.search,
                best=self._tracker.best(),
                first_start=self._began_at,
                results=self._ended,
                result_seconds=self._ended_seconds,
            )

    def expect_answer(self, method: str) -> tuple[int, Future[Any]]:
        """Returns the number of a new call, and a future of its answer."""
        future = self._hold.future()
        future.set_running_or_notify_cancel()
        with self._lock:
            call_id = self._next_call
            self._next_call += 1
            self._calls[call_id] = method, future
        return call_id, future

    def withdraw_call(self, call_id: int) -> None:
        """Drops a call that the engine refused."""
        with self._lock:
            self._calls.pop(call_id, None)

    # -- from the session's thread -------------------------------------------------------------------------

    def take(self, notice: TrialNotice) -> None:
        """Takes what the engine reports of a trial of the group."""
        _TAKERS[type(notice)](self, notice)

    def reopen(self, trial_id: str) -> None:
        """Makes waiters wait for a trial too, which was added or extended."""
        trial = self._trial_of(trial_id)
        with self._lock:
            self._open.add(trial_id)
            if trial is not None:
                self._tracker.enter(trial)

    def say(self, trial_id: str, outcome: str | None) -> None:
        """Takes it how a trial came out, as its submitter says, if that says anything."""
        with self._lock:
            self._tracker.say(trial_id, outcome)

    def drop(self, trial_id: str, outcome: TrialState | None) -> None:
        """Drops a trial that was forgotten.

        Args:
            trial_id: the trial.
            outcome: how its submitter said that it came out; ``None`` if it said nothing.
        """
        trial = self._trial_of(trial_id)
        with self._lock:
            state, failure = self._states.pop(trial_id, None), self._failures.pop(trial_id, None)
            if self._forgotten is not None and trial is not None and state is not None:
                text = shown_state(state, self.outcomes.get(trial_id, outcome), self.group.search)
                place = self._tracker.place_of(trial_id)
                self._forgotten[trial_id] = submitted_trial(trial, self.group_id, text, failure, place)
            self._tracker.forget(trial_id)
        if trial_id in self.group:
            self.group.remove(trial_id)

    def show(self, trial: Trial) -> None:
        """Takes it that a trial is shown otherwise from now on."""
        with self._lock:
            self._tracker.show(trial)

    def take_over(
        self,
        ended: Mapping[str, TrialState],
        failures: Mapping[str, Failure],
        results: GroupResults | None,
        clock_offset: float,
        tracker: BestTracker,
    ) -> None:
        """Takes over what an earlier session reported: how trials ended, why some failed, and the results.

        Args:
            ended: how the trials ended that have, by id.
            failures: why trials failed, by id.
            results: what was reported; ``None`` if nothing was.
            clock_offset: seconds to add to times of this session, for one axis with those of ``results``.
            tracker: has heard ``results``, and how trials ended.
        """
        with self._lock:
            self._earlier, self._clock_offset = results, clock_offset
            if results is not None:
                self._first_start, self._last_end = results.first_start, results.last_end
            self._states.update(ended)
            self._open -= set(ended)
            self._failures.update({trial_id: failures[trial_id] for trial_id in ended if trial_id in failures})
            self._tracker = tracker
            self._changes.notify()

    def break_off(self, error: BaseException) -> None:
        """Wakes all waiters: the session has ended."""
        with self._lock:
            self._broken = error
            calls, self._calls = self._calls, {}
            self._changes.notify()
        for _, future in calls.values():
            future.set_exception(FluidError(f"the call was not answered: {error}"))
        if self.listener is not None:
            self._call_listener(self.listener.on_broken, error)

    def take_request(self, request: TrialRequest) -> None:
        """Takes what a trial of the group asks its submitter."""
        listener = self.listener
        if listener is None:
            request.refuse(RequestRefusedError(f"trial {request.trial_id!r} has no listener that could answer"))
            return
        try:
            listener.on_request(request)
        except BaseException as error:
            _log.exception("the listener of group %r raised", self.group.name)
            request.refuse(error)

    def _take_start(self, start: ReportStart) -> None:
        if self.listener is not None:
            self._call_listener(self.listener.on_start, start.trial_id)

    def _take_set_back(self, report: ReportSetBack) -> None:
        trial_id, iteration = report.trial_id, 0 if report.checkpoint is None else report.checkpoint.iteration
        where = f"goes on from iteration {iteration}" if iteration else "begins afresh"
        text = f"trial {trial_id!r} {where}, not from iteration {report.lost}: {report.reason}"
        if report.cannot_load:
            text += "; as it cannot be loaded, Fluid moves it no more; its output.log has the traceback"
        _log.warning("%s", text)

    def _take_unsavable(self, report: ReportUnsavable) -> None:
        text = "trial %r cannot be saved: %s; Fluid does not move it, and if its process dies, it begins again"
        _log.warning(text, report.trial_id, report.reason)

    def _take_result(self, report: Report) -> None:
        trial = self._trial_of(report.trial_id)
        result = Result(
            trial_id=report.trial_id,
            iteration=report.iteration,
            metrics=unpack_metrics(report.metrics),
            seconds=report.seconds,
            width=report.width,
            device_ids=report.device_ids,
            rows=report.rows,
            config={} if trial is None else trial.config,
        )
        with self._lock:
            if trial is not None:
                self._tracker.hear(trial, report.iteration, result.metrics)
            if self._began_at is None:
                self._began_at = report.at - report.seconds
            self._ended += 1
            self._ended_seconds += report.seconds
            end = report.at + self._clock_offset
            start = end - report.seconds
            self._first_start = start if self._first_start is None else min(self._first_start, start)
            self._last_end = end if self._last_end is None else max(self._last_end, end)
            if self.listener is None:
                self._results.append(result)
                self._changes.notify()
        if self.listener is not None:
            self._call_listener(self.listener.on_result, result)

    def _take_end(self, end: ReportEnd) -> None:
        state = end.state
        with self._lock:
            self._states[end.trial_id] = state
            if end.failure is not None and state is TrialState.FAILED:
                self._failures[end.trial_id] = end.failure
            self._tracker.end(end.trial_id, state)
            self._open.discard(end.trial_id)
            if not self._open:
                self._open = set()  # An empty set keeps the room that its members took.
            self._changes.notify()
        if self.listener is not None:
            self._call_listener(self.listener.on_end, end.trial_id, state, end.failure)

    def _take_answer(self, answer: ReportCall) -> None:
        with self._lock:
            waiting = self._calls.pop(answer.call_id, None)
        if waiting is None:
            return  # The caller was interrupted.
        method, future = waiting
        if answer.failure is not None:
            lost = CallFailedError(answer.trial_id, method, answer.failure)
            raised = exception_of(answer.failure)
            if raised is None:
                future.set_exception(lost)
            else:
                raised.__cause__ = lost
                future.set_exception(raised)
            return
        try:
            result = None if answer.result is None else pickle.loads(answer.result)
        except BaseException as error:  # Its class may be known to the lane only, or its __reduce__ raise SystemExit.
            failure = Failure("error", f"the driver cannot read what it returned: {error}")
            future.set_exception(CallFailedError(answer.trial_id, method, failure))
        else:
            future.set_result(result)

    def _config_of(self, trial_id: str) -> Mapping[str, Any] | None:
        trial = self._trial_of(trial_id)
        return None if trial is None else trial.config

    def _trial_of(self, trial_id: str) -> Trial | None:
        try:
            return self.group[trial_id]
        except InvalidFieldError:  # It was forgotten.
            return None

    def _call_listener(self, method: Callable[..., None], *facts: Any) -> None:
        """Calls a method of the listener. An error that it raises is logged, and ends nothing."""
        try:
            method(*facts)
        except BaseException:  # Also SystemExit: it must not end the session's thread.
            _log.exception("the listener of group %r raised", self.group.name)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise broken_off(self.group.name, self._broken) from self._broken


#: What takes each notice.
_TAKERS: dict[type[TrialNotice], Callable[[GroupInbox, Any], None]] = {
    ReportStart: GroupInbox._take_start,
    ReportSetBack: GroupInbox._take_set_back,
    ReportUnsavable: GroupInbox._take_unsavable,
    Report: GroupInbox._take_result,
    ReportEnd: GroupInbox._take_end,
    ReportCall: GroupInbox._take_answer,
}
