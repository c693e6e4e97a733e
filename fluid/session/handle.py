"""What a submitter holds of a TrialGroup that runs: its results as they come, and ways to change it."""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from fluid.engine.commands import Report, ReportCall, ReportEnd, ReportStart, TrialNotice
from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError, require_integer, require_number
from fluid.session.results import CallFailedError, Result, TrialFailedError, TrialListener, exception_of
from fluid.trainables.pickling import dump_arguments

if TYPE_CHECKING:
    from fluid.trialgroup import Trial, TrialGroup

_log = logging.getLogger(__name__)


class Controls:
    """What a handle may ask of the executor; the executor fills it in."""

    def __init__(
        self,
        *,
        add: Callable[[str, list[Trial]], None],
        stop: Callable[[str, str | None], None],
        extend: Callable[[str, int, int], None],
        call: Callable[[str, int, str, bytes], None],
        forget: Callable[[str], None],
        eta: Callable[[str], float | None],
    ) -> None:
        self.add = add
        self.stop = stop
        self.extend = extend
        self.call = call
        self.forget = forget
        self.eta = eta


class TrialGroupHandle:
    """A submitted TrialGroup. Safe to use from several threads.

    Attributes:
        name: the group's name.
        search: what it is about, if a search algorithm submits its trials.
    """

    def __init__(
        self, group_id: str, group: TrialGroup, controls: Controls, listener: TrialListener | None = None
    ) -> None:
        self.name = group.name
        self.search = group.search
        self._id = group_id
        self._group = group
        self._controls = controls
        self._listener = listener
        self._changed = threading.Condition()
        self._results: list[Result] = []
        self._states: dict[str, str] = {}
        self._failures: dict[str, Failure] = {}
        self._open: set[str] = {trial.id for trial in group.active}
        self._first_start: float | None = None
        self._last_end: float | None = None
        self._broken: BaseException | None = None
        self._call_ids = itertools.count()
        #: Calls that were not answered: number -> method and the caller's future.
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        self._takers: dict[type[TrialNotice], Callable[[Any], None]] = {
            ReportStart: self._take_start,
            Report: self._take_result,
            ReportEnd: self._take_end,
            ReportCall: self._take_answer,
        }

    # -- for the submitter ---------------------------------------------------------------------------------

    def results(self) -> Iterator[Result]:
        """Gives every result from the first one on, as it comes, until all trials have ended.

        Each call starts at the first result. A trial that is extended or added while results are read is waited
        for too.

        Raises:
            FluidError: the executor was closed, or broke, before the trials ended; or a listener was given, which
                gets the results instead.
        """
        if self._listener is not None:
            raise FluidError(f"group {self.name!r} has a listener, which gets its results; they are not kept for later")
        return self._results_as_they_come()

    def _results_as_they_come(self) -> Iterator[Result]:
        position = 0
        while True:
            with self._changed:
                while position == len(self._results) and self._open:
                    self._raise_if_broken()
                    self._changed.wait()
                fresh = self._results[position:]
                if not fresh and not self._open:
                    return
            yield from fresh
            position += len(fresh)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all trials have ended.

        Args:
            timeout: seconds to wait at most; ``None`` for as long as it takes.

        Returns:
            Whether they have.
        """
        if timeout is not None:
            require_number("timeout", timeout, at_least=0.0)
        with self._changed:
            ended = self._changed.wait_for(lambda: not self._open or self._broken is not None, timeout)
            if self._open:
                self._raise_if_broken()
            return ended

    def stop(self, trial_id: str, outcome: str | None = None) -> None:
        """Stops a trial at the end of its current iteration. Stopping one that has ended is harmless.

        Args:
            trial_id: a trial of this group.
            outcome: what reports say came of it: ``"DONE"``, ``"STOPPED"``, ``"FAILED"``, or ``"PAUSED"`` if it may
                come back as another trial; ``None`` for the state in which it ends.
        """
        self._controls.stop(trial_id, outcome)
        self._group.stop(trial_id)

    def extend(self, trial_id: str, budget: int, *, follow_up_iterations: int = 0) -> None:
        """Gives a trial ``budget`` further iterations; one that was done goes on where it was.

        Args:
            trial_id: a trial of this group.
            budget: how many more.
            follow_up_iterations: what may be asked for after those (:class:`fluid.Trial`).

        Raises:
            InvalidFieldError: the trial is unknown, stopped or failed, the budget is below 1, or
                ``follow_up_iterations`` below 0.
        """
        budget = require_integer("budget", budget, at_least=1)
        follow_up_iterations = require_integer("follow_up_iterations", follow_up_iterations, at_least=0)
        self._controls.extend(trial_id, budget, follow_up_iterations)
        self._group.extend(trial_id, budget, follow_up_iterations=follow_up_iterations)

    def add(self, *trials: Trial) -> None:
        """Adds trials to the group; they are planned together.

        Raises:
            InvalidFieldError: the id of one is taken, or it cannot be sent to another process. None is added then.
        """
        added: list[Trial] = []
        try:
            for trial in trials:
                added.append(self._group.add(trial))
            if added:
                self._controls.add(self._id, added)
        except BaseException:
            for trial in added:
                self._group.remove(trial.id)
            raise

    def call(self, trial_id: str, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls a method of a trial's trainable, where the trial is, between two of its iterations.

        It is called as soon as the trial has been set up and is not on its way elsewhere. One that is done is brought
        back for it, if need be. Calls of a trial are made in the order asked for, and before iterations that were asked
        for later. If the process dies before it has answered, or the trial goes on elsewhere, the method is called
        again where that is, with the trial as it was before. What it raises does not fail the trial.

        Args:
            trial_id: a trial of this group that was not stopped and has not failed.
            method: name of the method.
            args: what to call it with; pickled by cloudpickle, as is what it returns.
            kwargs: the same, by name.

        Returns:
            A future of what the method returns. Its exception is the method's own, where it can be pickled, and a
            :class:`CallFailedError` otherwise, or if the trial ended before. It cannot be cancelled.

        Raises:
            InvalidFieldError: the trial cannot be called, or an argument cannot be pickled.
        """
        self._require_known(trial_id)
        if not isinstance(method, str) or not method.isidentifier():
            raise InvalidFieldError("method", method, "must be the name of a method")
        payload = dump_arguments(args, kwargs)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        call_id = next(self._call_ids)
        with self._changed:
            self._calls[call_id] = method, future
        try:
            self._controls.call(trial_id, call_id, method, payload)
        except BaseException:
            with self._changed:
                self._calls.pop(call_id, None)
            raise
        return future

    def forget(self, trial_id: str) -> None:
        """Drops all that is kept of a trial that has ended, so that a long session does not grow; its files stay.

        One that is done cannot go on then. Its id stays taken, and results that were kept can still be read.

        Raises:
            InvalidFieldError: the trial is unknown, or has not ended.
        """
        self._require_known(trial_id)
        self._controls.forget(trial_id)

    @property
    def done(self) -> bool:
        """Whether all trials have ended."""
        with self._changed:
            return not self._open

    @property
    def makespan(self) -> float | None:
        """Seconds from the first start to the last finish so far; ``None`` before the first iteration ended."""
        with self._changed:
            if self._first_start is None or self._last_end is None:
                return None
            return self._last_end - self._first_start

    @property
    def eta(self) -> float | None:
        """Predicted seconds until all trials have ended; ``None`` where nothing is known yet."""
        return self._controls.eta(self._id)

    @property
    def states(self) -> dict[str, str]:
        """``"DONE"``, ``"STOPPED"`` or ``"FAILED"`` by trial, for those that have ended."""
        with self._changed:
            return {trial_id: state for trial_id, state in self._states.items() if trial_id not in self._open}

    @property
    def failures(self) -> dict[str, Failure]:
        """Why trials failed for good, by trial."""
        with self._changed:
            return dict(self._failures)

    def raise_failures(self) -> None:
        """Raises :class:`TrialFailedError` for the first trial that failed, if any did."""
        for trial_id, failure in self.failures.items():
            raise TrialFailedError(trial_id, failure)

    # -- for the executor ----------------------------------------------------------------------------------

    def take(self, notice: TrialNotice) -> None:
        """Takes what the engine has to say about a trial of the group."""
        self._takers[type(notice)](notice)

    def _take_start(self, start: ReportStart) -> None:
        if self._listener is not None:
            self._tell(self._listener.on_start, start.trial_id)

    def _take_result(self, report: Report) -> None:
        config = self._group[report.trial_id].config if report.trial_id in self._group else {}
        result = Result(
            report.trial_id,
            report.iteration,
            report.metrics,
            report.seconds,
            report.width,
            report.device_ids,
            config,
        )
        with self._changed:
            started = report.at - report.seconds
            self._first_start = started if self._first_start is None else min(self._first_start, started)
            self._last_end = report.at if self._last_end is None else max(self._last_end, report.at)
            if self._listener is None:
                self._results.append(result)
                self._changed.notify_all()
        if self._listener is not None:
            self._tell(self._listener.on_result, result)

    def _take_end(self, end: ReportEnd) -> None:
        with self._changed:
            self._states[end.trial_id] = end.state
            if end.failure is not None and end.state == "FAILED":
                self._failures[end.trial_id] = end.failure
            self._open.discard(end.trial_id)
            self._changed.notify_all()
        if self._listener is not None:
            self._tell(self._listener.on_end, end.trial_id, end.state, end.failure)

    def _take_answer(self, answer: ReportCall) -> None:
        with self._changed:
            waiting = self._calls.pop(answer.call_id, None)
        if waiting is None:
            return  # whoever asked was interrupted
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
            failure = Failure("error", f"what it returned cannot be read here: {error}")
            future.set_exception(CallFailedError(answer.trial_id, method, failure))
        else:
            future.set_result(result)

    def _tell(self, method: Callable[..., None], *facts: Any) -> None:
        """Tells the listener; its errors are its own."""
        try:
            method(*facts)
        except BaseException:  # Also SystemExit: it must not end the session's thread.
            _log.exception("the listener of group %r raised", self.name)

    def reopen(self, trial_id: str) -> None:
        """Notes that a trial was added or extended, and is to be waited for."""
        with self._changed:
            self._open.add(trial_id)

    def drop(self, trial_id: str) -> None:
        """Notes that a trial was forgotten."""
        with self._changed:
            self._states.pop(trial_id, None)
            self._failures.pop(trial_id, None)
        if trial_id in self._group:
            self._group.remove(trial_id)

    def take_over(self, ended: Mapping[str, str], failures: Mapping[str, Failure]) -> None:
        """Notes which trials had ended in an earlier session."""
        with self._changed:
            self._states.update(ended)
            self._open -= set(ended)
            self._failures.update({trial_id: failures[trial_id] for trial_id in ended if trial_id in failures})
            self._changed.notify_all()

    def break_off(self, error: BaseException) -> None:
        """Wakes whoever waits: nothing will come any more."""
        with self._changed:
            self._broken = error
            calls, self._calls = self._calls, {}
            self._changed.notify_all()
        for _, future in calls.values():
            future.set_exception(FluidError(f"the call was not answered: {error}"))
        if self._listener is not None:
            self._tell(self._listener.on_broken, error)

    def _require_known(self, trial_id: str) -> None:
        if trial_id not in self._group:
            raise InvalidFieldError("trial_id", trial_id, f"is unknown in group {self.name!r}")

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise FluidError(f"group {self.name!r} did not end: {self._broken}") from self._broken
