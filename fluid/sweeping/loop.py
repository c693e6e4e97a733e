"""The loop behind :func:`fluid.run`.

Decisions are made in the session's thread, in the listener, so that a trial that is promoted costs no round trip. Only
a searcher that learns is asked and told in the caller's thread, as that may take seconds: trials go on meanwhile. One
trial more than there are devices is under way then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from operator import attrgetter

from fluid._clock import Clock, MonotonicClock
from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.results.records import Result
from fluid.results.submitted import UNFINISHED
from fluid.search.brackets import Brackets
from fluid.search.population import Population
from fluid.search.rungs import RungDecision
from fluid.search.schedulers import AsynchronousHalving
from fluid.search.suggestion import ELSEWHERE, Suggestion
from fluid.session.joint.session import JointSession
from fluid.session.listeners import LimitReachedError, TrialListener, TrialRequest
from fluid.sweeping.asking import Asking
from fluid.sweeping.callbacks import Callbacks
from fluid.sweeping.closing import SweepClosing
from fluid.sweeping.even_pace import EvenPace
from fluid.sweeping.joint import JointStarts
from fluid.sweeping.plan import (
    SweepFailedError,
    SweepPlan,
    SweepTrial,
    UnreportedMetricError,
    require_own_budgets,
)
from fluid.sweeping.reported import SweepMetrics
from fluid.sweeping.resuming import EarlierEvent, EarlierResumption, EarlierSweep, other_arguments, require_same
from fluid.sweeping.serial import SerialWork
from fluid.sweeping.submitting import SweepTrials
from fluid.sweeping.under_way import UnderWay
from fluid.sweeping.vain import VainSweep
from fluid.trialgroup import Trial, TrialState

#: Most trials submitted in one step: a sweep of many begins while the rest is sampled.
_CHUNK = 1024
#: Seconds between two looks at trials that are to rest.
_REST_LOOK_S = 0.05
#: Seconds between two looks whether other drivers have stopped their trials of a sweep that is over.
_SETTLE_LOOK_S = 0.02
#: States in which a trial ends that the sweep has stopped: it may fail before it hears of that.
_TOLD = frozenset(state.value for state in TrialState if state.is_over)


class SweepLoop(TrialListener):
    """Runs one sweep, by a plan.

    Attributes:
        trials: those that were started.
        was_resumed: whether it goes on with what an earlier session has left.
        reason: what ended the sweep before its trials were done; ``None`` if nothing did.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self._under_way = UnderWay(plan)
        self._clock: Clock = MonotonicClock()
        self.trials = SweepTrials(plan, self)
        self.reason: str | None = None
        self.was_resumed = False
        self._callbacks = Callbacks(plan.callbacks, plan.name)
        self.tells_failures, self.tells_unfinished = self._callbacks.tells_failures, True
        self._work = SerialWork()
        self._deadline: float | None = None  # When the time budget ends.
        self._asking = Asking(
            plan.searcher, plan.samples, is_slow=plan.learns, do=self._do, take=self._take_up, resume=self._fill
        )
        #: Trials that have come to the budget of their suggestion, by its token: the searcher may let them continue.
        self._waiting: dict[int, SweepTrial] = {}
        self._reported = SweepMetrics(plan)
        self._vain = VainSweep(plan.space)
        self._error: BaseException | None = None
        self._is_over = False
        #: Whether all has gone to rest that does not run on to its end, and nothing is decided any more.
        self._rests = False
        #: Trials of others' states at an iteration that have not begun yet, by the member that is there, and stays.
        self._forking: dict[int, set[str]] = {}
        self._pace: EvenPace | None = None
        if isinstance(plan.scheduler, Population) and not plan.scheduler.options.synchronous:
            self._pace = EvenPace(plan.scheduler.interval, self._go)
        #: Of trials that failed in an earlier session, how often each was tried again since; while these are replayed.
        self._retries = Counter[str]()
        #: The end by a deadline of the sweep's own.
        self.closing = SweepClosing(self.trials, self._take, self._rest_or_stop, self._rest, lambda: self._has_all)
        #: Begins the trials of a sweep that several drivers work; ``None`` if this one works it alone.
        self._joint: JointStarts | None = None

    def run(self, executor: FluidExecutor, earlier: EarlierSweep | None = None) -> None:
        """Runs until all trials have ended, or a rule ends the sweep.

        Args:
            executor: runs the trials.
            earlier: what an earlier session has left of the sweep, whose group goes on with this listener; ``None`` to
                begin.

        Raises:
            Exception: what ended the sweep.
        """
        self.trials.executor, self._clock, self.was_resumed = executor, executor.session.clock, earlier is not None
        executor.session.require_open("fluid.run")
        self._asking.begin(executor.session.hold)
        budget_s = self.plan.time_budget_s
        self._deadline = None if budget_s is None else self._clock.now() + budget_s
        self.trials.due_at = None if self.plan.deadline_s is None else self._clock.now() + self.plan.deadline_s
        self._under_way.begin(executor)
        self._vain.begin(executor)
        if executor.session.joint is not None:
            self._join(executor.session.joint)
        else:
            self._work.start(partial(self._guard, self._fill if earlier is None else partial(self._go_on, earlier)))
        try:
            self._await_end()
            while self._error is None and not self._is_settled:
                self._asking.run_errand(_SETTLE_LOOK_S)
        finally:
            if self._joint is not None:
                with suppress(FluidError):  # The session has ended.
                    executor.session.do(self._joint.detach)
        if self._error is not None:
            raise self._error
        self._asking.run_all()
        self._reported.require_any(self.trials.by_id.values())

    @property
    def _is_settled(self) -> bool:
        """Whether no other driver has a trial still that the sweep has stopped."""
        try:
            return self._joint is None or self.trials.executor.session.do(self._joint.is_settled)
        except FluidError:  # The session has ended.
            return True

    def _await_end(self) -> None:
        while not self._is_over:
            try:
                self._asking.run_errand(self._seconds_left)
            except Exception as error:
                self._fail(error)
            self._do(self._check_time)
            if self.trials.resting:
                self._look_at_rest()

    def _join(self, session: JointSession) -> None:
        """Works the sweep together with other drivers: all that it does is done in the session's thread.

        So it is done where the log is read, one thing after another.

        Raises:
            InvalidFieldError: each driver would make trials of its own, or brackets would overlap.
        """
        if self.plan.seed is None:
            reason = "cannot be in a shared folder: all drivers make the same trials"
            raise InvalidFieldError("seed", None, reason)
        if isinstance(self.plan.scheduler, Brackets) and self.plan.scheduler.one_by_one:
            reason = "begins a bracket when the one before has ended, and drivers begin trials by themselves: leave "
            raise InvalidFieldError("synchronous", True, f"{reason}synchronous out where join=True")
        self._joint = JointStarts(
            self.plan,
            self.trials,
            self._asking,
            begin=self._begin,
            do=self._do,
            fail=self.fail,
            is_over=lambda: self.reason is not None or self._is_over,
        )
        self._work.start(lambda: None)
        self.trials.executor.session.do(partial(self._joint.attach, session))

    def abandon(self) -> None:
        """Decides nothing more, after an interruption; tells the searcher, if it learns, of what was not told yet."""
        if self.plan.learns and self._error is None:
            self._do(self._tell_open)
            self._asking.run_all()
        self._is_over = True

    def fail(self, error: BaseException) -> None:
        """Ends the sweep at once: :meth:`run` raises the error. Callbacks may call it."""
        self._take(partial(self._fail, error))

    def _tell_open(self) -> None:
        self._asking.close()
        for trial in self.trials.by_number.values():
            self._tell(trial, TrialState.STOPPED.value, trial.values)

    # -- events, in the session's thread -------------------------------------------------------------------

    def on_start(self, trial_id: str) -> None:
        self._callbacks.on_start(trial_id)
        if self._forking or self._pace is not None:
            self._take(partial(self._have_begun, [trial_id]))

    def on_result(self, result: Result) -> None:
        if self.plan.callbacks:
            self._callbacks.on_result(result)
        self._take(partial(self._record, result), counts=True)

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        self._callbacks.on_end(trial_id, state, failure)  # First: the last one may end the sweep.
        self._take(partial(self._record_end, trial_id, state, failure), counts=True)

    def on_request(self, request: TrialRequest) -> None:
        self._callbacks.on_request(request)

    def on_broken(self, error: BaseException) -> None:
        if self._rests and self._is_over:
            return  # The session ends as the sweep has ended: for now.
        problem = FluidError(f"the executor ended before the sweep: {error}")
        problem.__cause__ = error
        self._callbacks.on_broken(error)
        limit = error.reason if isinstance(error, LimitReachedError) else None
        self._take(partial(self._fail, problem) if limit is None else partial(self._break_off, limit))

    def _take(self, piece: Callable[[], None], *, counts: bool = False) -> None:
        """Takes an event."""
        self._do(piece, counts=counts)
        if self._is_over:
            self._asking.wake()

    def _do(self, piece: Callable[[], None], *, counts: bool = False) -> None:
        """Does a piece of work, here or in the thread that is at it; one that ``counts`` also when all is over."""
        self._work.add(partial(self._guard, piece, counts=counts))
        # A session that goes on may report before this sweep has its executor.
        if self._joint is not None and not self.trials.executor.session.is_in_thread:
            with suppress(FluidError):  # The session has ended, and this thread may do what is left.
                self.trials.executor.session.do(self._work.do)
                return
        self._work.do()

    @property
    def _seconds_left(self) -> float | None:
        if self.trials.resting:
            return _REST_LOOK_S
        return None if self._deadline is None else max(0.0, self._deadline - self._clock.now())

    def _check_time(self) -> None:
        if self._deadline is not None and self._clock.now() >= self._deadline:
            self._deadline = None
            self._rest(f"the time budget of {self.plan.time_budget_s:g} s was used up")

    def _guard(self, piece: Callable[[], None], *, counts: bool = False) -> None:
        """Does a piece of work; an error in it ends the sweep."""
        if self._is_over and not counts:
            return
        try:
            piece()
            if self.trials.refused:
                self._end_refused()
        except LimitReachedError as error:  # As it takes no further trials; :meth:`on_broken` is about to be called.
            self._break_off(error.reason)
        except BaseException as error:  # What the user gave may raise anything; the caller's thread, Ctrl-C.
            if not isinstance(error, Exception) and not self.trials.executor.session.is_in_thread:
                raise
            self._fail(error)

    # -- starting trials -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Starts trials while there is room for them."""
        if self.trials.is_replaying:
            return
        if self._joint is not None:
            self._finish_if_done()
            return
        if self.plan.learns:
            while self._has_room and self._asking.ask():
                pass
        while not self.plan.learns and not self._asking.is_done:
            fresh: list[Trial] = []
            while len(fresh) < _CHUNK and self._has_room and (trial := self._next()) is not None:
                fresh.append(trial)
            if not fresh:
                break
            self.trials.submit(fresh)
        self._finish_if_done()

    @property
    def _has_room(self) -> bool:
        scheduler, pending = self.plan.scheduler, self._asking.pending
        if isinstance(scheduler, Brackets) and not scheduler.may_start(pending):
            return False
        return self._under_way.has_room(self.trials.open - len(self.trials.resting) + pending)

    def _next(self) -> Trial | None:
        """Makes the next trial; ``None`` if there are no more."""
        suggestion = None if self._asking.is_done else self._asking.ask_now()
        if suggestion is None:
            return None
        made = self.trials.begin(suggestion)
        self._do_what_follows()
        if self._pace is not None and not self.trials.is_replaying:
            self._pace.waits(self.trials.by_id[made.id].number, 0)
        return made

    @property
    def _has_all(self) -> bool:
        """Whether no further trial begins."""
        return self._asking.is_done if self._joint is None else self._joint.has_all or self.reason is not None

    def _begin(self, suggestion: Suggestion) -> None:
        """Begins a trial by a suggestion."""
        self.trials.submit([self.trials.begin(suggestion)])
        self._do_what_follows()

    def _do_what_follows(self) -> None:
        """Does what the scheduler has decided as trials began behind its first rung."""
        while self.trials.decided:
            self._decide(*self.trials.decided.pop(0))

    def _take_up(self, suggestion: Suggestion) -> None:
        """Starts or extends a trial as the searcher has suggested."""
        if suggestion.budget is not None:
            require_own_budgets(self.plan, suggestion.budget)
        if self._joint is not None:
            self._joint.take(suggestion)
            return
        token = suggestion.continues
        trial = None if token is None else self._waiting.pop(token, None)
        if trial is None:
            self._begin(suggestion)
            return
        trial.suggestion, trial.is_told = suggestion, False
        if suggestion.budget is not None and suggestion.budget > trial.iteration:
            self.trials.extend(trial, suggestion.budget, self.plan.budget - suggestion.budget)
        else:
            self._await(trial)

    # -- what trials report --------------------------------------------------------------------------------

    def _record(self, result: Result) -> None:
        trial, plan = self.trials.by_id.get(result.trial_id), self.plan
        if trial is None:
            return
        if self._pace is not None and self._may_decide:
            self._pace.runs(trial.number)
        found, *_ = self._reported.take(trial, result)
        self._vain.note_result()
        if trial.stop is not None or self.reason is not None or self._is_over:
            return
        if not self.trials.is_replaying:
            self._reported.require_spelling(trial, result)
        stop = plan.rules.result(trial.number, None if found is None else plan.score(found), result.number)
        if self._reported.is_overdue(trial) or (stop is not None and trial.values is None):
            trial.stop, trial.failure = TrialState.FAILED.value, self._reported.failure_of(trial)
            self.trials.stop(trial, trial.failure)
        elif stop is not None:
            trial.stop = (TrialState.DONE if stop.is_success else TrialState.STOPPED).value
            self.trials.stop(trial, trial.stop)
        if plan.rules.reason is not None:
            self._end(plan.rules.reason)
        elif self._under_way.note(result.rows):
            self._fill()
        if not self.trials.is_replaying:  # What comes behind may have the metric.
            self._reported.warn(result)
        if self._deadline is not None:
            self._check_time()  # The caller's thread may be asking.

    def _record_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        trial, plan = self.trials.by_id.get(trial_id), self.plan
        if trial is None or not trial.is_open:
            return
        trial.is_open = False
        self.trials.open -= 1
        self._have_begun([trial_id])
        self.trials.resting.discard(trial_id)
        if self._is_over:
            self.trials.note_end(trial, state, failure)
            return
        reports_later = state == TrialState.DONE and trial.stop is None and self._may_report_later(trial)
        if trial.results and not reports_later and not self.trials.is_replaying:
            self._reported.warn(trial.results[-1], trial_ended=True)
        is_told = state in _TOLD  # Its outcome was told when the sweep stopped it.
        if failure is not None and state in _TOLD and trial.stop in (None, state):
            self._record_failure(trial, failure, state)
        elif self._rests:
            self.trials.note_end(trial, state, failure)
        elif self.reason is not None:
            is_whole = trial.iteration >= plan.budget or trial.iteration < trial.budget
            outcome = TrialState.DONE if is_whole else TrialState.STOPPED
            self._let_go(trial, None if is_told else outcome.value)
        elif reports_later:
            self.trials.extend(trial, trial.budget + 1, plan.budget - trial.budget - 1)
        elif state == TrialState.DONE and trial.values is None:  # It is at its first rung, or has no more to do.
            missing = trial.failure or self._reported.failure_of(trial)
            self.trials.stop(trial, missing)
            self._record_failure(trial, missing, TrialState.FAILED.value)
        elif state == TrialState.DONE and trial.stop is None and trial.is_limited_below(plan.budget):
            self._await(trial)
        elif state == TrialState.DONE and trial.iteration >= trial.budget and trial.stop is None:
            if plan.learns and plan.extends and self._is_told_of(trial):
                self._asking.observe(trial.outcome(TrialState.PAUSED.value, trial.values, with_metrics=True))
            self._decide(trial, self.trials.reached(trial))
        else:
            self._let_go(trial, None if is_told else trial.stop or TrialState.DONE.value)
            self._decide(trial, self.trials.ended(trial))
        self._fill()

    def _may_report_later(self, trial: SweepTrial) -> bool:
        if trial.values is not None or trial.failure is not None:
            return False
        return self._reported.may_come(trial, self.trials.rung_of(trial).iterations)

    def _record_failure(self, trial: SweepTrial, failure: Failure, state: str) -> None:
        """Takes it that a trial has failed, or is infeasible."""
        trial.state, trial.failure = TrialState(state).value, failure
        ran_out = self.plan.oom_is_worst and failure.kind == "out_of_memory"
        is_worst = ran_out or state == TrialState.INFEASIBLE
        del self.trials.by_number[trial.number]
        if not self._retries[trial.trial_id]:
            self._tell(trial, trial.state, self._reported.worst.values if ran_out else None)
        if failure.kind == "metric" and not self._retries[trial.trial_id]:
            self._reported.note_failed(trial, self.trials.by_id.values())
        if self.reason is None:
            self._decide(trial, self.trials.ended(trial, is_worst=is_worst))
        if self.reason is None and not self.trials.is_replaying:
            self._vain.note_failed(trial, failure)

    def _decide(self, trial: SweepTrial, decision: RungDecision) -> None:
        """Does what the scheduler has decided after a trial."""
        if (decision.promoted or decision.forked) and self.closing.is_closed:
            self._rest(self.closing.reason)
            return
        further = list(decision.promoted)
        for exploit in decision.forked:  # First: one that is promoted may leave the state that is wanted.
            loser, parent = self.trials.by_number[exploit.trial], self.trials.by_number[exploit.parent]
            if self.trials.is_over(parent):  # Its end is about to be told.
                assert isinstance(self.plan.scheduler, Population)
                further.append(self.plan.scheduler.keeps(exploit.trial))
                continue
            self._let_go(loser, TrialState.STOPPED.value)
            forked = self.trials.fork(loser, parent, exploit)
            if exploit.at is not None:
                self._forking.setdefault(exploit.parent, set()).add(forked.trial_id)
            if self._pace is not None and self._may_decide:
                self._pace.waits(exploit.trial, parent.iteration)
        for promotion in further:
            promoted, later = self.trials.by_number[promotion.trial], promotion.trial in self._forking
            if self._pace is not None and self._may_decide:
                later = not self._pace.may_go(promotion.trial, promoted.iteration)
            self.trials.extend(promoted, promotion.budget, promotion.follow_up_iterations, later=later)
        for number in decision.ended:
            ended = self.trials.by_number[number]
            self._let_go(ended, (TrialState.DONE if ended.iteration >= self.plan.budget else TrialState.STOPPED).value)
        self.plan.rules.decided(trial.number, is_over=trial.number not in self.trials.by_number)
        if self.plan.rules.reason is not None:
            self._end(self.plan.rules.reason)

    def _have_begun(self, trial_ids: Iterable[str]) -> None:
        """Lets the members go on that waited for these trials, once they wait for no other one."""
        begun = set(trial_ids)
        if self._pace is not None and self._may_decide:
            for trial in filter(None, map(self.trials.by_id.get, begun)):
                self._pace.runs(trial.number)
        for number in [number for number, waiting in self._forking.items() if waiting & begun]:
            self._forking[number] -= begun
            if not self._forking[number]:
                del self._forking[number]
                if not self.trials.is_replaying:
                    self._go(number)

    def _go(self, number: int) -> None:
        """Lets a member go on that was to go on later."""
        if (trial := self.trials.by_number.get(number)) is not None:
            self._grant(trial)

    @property
    def _may_decide(self) -> bool:
        """Whether trials are under way by what is decided now, and not by what an earlier session has decided."""
        return not (self.trials.is_replaying or self._is_over or self.reason is not None)

    def _grant(self, trial: SweepTrial) -> None:
        """Grants a trial the iterations to its budget, if it was to go on later; before its end, too."""
        if trial.is_open and trial.stop is None and trial.budget > trial.granted:
            self.trials.grant(trial, self.plan.budget - trial.budget)

    def _end_refused(self) -> None:
        """Ends trials that could not be extended; not at their promotion, as their end may promote others."""
        while self.trials.refused:
            self._record_end(self.trials.refused.pop(), TrialState.DONE.value, None)

    def _let_go(self, trial: SweepTrial, outcome: str | None) -> None:
        """Lets a trial go that will not continue, and tells the sampler what it came to.

        Args:
            trial: the trial.
            outcome: with which it is stopped; ``None`` if it was stopped before.
        """
        del self.trials.by_number[trial.number]
        self._waiting.pop(trial.suggestion.token, None)
        trial.state = outcome or trial.stop or TrialState.STOPPED.value
        self._tell(trial, trial.state, trial.values)
        if outcome is not None:
            self.trials.stop(trial, outcome)

    def _await(self, trial: SweepTrial) -> None:
        """Tells what a trial came to at the budget of its suggestion; the searcher may let it continue."""
        self._waiting[trial.suggestion.token] = trial
        self._tell(trial, TrialState.PAUSED.value, trial.values)

    def _tell(self, trial: SweepTrial, state: str, values: tuple[float, ...] | None) -> None:
        if not trial.is_told and self._is_told_of(trial):
            trial.is_told = True
            self._asking.tell(trial.outcome(state, values, with_metrics=self.plan.learns))

    def _is_told_of(self, trial: SweepTrial) -> bool:
        """Whether the searcher hears of a trial: it has suggested it, or takes what others' have suggested, too."""
        return trial.suggestion.token != ELSEWHERE or callable(getattr(self.plan.searcher, "share", None))

    # -- going on ------------------------------------------------------------------------------------------

    def _go_on(self, earlier: EarlierSweep) -> None:
        """Takes what an earlier session reported, does what it had no time for, and starts further trials."""
        self.trials.begin_replay()
        for past in earlier.trials:
            if "." not in past.trial_id.removeprefix(self.plan.name):  # Others start from the states of these.
                require_same(self._next(), past)
        self.trials.remember({past.trial_id: past for past in earlier.trials})
        self._retries = earlier.retries()
        for event in earlier.events:
            self._replay(event)
        self._end_at_budget()
        for past in earlier.trials:
            trial = self.trials.by_id.get(past.trial_id)
            if trial is None:
                raise other_arguments(past.trial_id, "no member would give up for it: give the same samples and PBT")
            self._follow(past.trial_id, past.budget)
            if past.budget > trial.budget and trial.state == UNFINISHED:
                why = f"it was to run {past.budget} iterations, and would run {trial.budget}: give the same samples"
                raise other_arguments(past.trial_id, why)
            if past.is_over and past.ended is not None:
                self._record_end(past.trial_id, past.ended.value, past.failure)
            if past.retried:
                self._retry(trial)
        self._have_begun(trial.trial_id for trial in self.trials.by_id.values() if trial.results)
        stops = self.trials.end_replay()
        for past in earlier.trials:
            trial = self.trials.by_id[past.trial_id]
            trial.granted = past.budget
            if past.trial_id in stops:
                self.trials.stop(trial, stops[past.trial_id])
            elif trial.number not in self._forking:
                self._grant(trial)
        self._fill()

    def _replay(self, event: EarlierEvent) -> None:
        if isinstance(event, Result):
            self._follow(event.trial_id, event.iteration)
            self._record(event)
        elif isinstance(event, EarlierResumption):
            self._end_at_budget()
            for trial_id in sorted(event.unfinished & self.trials.by_id.keys()):
                self._retry(self.trials.by_id[trial_id])
        else:
            self._record_end(event.trial_id, event.state.value, event.failure)
        self._end_refused()

    def _follow(self, trial_id: str, iterations: int) -> None:
        """Promotes a trial that waits here, and ran so far in an earlier session, whose samples were fewer."""
        trial, scheduler = self.trials.by_id.get(trial_id), self.plan.scheduler
        if trial is None or trial.is_open or trial.number not in self.trials.by_number:
            return
        if iterations > trial.budget and isinstance(scheduler, AsynchronousHalving):
            self._decide(trial, scheduler.promote(trial.number))

    def _retry(self, trial: SweepTrial) -> None:
        """Takes up a trial again that had failed: the scheduler knows that it had, the searcher does not."""
        if trial.state == TrialState.FAILED:
            self._retries[trial.trial_id] -= 1
            self.trials.reopen(trial)
            if not trial.runs_whole:
                self.plan.scheduler.retried(trial.number)
            self._reported.forget_failed(trial.trial_id)

    def _end_at_budget(self) -> None:
        """Ends the trials that a killed session had no time to end, lower rungs first: others may have run on since."""
        for trial in sorted(self.trials.by_id.values(), key=attrgetter("iteration", "trial_id")):
            if trial.is_open and trial.iteration >= trial.budget and trial.stop is None:
                self._record_end(trial.trial_id, TrialState.DONE.value, None)

    # -- the end -------------------------------------------------------------------------------------------

    def _end(self, reason: str | None) -> None:
        """Ends the sweep: trials under way stop after their iteration, but for those that run on to their end."""
        if self.reason is not None and not self.closing.is_closed:
            return
        self.reason = self.reason or reason
        self._asking.close()
        if self.trials.handle is None:
            self._is_over = True
        for trial in list(self.trials.by_number.values()):
            if not trial.is_open:
                self._let_go(trial, TrialState.STOPPED.value)
            elif trial.stop is None and trial.trial_id not in self.closing.run_on:
                self._grant(trial)
                trial.stop = TrialState.STOPPED.value
                self.trials.stop(trial, trial.stop)
        self._finish_if_done()

    def _rest(self, reason: str | None) -> None:
        """Ends the sweep for now: what runs rests after its iteration, and all goes on when the sweep is resumed.

        One that cannot be resumed, as a rehearsal or one whose searcher has its own state, is ended.
        """
        if not self._can_rest:
            self._end(reason)
            return
        if self._rests or (self.reason is not None and not self.closing.is_closed):
            return
        self.reason, self._rests = self.reason or reason, True
        self._asking.close()
        for trial in list(self.trials.by_number.values()):
            if trial.is_open and trial.stop is None and trial.trial_id not in self.closing.run_on:
                self._grant(trial)
                self.trials.rest(trial)
        self._finish_if_done()

    def _rest_or_stop(self, trial: SweepTrial) -> None:
        """Has a trial rest after its iteration; stops it in a sweep that cannot be resumed."""
        self._grant(trial)
        if self._can_rest:
            self.trials.rest(trial)
        else:
            trial.stop = TrialState.STOPPED.value
            self.trials.stop(trial, trial.stop)

    @property
    def _can_rest(self) -> bool:
        goes_on = self.plan.goes_on or self._joint is not None  # Other drivers go on.
        return goes_on and not self.trials.executor.session.hold.is_virtual

    def _look_at_rest(self) -> None:
        """Ends the sweep once nothing is under way but trials that rest: no event tells of these."""
        if self.trials.open > len(self.trials.resting):
            return
        if self.trials.has_come_to_rest:
            self._do(self._finish_if_done)

    def _break_off(self, reason: str) -> None:
        """Ends the sweep: its session is over, and the trials are saved."""
        self.reason, self._is_over = self.reason or reason, True
        self._asking.close()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, (SweepFailedError, UnreportedMetricError)):
            self.tells_failures = True
        self._error, self._is_over = error, True

    def _finish_if_done(self) -> None:
        self._asking.require_progress(self.trials.open)
        under_way = self.trials.open - len(self.trials.resting)
        if self.trials.resting and not (under_way or self.trials.has_come_to_rest):
            return
        if not under_way and not self._asking.pending and (self._has_all or self._rests):
            for trial in [] if self._rests else list(self._waiting.values()):
                has_ended = trial.iteration < trial.budget
                self._let_go(trial, (TrialState.DONE if has_ended else TrialState.STOPPED).value)
            self.reason, self._is_over = self.reason or self.closing.cut_by, True
