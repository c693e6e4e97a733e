"""What the engine has reported of one TrialGroup. The session's thread writes it, the group's handle reads it."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, cast

from fluid._logs import logger_of
from fluid.engine.commands import (
    Report,
    ReportCall,
    ReportEnd,
    ReportSetBack,
    ReportStart,
    ReportUnsavable,
    TrialNotice,
)
from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.random_state import Seeds
from fluid.results.best import BestTracker
from fluid.results.loading import GroupResults
from fluid.results.records import Result
from fluid.results.submitted import SubmittedTrial, shown_state, submitted_trial
from fluid.session.listeners import CallFailedError, TrialListener, TrialRequest, broken_off, exception_of
from fluid.session.status import GroupFacts
from fluid.session.waits import ChangeWaits, SessionFuture, SessionWaits, guarded
from fluid.trainables.driver_link import RequestRefusedError
from fluid.trainables.encoded_metrics import EncodedMetrics, numbers_in
from fluid.trainables.exception_pickle import with_lane_cause
from fluid.trainables.json_form import message_of
from fluid.trainables.payload import TrialPayload
from fluid.trainables.usage import Usage
from fluid.trialgroup import Trial, TrialGroup, TrialState

_log = logger_of(__name__)
#: What threads wait for: results, and the end of all trials.
_RESULTS, _ENDS = "results", "trials"
_NO_OUTCOMES: Mapping[str, TrialState] = {}
#: A session may have very many groups, most of which have nothing of what this stands for; it is never changed.
_NOTHING: dict[str, Any] = {}


class GroupInbox(ChangeWaits):
    """The results, ends and answers of one group.

    Only the session's thread writes, by :meth:`take` and the methods below it; any thread may read and wait. There is
    no lock: a reader takes one value, or a copy of one container, at a time, and what ends a wait is written last.

    Args:
        group_id: the group's id within the session.
        group: the group as the user holds it.
        listener: gets every start, result and end as it happens; ``None`` to keep results for the handle.
        waits: of the session.
    """

    # A session may have very many groups.
    __slots__ = (
        "_began_at",
        "_broken",
        "_clock_offset",
        "_earlier",
        "_ended",
        "_ended_seconds",
        "_failures",
        "_forgotten",
        "_last_end",
        "_open",
        "_reports",
        "_tracker",
        "deadline",
        "group",
        "group_id",
        "has_forgotten",
        "listener",
        "outcomes",
        "shared_runs",
        "shows",
    )

    def __init__(
        self,
        group_id: str,
        group: TrialGroup,
        listener: TrialListener | None = None,
        waits: SessionWaits | None = None,
    ) -> None:
        super().__init__(waits or SessionWaits())
        self.group_id = group_id
        self.group = group
        self.listener = listener
        #: What trials reported, if there is no listener; readers make results of it.
        self._reports: list[_KeptResult] = []
        self._failures: dict[str, Failure] = _NOTHING
        #: Of an earlier session: the outcomes that its submitter gave, by trial id; whether it forgot trials.
        self.outcomes: Mapping[str, TrialState] = _NO_OUTCOMES
        self.has_forgotten = False
        #: Trials that were forgotten since a handle asks for them, by id; ``None`` before.
        self._forgotten: dict[str, SubmittedTrial] | None = None
        #: Trials that have not ended, by id.
        self._open: dict[str, None] = dict.fromkeys(trial.id for trial in group.active)
        #: What an earlier session reported; ``None`` if none did.
        self._earlier: GroupResults | None = None
        #: Seconds from the clock of this session to that of the first one.
        self._clock_offset = 0.0
        self._last_end: float | None = None
        self._tracker = BestTracker(group.search)
        for trial in group.active:
            self._tracker.enter(trial)
        #: How often a trial has come to be shown otherwise.
        self.shows = 0
        #: When the first iteration of this session began, how many have ended, and the sum of their seconds.
        self._began_at: float | None = None
        self._ended = 0
        self._ended_seconds = 0.0
        #: Runs that trials share, by id, of which the submitter hears as of these.
        self.shared_runs: frozenset[str] = frozenset()
        #: Why the session ended; ``None`` while it goes on.
        self._broken: BaseException | None = None

    # -- from any thread -----------------------------------------------------------------------------------

    def results(self) -> Iterator[Result]:
        """Gives every result from the first one on, as it comes, until all trials have ended.

        Raises:
            FluidError: the session ended before the trials did.
        """
        if self._earlier is not None:
            yield from self._earlier.read(self._trial_of)
        position = 0
        while True:
            self.wait_until(_RESULTS, partial(self._has_news, position))
            ended = not self._open  # Looked at first: no result comes after the end.
            fresh = self._reports[position:]
            if not fresh and ended:
                return
            if not fresh:
                self._raise_if_over()
            yield from map(_result_of, fresh)
            position += len(fresh)

    def _has_news(self, position: int) -> bool:
        return position < len(self._reports) or not self._open or self._is_over

    def wait(self, timeout: float | None) -> bool:
        """Waits until all trials have ended, for at most ``timeout`` seconds; returns whether they have.

        Raises:
            FluidError: the session ended before the trials did, or its own thread would wait for itself.
        """
        ended = self.wait_until(_ENDS, lambda: not self._open or self._is_over, timeout)
        if self._open:
            self._raise_if_over()
        return ended

    @property
    def done(self) -> bool:
        """Whether all trials have ended."""
        return not self._open

    @property
    def makespan(self) -> float | None:
        """Seconds from the first start to the last finish so far; ``None`` before the first iteration ended."""
        earlier, began, end = self._earlier, self._began_at, self._last_end
        starts = [] if began is None else [began + self._clock_offset]
        starts += [] if earlier is None else [earlier.first_start]
        return end - min(starts) if starts and end is not None else None

    @property
    def states(self) -> dict[str, TrialState]:
        """How trials ended, by id, for those that have."""
        return {trial_id: state for trial_id, state in self._tracker.states.items() if trial_id not in self._open}

    @property
    def failures(self) -> dict[str, Failure]:
        """Why trials failed for good, by id."""
        return self._failures.copy()

    @property
    def seeds(self) -> dict[str, Seeds]:
        """The seeds of trials, by id."""
        return self._tracker.seeds

    def seeds_of(self, trial_id: str) -> Seeds | None:
        """The seeds of a trial; ``None`` if they are unknown."""
        return self._tracker.facts(trial_id)[1]

    def keep_forgotten(self) -> None:
        """Keeps, from now on, trials that are forgotten: the group's user asks for all."""
        if self._forgotten is None:
            self._forgotten = {}

    @property
    def forgotten(self) -> dict[str, SubmittedTrial]:
        """The trials that were forgotten since :meth:`keep_forgotten` was called first, by id."""
        return {} if self._forgotten is None else self._forgotten.copy()

    @property
    def places(self) -> Callable[[str], int]:
        """Gives the place of a trial, by its id, in the group's order of submission."""
        return self._tracker.place_of

    def expect_answer(self, method: str) -> tuple[int, Future[Any]]:
        """Returns the number of a new call, and a future of its answer."""
        call_id, future = next(self._waits.call_ids), SessionFuture(self._waits, f"what {method!r} returns")
        self._waits.calls[call_id] = self, method, future
        return call_id, future

    def withdraw_call(self, call_id: int) -> None:
        """Drops a call that the engine refused."""
        self._waits.calls.pop(call_id, None)

    # -- from the session's thread -------------------------------------------------------------------------

    @property
    def facts(self) -> GroupFacts:
        """What the status of the session shows of the group."""
        return GroupFacts(
            name=self.group.name,
            search=self.group.search,
            best=self._tracker.best(),
            open_metric=self._tracker.open_metric,
            first_start=self._began_at,
            results=self._ended,
            result_seconds=self._ended_seconds,
            shared_runs=self.shared_runs,
        )

    def take(self, notice: TrialNotice) -> None:
        """Takes what the engine reports of a trial of the group."""
        if notice.trial_id in self.shared_runs and isinstance(notice, (Report, ReportStart, ReportEnd)):
            if isinstance(notice, Report):
                self._count(notice)
            return
        _TAKERS[type(notice)](self, notice)

    def reopen(self, trial_id: str) -> None:
        """Makes waiters wait for a trial too, which was added or extended."""
        trial = self._trial_of(trial_id)
        if trial is not None:
            self._tracker.enter(trial)
        self._open = self._open or {}
        self._open[trial_id] = None

    def note_seeds(self, trials: Mapping[Trial, TrialPayload]) -> None:
        """Takes the seeds of trials."""
        for trial, each in trials.items():
            if each.process.seeds is not None:
                self._tracker.take_seeds(trial, each.process.seeds)

    def stop(self, trial_id: str, outcome: str | None) -> None:
        """Takes it that a trial is stopped, and how it came out, if its submitter says anything of that."""
        self.change(self.group.stop, trial_id)
        self._tracker.say(trial_id, outcome)

    def drop(self, trial_id: str, outcome: TrialState | None) -> None:
        """Drops a trial that was forgotten.

        Args:
            trial_id: the trial.
            outcome: how its submitter said that it came out; ``None`` if it said nothing.
        """
        trial = self._trial_of(trial_id)
        (state, seeds), failure = self._tracker.facts(trial_id), self._failures.pop(trial_id, None)
        if self._forgotten is not None and trial is not None and state is not None:
            text = shown_state(state, self.outcomes.get(trial_id, outcome), self.group.search)
            place = self._tracker.place_of(trial_id)
            self._forgotten[trial_id] = submitted_trial(trial, self.group_id, text, failure, place, seeds)
        self._tracker.forget(trial_id)
        if trial is not None:
            self.change(self.group.remove, trial_id)

    def change(self, method: Callable[..., object], *arguments: Any) -> None:
        """Changes the group, whose class may be the user's, as the engine has accepted the change."""
        guarded(f"group {self.group.name!r}", method, *arguments)

    def require_new(self, trials: Iterable[Trial]) -> None:
        """Refuses trials whose ids the group has already."""
        for trial in trials:
            if self._trial_of(trial.id) is not None:
                raise InvalidFieldError("trial_id", trial.id, f"already in TrialGroup {self.group.name!r}")

    def show(self, trial_id: str, config: Mapping[str, Any]) -> None:
        """Takes it that a trial is shown with other hyperparameters from now on."""
        self.change(self.group.show, trial_id, config)
        if (trial := self._trial_of(trial_id)) is not None:
            self._tracker.show(trial)
            self.shows += 1

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
        self._earlier, self._clock_offset = results, clock_offset
        if results is not None:
            self._last_end = results.last_end
        self._failures = {trial_id: failures[trial_id] for trial_id in ended if trial_id in failures}
        self._tracker = tracker
        for trial_id, state in ended.items():
            tracker.end(trial_id, state)
        self._open = {trial_id: None for trial_id in self._open if trial_id not in ended}
        self.wake()

    def break_off(self, error: BaseException) -> None:
        """Wakes all waiters: the session has ended."""
        self._broken = error
        self.wake()
        for call_id, (whose, _, future) in self._waits.calls.copy().items():
            if whose is self:
                self.withdraw_call(call_id)
                future.set_exception(FluidError(f"the call was not answered: {message_of(error)}"))
        if self.listener is not None:
            self._call_listener("on_broken", error)

    def take_request(self, request: TrialRequest) -> None:
        """Takes what a trial of the group asks its submitter."""
        listener = self.listener
        if listener is None:
            request.refuse(RequestRefusedError(f"trial {request.trial_id!r} has no listener that could answer"))
            return
        try:
            listener.on_request(request)
        except BaseException as error:
            _log.exception("%s raised", self._whose)
            guarded(self._whose, request.refuse, error)

    def take_left(self, trial_id: str) -> None:
        """Tells the listener of a trial that another driver has left, if it takes such up: it may submit it, too."""
        if hasattr(self.listener, "on_left"):
            self._call_listener("on_left", trial_id)

    def _take_start(self, start: ReportStart) -> None:
        if self.listener is not None:
            self._call_listener("on_start", start.trial_id)

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
        if trial is not None:
            for iteration, _, _, metrics in report.iterations:
                self._tracker.hear(trial, iteration, metrics.numbers)
        if not report.source:
            self._count(report)
        if self.listener is None:
            self._keep(report, trial)
            self.notify(_RESULTS)
            return
        for iteration, _, seconds, metrics in report.iterations:
            result = _result(report.trial_id, trial, iteration, seconds, metrics, report, report.usage)
            self._call_listener("on_result", result)

    def _count(self, report: Report) -> None:
        """Counts iterations and their time; those that were run once for several trials count once."""
        for _, at, seconds, _ in report.iterations:
            self._began_at = at - seconds if self._began_at is None else min(self._began_at, at - seconds)
            # The seconds of the only result of a group are that object.
            self._ended_seconds = self._ended_seconds + seconds if self._ended_seconds else seconds
        self._ended += report.count
        end = report.at + self._clock_offset
        self._last_end = end if self._last_end is None else max(self._last_end, end)

    def _keep(self, report: Report, trial: Trial | None) -> None:
        place = _ran_at(report.width, report.device_ids, report.rows, report.source)
        whose = report.trial_id if trial is None else trial
        self._reports += [
            _KeptResult(whose, iteration, seconds, metrics.text, metrics.payload, place, report.usage)
            for iteration, _, seconds, metrics in report.iterations
        ]

    def _take_end(self, end: ReportEnd) -> None:
        state = end.state
        if end.failure is not None:
            self._failures = self._failures or {}
            self._failures[end.trial_id] = end.failure
        self._tracker.end(end.trial_id, state)
        self._open.pop(end.trial_id, None)
        if not self._open:
            self._open = _NOTHING  # An empty dict keeps the room that its members took.
            self.wake()
        if self.listener is not None:
            self._call_listener("on_end", end.trial_id, state, end.failure)

    def _take_answer(self, answer: ReportCall) -> None:
        waiting = self._waits.calls.pop(answer.call_id, None)
        if waiting is None:
            return  # The caller was interrupted.
        _, method, future = waiting
        if answer.failure is not None:
            lost = CallFailedError(answer.trial_id, method, answer.failure)
            raised = exception_of(answer.failure)
            if raised is None:
                future.set_exception(lost)
            else:
                future.set_exception(with_lane_cause(raised, lost))
            return
        try:
            result = None if answer.result is None else pickle.loads(answer.result)
        except BaseException as error:  # Its class may be known to the lane only, or its __reduce__ raise SystemExit.
            failure = Failure("error", f"the driver cannot read what it returned: {message_of(error)}")
            future.set_exception(CallFailedError(answer.trial_id, method, failure))
        else:
            future.set_result(result)

    def _trial_of(self, trial_id: str) -> Trial | None:
        try:
            return self.group[trial_id]
        except InvalidFieldError:  # It was forgotten.
            return None
        except BaseException:  # The class of the group is the user's.
            _log.exception("group %r raised", self.group.name)
            return None

    @property
    def _whose(self) -> str:
        return f"the listener of group {self.group.name!r}"

    def _call_listener(self, method: str, *facts: Any) -> None:
        guarded(self._whose, lambda: getattr(self.listener, method)(*facts))

    def wake(self) -> None:
        """Has all who wait look again."""
        self.notify(_RESULTS)
        self.notify(_ENDS)

    @property
    def _is_over(self) -> bool:
        """Whether no trial will run any more."""
        return self._broken is not None or self._waits.over() is not None

    def _raise_if_over(self) -> None:
        error = self._broken or self._waits.over()
        if error is not None:
            raise broken_off(self.group.name, error) from error


class _RanAt(NamedTuple):
    """Where an iteration ran, and which trial has run it: see :class:`fluid.results.records.Result`."""

    width: float
    device_ids: tuple[int, ...]
    rows: int
    source: str


@functools.lru_cache(4096)
def _ran_at(width: float, device_ids: tuple[int, ...], rows: int, source: str) -> _RanAt:
    """One object for all that are alike."""
    return _RanAt(width, device_ids, rows, source)


class _KeptResult(NamedTuple):
    """A result as it waits for its readers. There is one for each iteration of a group: it takes little memory.

    Attributes:
        whose: the trial, or the id of one that was forgotten.
        iteration, seconds, place, usage: of the iteration.
        text, payload: its metrics, of which the numbers can be read again.
    """

    whose: Trial | str
    iteration: int
    seconds: float
    text: str
    payload: bytes | None
    place: _RanAt
    usage: Usage


def _result_of(kept: _KeptResult) -> Result:
    """Makes a reader's own result."""
    whose, iteration, seconds, text, payload, place, usage = kept
    metrics = EncodedMetrics(text, numbers_in(json.loads(text)), payload)
    if isinstance(whose, Trial):
        return _result(whose.id, whose, iteration, seconds, metrics, place, usage)
    return _result(whose, None, iteration, seconds, metrics, place, usage)


def _result(
    trial_id: str,
    trial: Trial | None,
    iteration: int,
    seconds: float,
    metrics: EncodedMetrics,
    place: Report | _RanAt,
    usage: Usage,
) -> Result:
    return Result(
        trial_id=trial_id,
        iteration=iteration,
        metrics=metrics,
        seconds=seconds,
        width=place.width,
        device_ids=place.device_ids,
        rows=place.rows,
        usage=usage,
        source=place.source,
        config={} if trial is None else cast(Any, trial),
    )


#: What takes each notice.
_TAKERS: dict[type[TrialNotice], Callable[[GroupInbox, Any], None]] = {
    ReportStart: GroupInbox._take_start,
    ReportSetBack: GroupInbox._take_set_back,
    ReportUnsavable: GroupInbox._take_unsavable,
    Report: GroupInbox._take_result,
    ReportEnd: GroupInbox._take_end,
    ReportCall: GroupInbox._take_answer,
}
