"""The loop behind :func:`fluid.run`.

Decisions are made in the session's thread, in the listener, so that a trial that is promoted costs no round trip. Only
a sampler that learns is asked in the caller's thread, as it may take milliseconds; one trial more than there are
devices is under way then.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from functools import partial

from fluid._clock import MonotonicClock
from fluid.engine.events import Failure
from fluid.engine.submissions import NothingLeftError
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.keeping import value_of
from fluid.results.records import Result, TrialResult
from fluid.results.submitted import UNFINISHED
from fluid.search.rungs import RungDecision
from fluid.session.handle import TrialGroupHandle
from fluid.session.results import TrialListener, TrialRequest
from fluid.sweeping.algorithms import most_under_way
from fluid.sweeping.callbacks import Callbacks
from fluid.sweeping.plan import SweepPlan, SweepTrial, WorstValues
from fluid.sweeping.resuming import AGAIN, EarlierEnd, EarlierSweep, EarlierTrial, other_arguments, require_same
from fluid.sweeping.serial import SerialWork
from fluid.trialgroup import Trial, TrialGroup, TrialState

#: Most trials submitted in one step: a sweep of many begins while the rest is sampled.
_CHUNK = 1024


class SweepLoop(TrialListener):
    """Runs one sweep.

    Args:
        plan: what to do.

    Attributes:
        plan: what to do.
        handle: of the sweep's group; ``None`` before it is submitted.
        reason: what ended the sweep before its trials were done; ``None`` if nothing did.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self._under_way = plan.under_way
        self._clock = MonotonicClock()
        self._began = self._clock.now()
        self.handle: TrialGroupHandle | None = None
        self.reason: str | None = None
        self._callbacks = Callbacks(plan.callbacks, plan.name)
        self.tells_failures = self._callbacks.tells_failures
        self._work = SerialWork()
        self._executor: FluidExecutor
        #: Wakes the caller's thread.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._by_id: dict[str, SweepTrial] = {}
        self._by_number: dict[int, SweepTrial] = {}
        self._open = 0
        self._is_exhausted = False
        self._worst = WorstValues(plan.goals)
        self._error: BaseException | None = None
        self._is_over = False
        #: While an earlier session's events are taken: what the trials are to be stopped with, by id.
        self._replayed: dict[str, str] | None = None
        #: What an earlier session has left of the trials.
        self._past: dict[str, EarlierTrial] = {}
        #: Trials that were to be extended although they had ended by themselves.
        self._refused: list[str] = []

    def run(self, executor: FluidExecutor, earlier: EarlierSweep | None = None) -> None:
        """Runs until all trials have ended, or a rule ends the sweep.

        Args:
            executor: runs the trials.
            earlier: what an earlier session has left of the sweep, whose group goes on with this listener; ``None`` to
                begin.

        Raises:
            Exception: what ended the sweep.
        """
        self._executor = executor
        if self._under_way is None:
            self._under_way = most_under_way(self.plan.algorithm, self.plan.samples, executor)
        first = self._fill if earlier is None else partial(self._go_on, earlier)
        self._work.start(partial(self._guard, first))
        budget = self.plan.time_budget_s
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
        return tuple(trial.result(self.plan.name, self._executor.run_dir) for trial in list(self._by_id.values()))

    def abandon(self) -> None:
        """Stops what is under way, without waiting for it: the executor is used further."""
        if self.handle is None:
            return
        for trial in list(self._by_number.values()):
            with contextlib.suppress(FluidError):
                self.handle.stop(trial.trial_id)

    # -- events, in the session's thread -------------------------------------------------------------------

    def on_start(self, trial_id: str) -> None:
        self._callbacks.on_start(trial_id)

    def on_result(self, result: Result) -> None:
        self._callbacks.on_result(result)
        self._take(partial(self._record, result))

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        self._callbacks.on_end(trial_id, state, failure)  # First: the last one may end the sweep.
        self._take(partial(self._record_end, trial_id, state, failure))

    def on_request(self, request: TrialRequest) -> None:
        self._callbacks.on_request(request)

    def on_broken(self, error: BaseException) -> None:
        problem = FluidError(f"the executor ended before the sweep: {error}")
        problem.__cause__ = error
        self._callbacks.on_broken(error)
        self._take(partial(self._fail, problem))

    def _take(self, piece: Callable[[], None]) -> None:
        """Takes an event: does it here, or wakes the caller's thread to do it."""
        self._work.add(partial(self._guard, piece))
        if not self.plan.learns:
            self._work.do()
        if self.plan.learns or self._is_over:
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
            self._end_refused()
        except Exception as error:
            self._fail(error)

    # -- starting trials -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Starts trials while there is room for them."""
        if self._replayed is not None:
            return
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
        return self._under_way is None or self._open < self._under_way

    def _next(self) -> Trial | None:
        """Makes the next trial; ``None`` if there are no more."""
        start = self.plan.scheduler.start()
        suggestion = None if start is None else self.plan.sampler.ask()
        if start is None or suggestion is None:
            self._is_exhausted = True
            return None
        trial_id = f"{self.plan.name}-{start.trial:05d}"
        trial = SweepTrial(
            number=start.trial,
            trial_id=trial_id,
            token=suggestion.token,
            config=suggestion.config,
            budget=start.budget,
            granted=start.budget,
        )
        return self._enter(trial, start.follow_up_iterations)

    def _enter(self, trial: SweepTrial, follow_up_iterations: int) -> Trial:
        """Enters a trial that is about to be submitted."""
        self._by_id[trial.trial_id] = self._by_number[trial.number] = trial
        self._open += 1
        return Trial(
            self.plan.trainable,
            trial.config,
            budget=trial.budget,
            trial_id=trial.trial_id,
            follow_up_iterations=follow_up_iterations,
            **self.plan.trial_options,
        )

    def _submit(self, trials: list[Trial]) -> None:
        if self.handle is None:
            group = TrialGroup(trials, self.plan.name, search=self.plan.search)
            self.handle = self._executor.submit_trialgroup(group, self)
        else:
            self.handle.add(*trials)

    # -- what trials report --------------------------------------------------------------------------------

    def _record(self, result: Result) -> None:
        trial, plan = self._by_id.get(result.trial_id), self.plan
        if trial is None:
            return
        values = plan.values_of(result.trial_id, result.metrics)
        trial.iteration, trial.values = result.iteration, values
        trial.results.append(result)
        self._worst.add(values)
        if trial.stop is not None or self.reason is not None:
            return
        stop = plan.rules.result(trial.number, plan.score(values), partial(value_of, result.metrics))
        if stop is not None:
            trial.stop = (TrialState.DONE if stop.is_success else TrialState.STOPPED).value
            self._stop(trial, trial.stop)
        if plan.rules.reason is not None:
            self._end(plan.rules.reason)

    def _record_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        trial, plan = self._by_id.get(trial_id), self.plan
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
        is_worst = self.plan.oom_is_worst and failure.kind == "out_of_memory"
        del self._by_number[trial.number]
        self.plan.sampler.tell(trial.token, self._worst.values if is_worst else None, failed=not is_worst)
        if self.reason is None:
            self._decide(trial, self.plan.scheduler.ended(trial.number, is_worst=is_worst))

    def _decide(self, trial: SweepTrial, decision: RungDecision) -> None:
        """Does what the scheduler has decided after a trial."""
        for promotion in decision.promoted:
            promoted = self._by_number[promotion.trial]
            self._extend(promoted, promotion.budget, promotion.follow_up_iterations)
        for number in decision.ended:
            ended = self._by_number[number]
            outcome = TrialState.DONE if ended.iteration >= self.plan.budget else TrialState.STOPPED
            self._let_go(ended, outcome.value)
        self.plan.rules.decided(trial.number, is_over=trial.number not in self._by_number)
        if self.plan.rules.reason is not None:
            self._end(self.plan.rules.reason)

    def _extend(self, trial: SweepTrial, budget: int, follow_up_iterations: int) -> None:
        trial.budget, trial.is_open = budget, True
        self._open += 1
        past = self._past.get(trial.trial_id)
        if self._replayed is None:
            self._grant(trial, follow_up_iterations)
        elif past is not None and past.has_ended_by_itself and trial.granted + past.extended_by < budget:
            self._refused.append(trial.trial_id)

    def _grant(self, trial: SweepTrial, follow_up_iterations: int) -> None:
        """Grants a trial the iterations up to its budget."""
        assert self.handle is not None
        further, trial.granted = trial.budget - trial.granted, trial.budget
        try:
            self.handle.extend(trial.trial_id, further, follow_up_iterations=follow_up_iterations)
        except NothingLeftError:
            self._refused.append(trial.trial_id)
        except InvalidFieldError:
            # Its state was dropped to make room, as it cannot be saved.
            self._stop(trial, TrialState.STOPPED.value)
            self._begin_again(trial)
            self._open -= 1
            self._submit([self._enter(trial, follow_up_iterations)])

    def _end_refused(self) -> None:
        """Ends trials that could not be extended; not at their promotion, as their end may promote others."""
        while self._refused:
            self._record_end(self._refused.pop(), TrialState.DONE.value, None)

    def _begin_again(self, trial: SweepTrial) -> None:
        """Lets a trial begin again, under another id."""
        del self._by_id[trial.trial_id]
        trial.trial_id, trial.iteration, trial.granted = trial.trial_id + AGAIN, 0, trial.budget
        trial.results.clear()
        self._by_id[trial.trial_id] = trial

    def _let_go(self, trial: SweepTrial, outcome: str | None) -> None:
        """Lets a trial go that will not continue, and tells the sampler what it came to.

        Args:
            trial: the trial.
            outcome: with which it is stopped; ``None`` if it was stopped before.
        """
        del self._by_number[trial.number]
        trial.state = outcome or trial.stop or TrialState.STOPPED.value
        self.plan.sampler.tell(trial.token, trial.values, failed=trial.values is None)
        if outcome is not None:
            self._stop(trial, outcome)

    def _stop(self, trial: SweepTrial, outcome: str) -> None:
        assert self.handle is not None
        if self._replayed is not None:
            self._replayed[trial.trial_id] = outcome
            return
        self.handle.stop(trial.trial_id, outcome)

    # -- going on ------------------------------------------------------------------------------------------

    def _go_on(self, earlier: EarlierSweep) -> None:
        """Takes what an earlier session reported, does what it had no time for, and starts further trials."""
        self.handle = next(handle for handle in self._executor.handles if handle.name == self.plan.name)
        self._replayed = {}
        for past in (past for past in earlier.trials if not past.trial_id.endswith(AGAIN)):
            require_same(self._next(), past)
        self._past = {past.trial_id: past for past in earlier.trials}
        for event in earlier.events:
            self._replay(event)
        newest = [past for past in earlier.trials if past.trial_id in self._by_id]
        for past in newest:
            trial = self._by_id[past.trial_id]
            if trial.is_open and trial.iteration >= trial.budget and trial.stop is None:
                self._record_end(trial.trial_id, TrialState.DONE.value, None)
        for past in newest:
            trial = self._by_id[past.trial_id]
            if past.budget > trial.budget and trial.state == UNFINISHED:
                raise other_arguments(past.trial_id)
            if past.is_over and past.ended is not None:
                self._record_end(past.trial_id, past.ended.value, past.failure)
        stops, self._replayed = self._replayed, None
        for past in newest:
            trial = self._by_id[past.trial_id]
            trial.granted = past.budget
            if past.trial_id in stops:
                self.handle.stop(past.trial_id, stops[past.trial_id])
            elif trial.is_open and trial.budget > past.budget:
                self._grant(trial, self.plan.budget - trial.budget)
        self._fill()

    def _replay(self, event: Result | EarlierEnd) -> None:
        if isinstance(event, Result):
            self._record(event)
        elif event.state is not None:
            self._record_end(event.trial_id, event.state.value, event.failure)
        elif event.trial_id in self._by_id:
            self._begin_again(self._by_id[event.trial_id])
        self._end_refused()

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
