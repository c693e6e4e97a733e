"""The loop behind :func:`fluid.run`.

Decisions are made in the session's thread, in the listener, so that a trial that is promoted costs no round trip. Only
a sampler that learns is asked in the caller's thread, as it may take milliseconds; one trial more than there are
devices is under way then.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable
from functools import partial
from typing import Any

from fluid._clock import MonotonicClock
from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.keeping import value_of
from fluid.results.records import Result, TrialResult
from fluid.search.rungs import RungDecision
from fluid.session.handle import TrialGroupHandle
from fluid.session.results import TrialFailedError, TrialListener, TrialRequest
from fluid.sweeping.plan import SweepFailedError, SweepPlan, SweepTrial
from fluid.sweeping.serial import SerialWork
from fluid.trialgroup import Trial, TrialGroup, TrialState

_log = logging.getLogger(__name__)
#: Most trials submitted in one step: a sweep of many begins while the rest is sampled.
_CHUNK = 1024


class SweepLoop(TrialListener):
    """Runs one sweep.

    Args:
        plan: what to do.
        executor: runs the trials.

    Attributes:
        handle: of the sweep's group; ``None`` before it is submitted.
        reason: what ended the sweep before its trials were done; ``None`` if nothing did.
    """

    def __init__(self, plan: SweepPlan, executor: FluidExecutor) -> None:
        self._plan = plan
        self._executor = executor
        self._clock = MonotonicClock()
        self._began = self._clock.now()
        self.handle: TrialGroupHandle | None = None
        self.reason: str | None = None
        self.tells_failures = any(callback.tells_failures for callback in plan.callbacks)
        self._work = SerialWork()
        #: Wakes the caller's thread.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._by_id: dict[str, SweepTrial] = {}
        self._by_number: dict[int, SweepTrial] = {}
        self._open = 0
        #: Whether there are no more trials to start.
        self._is_exhausted = False
        #: The worst value of each metric so far.
        self._worst: list[float] = []
        self._error: BaseException | None = None
        self._is_over = False

    def run(self) -> None:
        """Runs until all trials have ended, or a rule ends the sweep.

        Raises:
            Exception: what ended the sweep.
        """
        self._do(self._fill)
        budget = self._plan.time_budget_s
        while not self._is_over:
            left = None if budget is None else max(0.0, self._began + budget - self._clock.now())
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=left)
            if left == 0.0:
                self._do(partial(self._end, f"the time budget of {budget:g} s was used up"))
                budget = None
            self._work.do()
        if self._error is not None:
            raise self._error

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Ids of the trials that have been started and are not over."""
        return tuple(trial.trial_id for trial in list(self._by_number.values()))

    @property
    def trials(self) -> tuple[TrialResult, ...]:
        """The trials that have been started, in that order."""
        return tuple(trial.result(self._plan.name, self._executor.run_dir) for trial in list(self._by_id.values()))

    def raise_if_all_failed(self, result: Any) -> None:
        """Raises an error if no trial has come to anything.

        Raises:
            SweepFailedError: all trials have failed.
        """
        failures = [(trial.trial_id, trial.failure) for trial in self._by_id.values() if trial.failure is not None]
        if failures and len(failures) == len(self._by_id):
            trial_id, failure = failures[0]
            text = f"all {len(failures)} trials failed; the first one: {failure.message}"
            raise SweepFailedError(text, result) from TrialFailedError(trial_id, failure)

    def abandon(self) -> None:
        """Stops what is under way, without waiting for it: the executor is used further."""
        if self.handle is None:
            return
        for trial in list(self._by_number.values()):
            with contextlib.suppress(FluidError):
                self.handle.stop(trial.trial_id)

    # -- events, in the session's thread -------------------------------------------------------------------

    def on_start(self, trial_id: str) -> None:
        for callback in self._plan.callbacks:
            self._call(callback.on_start, trial_id)

    def on_result(self, result: Result) -> None:
        self._take(partial(self._record, result))
        for callback in self._plan.callbacks:
            self._call(callback.on_result, result)

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        self._take(partial(self._record_end, trial_id, state, failure))
        for callback in self._plan.callbacks:
            self._call(callback.on_end, trial_id, state, failure)

    def on_request(self, request: TrialRequest) -> None:
        for callback in self._plan.callbacks:
            if type(callback).on_request is not TrialListener.on_request:
                callback.on_request(request)
                return
        super().on_request(request)

    def on_broken(self, error: BaseException) -> None:
        problem = FluidError(f"the executor ended before the sweep: {error}")
        problem.__cause__ = error
        self._take(partial(self._fail, problem))
        for callback in self._plan.callbacks:
            self._call(callback.on_broken, error)

    def _take(self, piece: Callable[[], None]) -> None:
        """Takes an event: does it here, or wakes the caller's thread to do it."""
        self._work.add(partial(self._guard, piece))
        if not self._plan.learns:
            self._work.do()
        if self._plan.learns or self._is_over:
            self._wakes.put(None)

    def _do(self, piece: Callable[[], None]) -> None:
        """Does work in the caller's thread."""
        self._work.add(partial(self._guard, piece))
        self._work.do()

    def _guard(self, piece: Callable[[], None]) -> None:
        """Does a piece of work; an error in it ends the sweep."""
        if self._is_over:
            return
        try:
            piece()
        except Exception as error:
            self._fail(error)

    def _call(self, method: Callable[..., None], *facts: Any) -> None:
        try:
            method(*facts)
        except Exception:
            _log.exception("a callback of the sweep %r raised", self._plan.name)

    # -- starting trials -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Starts trials while there is room for them."""
        while not self._is_exhausted and self.reason is None:
            fresh: list[Trial] = []
            while len(fresh) < _CHUNK and self._has_room and (trial := self._next()) is not None:
                fresh.append(trial)
            if not fresh:
                break
            self._submit(fresh)
        self._finish_if_done()

    @property
    def _has_room(self) -> bool:
        return self._plan.under_way is None or self._open < self._plan.under_way

    def _next(self) -> Trial | None:
        """Makes the next trial; ``None`` if there are no more."""
        start = self._plan.scheduler.start()
        suggestion = None if start is None else self._plan.sampler.ask()
        if start is None or suggestion is None:
            self._is_exhausted = True
            return None
        trial_id = f"{self._plan.name}-{start.trial:05d}"
        trial = SweepTrial(
            number=start.trial,
            trial_id=trial_id,
            token=suggestion.token,
            config=suggestion.config,
            budget=start.budget,
        )
        return self._enter(trial, start.follow_up_iterations)

    def _enter(self, trial: SweepTrial, follow_up_iterations: int) -> Trial:
        """Enters a trial that is about to be submitted."""
        self._by_id[trial.trial_id] = self._by_number[trial.number] = trial
        self._open += 1
        return Trial(
            self._plan.trainable,
            trial.config,
            budget=trial.budget,
            trial_id=trial.trial_id,
            follow_up_iterations=follow_up_iterations,
            **self._plan.trial_options,
        )

    def _submit(self, trials: list[Trial]) -> None:
        if self.handle is None:
            group = TrialGroup(trials, self._plan.name, search=self._plan.search)
            self.handle = self._executor.submit_trialgroup(group, self)
        else:
            self.handle.add(*trials)

    # -- what trials report --------------------------------------------------------------------------------

    def _record(self, result: Result) -> None:
        trial, plan = self._by_id.get(result.trial_id), self._plan
        if trial is None:
            return
        values = plan.values_of(result.trial_id, result.metrics)
        trial.iteration, trial.values = result.iteration, values
        trial.results.append(result)
        self._note_worst(values)
        if trial.stop is not None or self.reason is not None:
            return
        stop = plan.rules.result(trial.number, plan.score(values), partial(value_of, result.metrics))
        if stop is not None:
            trial.stop = (TrialState.DONE if stop.is_success else TrialState.STOPPED).value
            self._stop(trial, trial.stop)
        if plan.rules.reason is not None:
            self._end(plan.rules.reason)

    def _record_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        trial, plan = self._by_id.get(trial_id), self._plan
        if trial is None or not trial.is_open:
            return
        trial.is_open = False
        self._open -= 1
        if failure is not None and state == TrialState.FAILED:
            self._record_failure(trial, failure)
        elif self.reason is not None:
            self._let_go(trial, None if state == TrialState.STOPPED else TrialState.STOPPED.value)
        elif state == TrialState.DONE and trial.iteration >= trial.budget and trial.values and trial.stop is None:
            self._decide(trial, plan.scheduler.reached(trial.number, plan.score(trial.values)))
        else:
            self._let_go(trial, None if state == TrialState.STOPPED else trial.stop or TrialState.DONE.value)
            self._decide(trial, plan.scheduler.ended(trial.number))
        self._fill()

    def _record_failure(self, trial: SweepTrial, failure: Failure) -> None:
        trial.state, trial.failure = TrialState.FAILED.value, failure
        is_worst = self._plan.oom_is_worst and failure.kind == "out_of_memory"
        del self._by_number[trial.number]
        self._plan.sampler.tell(trial.token, self._worst or None if is_worst else None, failed=not is_worst)
        if self.reason is None:
            self._decide(trial, self._plan.scheduler.ended(trial.number, is_worst=is_worst))

    def _decide(self, trial: SweepTrial, decision: RungDecision) -> None:
        """Does what the scheduler has decided after a trial."""
        for promotion in decision.promoted:
            promoted = self._by_number[promotion.trial]
            self._extend(promoted, promotion.budget, promotion.follow_up_iterations)
        for number in decision.ended:
            ended = self._by_number[number]
            outcome = TrialState.DONE if ended.iteration >= self._plan.budget else TrialState.STOPPED
            self._let_go(ended, outcome.value)
        self._plan.rules.decided(trial.number, is_over=trial.number not in self._by_number)
        if self._plan.rules.reason is not None:
            self._end(self._plan.rules.reason)

    def _extend(self, trial: SweepTrial, budget: int, follow_up_iterations: int) -> None:
        assert self.handle is not None
        further, trial.budget = budget - trial.iteration, budget
        try:
            self.handle.extend(trial.trial_id, further, follow_up_iterations=follow_up_iterations)
        except InvalidFieldError:
            # Its state was dropped to make room, as it cannot be saved: it begins again, as another trial.
            self._stop(trial, TrialState.STOPPED.value)
            del self._by_id[trial.trial_id]
            trial.trial_id, trial.iteration, trial.is_open = f"{trial.trial_id}-again", 0, True
            trial.results.clear()
            self._submit([self._enter(trial, follow_up_iterations)])
        else:
            trial.is_open = True
            self._open += 1

    def _let_go(self, trial: SweepTrial, outcome: str | None) -> None:
        """Lets a trial go that will not continue, and tells the sampler what it came to.

        Args:
            trial: the trial.
            outcome: with which it is stopped; ``None`` if it was stopped before.
        """
        del self._by_number[trial.number]
        trial.state = outcome or trial.stop or TrialState.STOPPED.value
        self._plan.sampler.tell(trial.token, trial.values, failed=trial.values is None)
        if outcome is not None:
            self._stop(trial, outcome)

    def _stop(self, trial: SweepTrial, outcome: str) -> None:
        assert self.handle is not None
        self.handle.stop(trial.trial_id, outcome)

    def _note_worst(self, values: tuple[float, ...]) -> None:
        worst = self._worst
        for number, (value, goal) in enumerate(zip(values, self._plan.goals, strict=True)):
            if number == len(worst):
                worst.append(value)
            elif worst[number] != worst[number] or goal.is_better(worst[number], value):
                worst[number] = value

    # -- the end -------------------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """Ends the sweep: trials under way stop after their iteration."""
        if self.reason is not None:
            return
        self.reason = reason
        if self.handle is None:
            self._is_over = True
        for trial in list(self._by_number.values()):
            if trial.is_open:
                self._stop(trial, TrialState.STOPPED.value)
            else:
                self._let_go(trial, TrialState.STOPPED.value)
        self._finish_if_done()

    def _fail(self, error: BaseException) -> None:
        self._error, self._is_over = error, True

    def _finish_if_done(self) -> None:
        if not self._open and (self._is_exhausted or self.reason is not None):
            self._is_over = True
