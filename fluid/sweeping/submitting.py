"""The trials of a sweep as the executor has them: submits, extends and stops them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.random_state import SeedOrigin
from fluid.results.records import TrialResult
from fluid.results.submitted import UNFINISHED
from fluid.search.population import Population, Standing
from fluid.search.rungs import Exploit, RungDecision
from fluid.search.suggestion import Suggestion
from fluid.search_shape import Rung
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import TrialListener
from fluid.sweeping.plan import SweepPlan, SweepTrial
from fluid.sweeping.population import next_id, standing_of
from fluid.sweeping.resuming import EarlierTrial, require_same
from fluid.sweeping.under_way import most_under_way
from fluid.trialgroup import Submission, Trial, TrialGroup, TrialState

#: Seconds to wait at most until trials that have left their devices to rest are saved.
_SAVED_S = 25.0
#: Seconds until a deadline at least: the first config may take longer than all there was.
_LEAST_S = 1e-3


class SweepTrials:
    """The trials of one sweep.

    Args:
        plan: what the sweep is to do.
        listener: hears of the trials.

    Attributes:
        executor: runs them; set before the first one is submitted.
        handle: of their group; ``None`` before it is submitted.
        by_id: all trials, in the order in which they were started.
        by_number: those that are not over.
        open: how many run, or wait for a device, also of those that rest.
        resting: ids of those that go on only in a session that resumes this one, and had not ended by themselves.
        refused: ids of trials that were to be extended although they had ended by themselves.
        due_at: when their group is to have ended, on the session's clock; ``None`` for no deadline.
    """

    executor: FluidExecutor

    def __init__(self, plan: SweepPlan, listener: TrialListener) -> None:
        self._plan = plan
        self._listener = listener
        self.handle: TrialGroupHandle | None = None
        self.by_id: dict[str, SweepTrial] = {}
        self.by_number: dict[int, SweepTrial] = {}
        self.open = 0
        self.resting: set[str] = set()
        self.refused: list[str] = []
        #: What follows from trials that began behind the first rung, and is still to be done.
        self.decided: list[tuple[SweepTrial, RungDecision]] = []
        self.due_at: float | None = None
        #: When all that are to rest had left their devices; ``None`` before.
        self._rested_at: float | None = None
        #: The trainable as it is at the start of the sweep, whose trials are submitted in steps.
        self._submission = Submission(plan.seed, plan.reuse)
        #: While an earlier session's events are taken: what the trials are to be stopped with, by id.
        self._replayed: dict[str, str | Failure] | None = None
        #: Meanwhile: the rung that each trial came to last, and its score.
        self._ranks: dict[str, tuple[Rung, float]] = {}
        #: What an earlier session has left of the trials.
        self._past: Mapping[str, EarlierTrial] = {}
        #: Trials that follow from its events, but were not submitted any more.
        self._unsubmitted: list[Trial] = []
        if isinstance(plan.scheduler, Population):
            plan.scheduler.standing = self._standing

    @property
    def is_replaying(self) -> bool:
        """Whether an earlier session's events are taken, so that nothing is submitted or stopped."""
        return self._replayed is not None

    @property
    def seed_origin(self) -> SeedOrigin:
        """What the seeds of the trials follow from, beside their order."""
        return self._submission.origin

    @seed_origin.setter
    def seed_origin(self, origin: SeedOrigin) -> None:
        self._submission.origin = origin

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Ids of those that are not over."""
        return tuple(trial.trial_id for trial in list(self.by_number.values()))

    @property
    def results(self) -> tuple[TrialResult, ...]:
        """What the user gets of them, in the order in which they were started."""
        run_dir, seeds = self.executor.run_dir, {} if self.handle is None else self.handle.seeds
        trials = list(self.by_id.values())
        return tuple(trial.result(self._plan.name, run_dir, seeds.get(trial.trial_id)) for trial in trials)

    def begin(self, suggestion: Suggestion) -> Trial:
        """Makes the trial of a suggestion."""
        start = self._plan.scheduler.start()
        assert start is not None  # It starts as many trials as there are samples.
        budget = start.budget if suggestion.budget is None else suggestion.budget
        further = start.follow_up_iterations if suggestion.budget is None else self._plan.budget - budget
        trial = SweepTrial(
            number=start.trial,
            trial_id=f"{self._plan.name}-{start.trial:05d}",
            suggestion=suggestion,
            config={**self._plan.constants, **suggestion.config} if self._plan.constants else suggestion.config,
            budget=budget,
            granted=budget,
        )
        begins_at = self._plan.starts.get(trial.number)
        if begins_at is not None and (begins_at.at or 0) >= budget:
            # It has passed rungs of an earlier sweep. Those of this one do without it.
            trial.runs_whole, further = True, 0
            trial.budget = trial.granted = self._plan.budget
            self.decided.append((trial, self._plan.scheduler.ended(trial.number)))
        return self.enter(trial, further)

    def rung_of(self, trial: SweepTrial) -> Rung:
        """The rung to which a trial is on its way."""
        return Rung(self._plan.budget) if trial.runs_whole else self._plan.scheduler.rung_of(trial.number)

    def ended(self, trial: SweepTrial, *, is_worst: bool = False) -> RungDecision:
        """A trial will not continue; returns what follows for others."""
        return RungDecision() if trial.runs_whole else self._plan.scheduler.ended(trial.number, is_worst=is_worst)

    def enter(
        self, trial: SweepTrial, follow_up_iterations: int, *, parent: SweepTrial | None = None, at: int | None = None
    ) -> Trial:
        """Enters a trial that is about to be submitted.

        Args:
            trial: the trial.
            follow_up_iterations: that later rungs may add after its budget.
            parent: the trial from whose state it starts; ``None`` to begin afresh.
            at: iterations done by that state; ``None`` for the newest one.
        """
        self.by_id[trial.trial_id] = self.by_number[trial.number] = trial
        self.open += 1
        made = Trial(
            self._plan.trainable,
            trial.config,
            budget=trial.budget,
            trial_id=trial.trial_id,
            follow_up_iterations=follow_up_iterations,
            start_from=self._plan.starts.get(trial.number) if parent is None else parent.trial_id,
            at=at,
            **self._plan.trial_options,
        )
        trial.start = made.start_from
        trial.config = made.config  # What runs, whatever the searcher does with what it suggested.
        return made

    def fork(self, loser: SweepTrial, parent: SweepTrial, exploit: Exploit) -> SweepTrial:
        """Starts the trial that takes the place of one that has given up, from another's state; returns it."""
        trial = SweepTrial(
            number=exploit.trial,
            trial_id=next_id(loser.trial_id, self._plan.name),
            suggestion=loser.suggestion,
            config=exploit.config,
            budget=exploit.budget,
            granted=exploit.budget,
            latest=parent.latest,  # Its state's, until it reports some itself.
            is_told=True,
        )
        made = self.enter(trial, exploit.follow_up_iterations, parent=parent, at=exploit.at)
        if self._replayed is None:
            try:
                self.submit([made])
            except InvalidFieldError as error:
                reason = f"cannot be trained by 'pbt': trial {error.value!r} {error.reason}"
                raise InvalidFieldError("trainable", self._plan.trainable, reason) from error
        elif (past := self._past.get(made.id)) is not None:
            require_same(made, past)
        else:
            self._unsubmitted.append(made)
        return trial

    def is_over(self, trial: SweepTrial) -> bool:
        """Whether a trial has ended for good, also if its end was not told yet."""
        if self._replayed is not None or self.handle is None:
            return False
        return self.handle.standing().states[trial.trial_id].is_over

    def _standing(self, number: int, loser: int) -> Standing:
        """How a member of a population stands, if another one may give up for its state."""
        assert isinstance(self._plan.scheduler, Population)
        past = {} if self._replayed is None else self._past
        members = self.by_number[number], self.by_number[loser]
        return standing_of(*members, past, self._plan.name, self._plan.scheduler.interval)

    def submit(self, trials: list[Trial]) -> None:
        """Submits trials."""
        if self.handle is None:
            devices, in_rounds = max(1, self.executor.max_devices), self.executor.in_rounds
            search = self._plan.search(most_under_way(self._plan, devices, in_rounds=in_rounds))
            said = self._plan.group
            group = TrialGroup(
                trials,
                self._plan.name,
                search=search,
                requires=said.requires,
                owner=said.owner,
                submission=self._submission,
            )
            terms: dict[str, Any] = {"priority": said.priority, "preempt": said.preempt, "weight": said.weight}
            if self.due_at is not None:
                terms["deadline"] = max(_LEAST_S, self.due_at - self.executor.session.clock.now())
            self.handle = self.executor.submit_trialgroup(group, self._listener, **terms)
        else:
            self.handle.add(*trials)

    def extend(self, trial: SweepTrial, budget: int, follow_up_iterations: int, *, later: bool = False) -> None:
        """Lets a trial that waits go on up to a budget; if it is to do so ``later``, it gets the iterations then."""
        trial.budget, trial.is_open = budget, True
        self.open += 1
        past = self._past.get(trial.trial_id)
        if trial.iteration >= budget:  # It has come there while its metric was awaited.
            self.refused.append(trial.trial_id)
        elif self._replayed is None:
            if not later:
                self.grant(trial, follow_up_iterations)
        elif past is not None and past.has_ended_by_itself and trial.granted + past.extended_by < budget:
            self.refused.append(trial.trial_id)

    def grant(self, trial: SweepTrial, follow_up_iterations: int) -> None:
        """Grants a trial the iterations up to its budget."""
        assert self.handle is not None
        further, trial.granted = trial.budget - trial.granted, trial.budget
        try:
            self.handle.extend(trial.trial_id, further, follow_up_iterations=follow_up_iterations)
        except InvalidFieldError:  # It has ended by itself, or the user has stopped it.
            self.refused.append(trial.trial_id)

    def reached(self, trial: SweepTrial) -> RungDecision:
        """A trial has come to its rung; returns what follows. Its checkpoint is kept in memory if it may go on."""
        if trial.runs_whole:
            return RungDecision(ended=(trial.number,))
        assert trial.values  # It has reported.
        scheduler, score = self._plan.scheduler, self._plan.score(trial.values[0])
        rung = scheduler.rung_of(trial.number)
        if self._replayed is not None:
            self._ranks[trial.trial_id] = rung, score
        elif self.handle is not None:
            self.handle.rank(trial.trial_id, rung, score)
        return scheduler.reached(trial.number, score)

    def stop(self, trial: SweepTrial, outcome: str | Failure) -> None:
        """Stops a trial after its iteration; one that has failed as the sweep finds, for that failure."""
        assert self.handle is not None
        if self._replayed is not None:
            self._replayed[trial.trial_id] = outcome
        elif isinstance(outcome, Failure):
            self.handle.fail(trial.trial_id, outcome)
        else:
            self.handle.stop(trial.trial_id, outcome)

    def note_end(self, trial: SweepTrial, state: str, failure: Failure | None) -> None:
        """Notes how a trial has ended, as nothing is decided any more; one that might be extended waits."""
        if state == TrialState.DONE and trial.stop is None and self._plan.extends:
            return
        trial.state = trial.stop or state
        trial.failure = failure if trial.state in (TrialState.FAILED, TrialState.INFEASIBLE) else None
        del self.by_number[trial.number]

    def rest(self, trial: SweepTrial) -> None:
        """Has a trial leave its device after its iteration, be saved, and go on when the sweep is resumed."""
        assert self.handle is not None
        self.resting.add(trial.trial_id)
        with suppress(InvalidFieldError):  # It has ended at this instant, and its end is about to be told.
            self.handle.set_aside(trial.trial_id)

    @property
    def has_come_to_rest(self) -> bool:
        """Whether all that are to rest do, and are saved if they can be in time."""
        if self.handle is None or not self.resting:
            return True
        standing, clock = self.handle.standing(), self.executor.session.clock
        states = [standing.states[trial_id] for trial_id in list(self.resting)]
        if not all(state.ended or state is TrialState.PAUSED for state in states):
            return False
        self._rested_at = clock.now() if self._rested_at is None else self._rested_at
        return standing.unsaved.isdisjoint(self.resting) or clock.now() >= self._rested_at + _SAVED_S

    def reopen(self, trial: SweepTrial) -> None:
        """Takes up a trial again that had failed."""
        trial.state, trial.failure, trial.stop, trial.is_open = UNFINISHED, None, None, True
        self.by_number[trial.number] = trial
        self.open += 1
        if self._replayed is not None:
            self._replayed.pop(trial.trial_id, None)

    def abandon(self) -> None:
        """Has what is under way leave its devices after its iteration: the executor is used further.

        It is not stopped: a call that resumes the sweep goes on with it.
        """
        if self.handle is None:
            return
        for trial in list(self.by_number.values()):
            if trial.is_open:
                with suppress(FluidError):
                    self.handle.set_aside(trial.trial_id)

    # -- going on with an earlier session's trials ---------------------------------------------------------

    def begin_replay(self) -> None:
        """Takes up the group that the executor has gone on with."""
        self.handle = next(handle for handle in self.executor.handles if handle.name == self._plan.name)
        group = next(inbox.group for inbox in self.executor.session.inboxes if inbox.group.name == self._plan.name)
        group.submission = self._submission
        devices, in_rounds = max(1, self.executor.max_devices), self.executor.in_rounds
        group.search = self._plan.search(most_under_way(self._plan, devices, in_rounds=in_rounds))
        self._replayed = {}

    def remember(self, past: Mapping[str, EarlierTrial]) -> None:
        """Takes what an earlier session has left of the trials, by id."""
        self._past = past

    def end_replay(self) -> Mapping[str, str | Failure]:
        """Ends the replay; returns what trials are to be stopped with, by id."""
        stops, self._replayed = self._replayed, None
        if self._unsubmitted:
            self.submit(self._unsubmitted)
        for trial in self.by_number.values():
            if (rank := self._ranks.pop(trial.trial_id, None)) is not None and self.handle is not None:
                self.handle.rank(trial.trial_id, *rank)
        return stops or {}
