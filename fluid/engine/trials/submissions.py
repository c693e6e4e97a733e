"""Requests of submitters. Each request has a check, which refuses it before any event of its call changes anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fluid.engine.core import Claims, SessionState
from fluid.engine.events import (
    BY_USER,
    OFFERED,
    OUTCOMES,
    SET_ASIDE,
    BudgetExtended,
    FailRequested,
    GroupRecovered,
    GroupSubmitted,
    GroupTerms,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    TrialForgotten,
    TrialHistory,
    TrialsAdded,
    TrialSetAside,
    TrialSpec,
)
from fluid.engine.policy import Policy
from fluid.engine.records import GroupRecord, Progress, Stage, TrialRecord
from fluid.engine.trials.lifecycle import Lifecycle
from fluid.engine.trials.residency import Residency
from fluid.engine.trials.resizing import Resizing
from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of
from fluid.resources import require_devices
from fluid.trial_fields import require_timeout
from fluid.trialgroup import TrialState

#: How a trial of an earlier session may have ended.
_ENDS = tuple(state for state in TrialState if state.ended)


class Submissions:
    """Checks and carries out requests of submitters."""

    def __init__(self, core: SessionState, lifecycle: Lifecycle, residency: Residency) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._residency = residency

    # -- groups --------------------------------------------------------------------------------------------

    def check_group(self, event: GroupSubmitted, claims: Claims) -> None:
        """Refuses a group whose id is taken, or one of whose trials cannot be."""
        claims.claim("group_id", event.group_id, self._core.groups)
        require_number("priority", event.terms.priority, at_least=0.0)
        for spec in event.trials:
            self._check_trial(spec, claims)

    def group_submitted(self, event: GroupSubmitted) -> None:
        """Queues a group's trials."""
        self._open_group(event.group_id, event.terms)
        self._queue_new(event.group_id, event.trials)

    def check_added(self, event: TrialsAdded, claims: Claims) -> None:
        """Refuses trials of an unknown group, or that cannot be."""
        if event.group_id not in self._core.groups:
            raise InvalidFieldError("group_id", event.group_id, "is unknown")
        for spec in event.trials:
            self._check_trial(spec, claims)

    def trials_added(self, event: TrialsAdded) -> None:
        """Queues further trials of a group."""
        self._queue_new(event.group_id, event.trials)

    def _queue_new(self, group_id: str, specs: Iterable[TrialSpec]) -> None:
        for spec in specs:
            trial = self._admit(group_id, spec)
            self._core.groups[group_id].count(trial)
            self._core.enqueue(trial, "submitted")

    def check_recovered(self, event: GroupRecovered, claims: Claims) -> None:
        """Refuses a group whose id is taken, or one of whose trials cannot be."""
        claims.claim("group_id", event.group_id, self._core.groups)
        for history in event.trials:
            self._check_trial(history.trial, claims, fits=history.ended is None)
            require_integer("budget", history.budget, at_least=1)
            require_integer("reported", history.reported, at_least=0)
            if history.ended is not None:
                require_one_of("ended", history.ended, _ENDS)

    def group_recovered(self, event: GroupRecovered) -> None:
        """Takes over a group of an earlier session: trials that had not ended are queued."""
        core = self._core
        group = self._open_group(event.group_id, event.terms)
        core.forgotten.update(event.forgotten)
        for history in event.trials:
            trial = self.recover(event.group_id, history)
            if history.ended is None:
                trial.held = BY_USER if history.paused else ""
                core.enqueue(trial, "recovered from an earlier session")
            else:
                group.open -= 1
                core.log(trial, f"{trial.state.value}: ended in an earlier session")

    def _open_group(self, group_id: str, terms: GroupTerms) -> GroupRecord:
        group = GroupRecord(group_id, terms, self._core.sharing.owner(terms))
        self._core.groups[group_id] = group
        for opened in self._core.policies.opened:
            opened(group)
        return group

    def recover(self, group_id: str, history: TrialHistory) -> TrialRecord:
        """Makes the record of a trial that has run elsewhere, which is not queued yet."""
        ended = None if history.ended is None else TrialState(history.ended)
        trial = self._admit(group_id, history.trial, ended or TrialState.QUEUED)
        trial.progress.budget, trial.progress.reported = history.budget, history.reported
        if history.failures:
            trial.limits = replace(trial.limits, failures=history.failures)
        trial.outcome = None if history.outcome is None else TrialState(history.outcome)
        if (found := history.checkpoint) is not None:
            trial.residence = replace(trial.residence, checkpoint=found, durable=None if found.in_memory else found)
        if ended is not None:
            trial.progress.go_back_to(history.reported)
        self._core.groups[group_id].count(trial)
        return trial

    def _check_trial(self, spec: TrialSpec, claims: Claims, *, fits: bool = True) -> None:
        """Refuses a trial whose id is taken, with a bad field, or, where ``fits`` is set, for which no device is."""
        claims.claim("trial_id", spec.trial_id, self._core.trials, self._core.forgotten)
        require_integer("budget", spec.budget, at_least=1)
        require_integer("max_width", spec.max_width, at_least=1)
        require_number("priority", spec.priority, at_least=float("-inf"))
        require_integer("follow_up_iterations", spec.follow_up_iterations, at_least=0)
        require_timeout("iteration_timeout_s", spec.iteration_timeout_s)
        require_devices("devices", spec.devices)
        asked = spec.memory, spec.constraint()
        if fits and asked not in claims.fitting:
            problem = self._core.feasibility.problem(*asked)
            if problem is not None:
                field, value, reason = problem
                hint = "; Requires(wait=True) waits for one" if field == "requires" else ""
                raise InvalidFieldError(field, value, f"trial {spec.trial_id!r} fits on no device: {reason}{hint}")
            claims.fitting.add(asked)

    def _admit(self, group_id: str, spec: TrialSpec, state: TrialState = TrialState.QUEUED) -> TrialRecord:
        """Makes the record of a trial, which its group does not count yet."""
        core = self._core
        starts_at = 0 if spec.start is None else spec.start.at or 0
        progress = Progress(spec.budget, follow_up_iterations=spec.follow_up_iterations, starts_at=starts_at)
        group = core.groups[group_id]
        trial = TrialRecord(spec, core.trials.new_row(), group_id, progress, state)
        trial.owner, trial.group_priority = group.owner, group.terms.priority
        trial.job = core.sharing.job(group.owner, group.terms, spec)
        core.trials.add(trial)
        for submitted in core.policies.submitted:
            submitted(trial)
        group.trial_ids[spec.trial_id] = None
        group.open += 1
        return trial

    # -- budgets -------------------------------------------------------------------------------------------

    def check_extension(self, event: BudgetExtended, claims: Claims) -> None:
        """Refuses to extend a trial that cannot go on."""
        require_integer("iterations", event.iterations, at_least=1)
        require_integer("follow_up_iterations", event.follow_up_iterations, at_least=0)
        trial = self._core.require_alive(event.trial_id, "extended")
        if trial.progress.finished_early:
            raise InvalidFieldError("trial_id", event.trial_id, "has ended by itself and cannot be extended")

    def budget_extended(self, event: BudgetExtended) -> None:
        """Gives a trial more iterations; one that was done is queued."""
        core, trial = self._core, self._core.trials[event.trial_id]
        if trial.state is TrialState.STOPPING or trial.state.is_over:
            core.log(trial, "was extended at the instant it ended")
            return  # the submitter is told of its end
        trial.progress.budget += event.iterations
        if trial.row in core.queue:
            core.scheduling.forget_kinds()
        self._set_follow_up(trial, event.follow_up_iterations)
        if trial.restored_for_call:  # the submitter waits for it again
            trial.restored_for_call = False
            for wanted_again in core.policies.wanted_again:
                wanted_again(trial)
            if trial.placement.launched and trial.state is not TrialState.STARTING:
                core.report_start(trial)
        if trial.state is TrialState.DONE and trial.progress.done >= trial.progress.budget:
            # A fork from a state that is beyond its budget.
            core.groups[trial.group_id].count(trial)
            core.report_end(trial)
        elif trial.state is TrialState.DONE:
            core.groups[trial.group_id].open += 1
            for extended in core.policies.extended:
                extended(trial)
            if not trial.held:  # Else another driver runs it.
                core.tell_if_set_back(trial, "it was extended")
            core.enqueue(trial, "extended")
        else:
            if trial.state.holds_devices or trial.row in core.queue:
                core.allocations.update_work(trial)
            core.top_up(trial)

    def _set_follow_up(self, trial: TrialRecord, iterations: int) -> None:
        """Sets what follows from a trial; one that waits is sorted in again, as that decides the order."""
        before, trial.progress.follow_up_iterations = trial.progress.follow_up_iterations, iterations
        if iterations != before and trial.row in self._core.queue:
            self._core.unqueue(trial)
            self._core.enqueue(trial, "extended")

    # -- ends ----------------------------------------------------------------------------------------------

    def check_stop(self, event: StopRequested, claims: Claims) -> None:
        """Refuses to stop an unknown trial."""
        self._core.require_known(event.trial_id)
        if event.outcome is not None:
            require_one_of("outcome", event.outcome, OUTCOMES)

    def stop_requested(self, event: StopRequested) -> None:
        """Stops a trial. One that has failed or was stopped stays as it is, but for its outcome."""
        trial = self._core.trials[event.trial_id]
        if event.outcome is not None:
            trial.outcome = TrialState(event.outcome)
            self._core.groups[trial.group_id].count(trial)
        self._lifecycle.stop(trial, now=event.now)

    def check_failed(self, event: FailRequested, claims: Claims) -> None:
        """Refuses to fail an unknown trial."""
        self._core.require_known(event.trial_id)

    def fail_requested(self, event: FailRequested) -> None:
        """Stops a trial, which is FAILED then. One that has failed or was stopped stays as it is."""
        trial = self._core.trials[event.trial_id]
        trial.limits = replace(trial.limits, verdict=trial.limits.verdict or event.failure)
        self._lifecycle.stop(trial)

    def check_forgotten(self, event: TrialForgotten, claims: Claims) -> None:
        """Refuses to forget a trial that has not ended."""
        if not self._core.require_known(event.trial_id).state.ended:
            raise InvalidFieldError("trial_id", event.trial_id, "has not ended and cannot be forgotten")

    def trial_forgotten(self, event: TrialForgotten) -> None:
        """Drops the record of a trial that has ended."""
        trial = self._core.trials[event.trial_id]
        if not trial.state.ended:  # an earlier event of this very call has queued it again
            self._lifecycle.stop(trial)
        self._forget(trial)

    def _forget(self, trial: TrialRecord) -> None:
        """Drops the record of a trial that has ended; later events of its lane are ignored."""
        self.drop(trial)
        self._core.groups[trial.group_id].forget(trial)
        self._core.forgotten.add(trial.trial_id)

    def drop(self, trial: TrialRecord) -> None:
        """Drops the record of a trial that holds no device, and what there is of its state."""
        core = self._core
        self._residency.drop(trial)
        core.refuse_calls(trial)
        for forgotten in core.policies.forgotten:
            forgotten(trial)
        core.trials.remove(trial)


# -- holds ---------------------------------------------------------------------------------------
#
# Pauses of the user: a trial that is paused by hand waits for no device until the user resumes it.
#
# One that a session sets aside, as no further iteration of it would end in time, is held in the same way, and saved.
#
# It leaves its devices after its iteration, as a preempted trial does, and is then PAUSED: neither queued nor known to
# planners. Its state stays resident in its lane, or is saved if the device needs the memory; a state that cannot be
# saved stays. A trial that ends before it has paused has ended, and is held no more.


class UserPauses(Policy):
    """Pauses and resumes trials by hand.

    Args:
        core: the session.
        lifecycle, residency, resizing: the parts whose transitions a pause causes.
    """

    def __init__(self, core: SessionState, lifecycle: Lifecycle, residency: Residency, resizing: Resizing) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._residency = residency
        self._resizing = resizing
        #: Held trials that are not PAUSED yet, by row. Read at every instant.
        self.under_way: dict[int, TrialRecord] = {}

    def forgotten(self, trial: TrialRecord) -> None:
        """Knows it no more."""
        self.under_way.pop(trial.row, None)

    def check_pause(self, event: PauseRequested | TrialSetAside, claims: Claims) -> None:
        """Refuses to pause a trial that has ended."""
        trial = self._core.require_known(event.trial_id)
        if trial.state.ended or trial.state is TrialState.STOPPING or trial.restored_for_call:
            state = TrialState.DONE if trial.restored_for_call else trial.state
            raise InvalidFieldError("trial_id", event.trial_id, f"is {state.value} and cannot be paused")

    def pause_requested(self, event: PauseRequested | TrialSetAside) -> None:
        """Holds a trial; one that is held already stays so."""
        trial = self._core.trials[event.trial_id]
        if trial.state.ended or trial.state is TrialState.STOPPING:
            self._core.log(trial, "was paused at the instant it ended")
        elif not trial.held:
            trial.held = event.why if isinstance(event, TrialSetAside) else BY_USER
            self._core.log(trial, f"is to be {trial.held}")
            self.under_way[trial.row] = trial

    def check_resume(self, event: ResumeRequested, claims: Claims) -> None:
        """Refuses to resume an unknown trial."""
        self._core.require_known(event.trial_id)

    def resume_requested(self, event: ResumeRequested) -> None:
        """Queues a trial that is PAUSED; one that is not held stays as it is."""
        trial = self._core.trials[event.trial_id]
        if not trial.held:
            return
        trial.held = ""
        self._core.log(trial, "is resumed by the user")
        self.under_way.pop(trial.row, None)
        if trial.state is TrialState.PAUSED:
            self._core.enqueue(trial, "resumed by the user")

    def after_events(self) -> None:
        """Goes on with what is under way."""
        if self.under_way:
            self.advance()

    def advance(self) -> None:
        """Makes held trials leave the queue and their devices, as far as they can now."""
        for row, trial in list(self.under_way.items()):
            if trial.held and not trial.state.ended:
                self._interrupt(trial)
            if not trial.held or trial.state is TrialState.PAUSED:
                del self.under_way[row]
                if trial.held in (SET_ASIDE, OFFERED):
                    self._save(trial)

    def _save(self, trial: TrialRecord) -> None:
        residence = trial.residence
        if residence.lane is not None and trial.spec.can_save and not (trial.calls or residence.saving):
            self._residency.save_out(trial, durable=True)

    def _interrupt(self, trial: TrialRecord) -> None:
        core, place = self._core, trial.placement
        if trial.state is TrialState.QUEUED:
            core.unqueue(trial)
            core.rest(trial, trial.held)
        elif trial.state is TrialState.STARTING and not place.launched:
            core.release(trial)
            core.rest(trial, trial.held)
        # Others may be by now on a device that it is to share: then it moves there first.
        elif place.move is not None and place.move.stage is not Stage.MOVING and trial.width >= 1.0:
            self._resizing.call_off(trial, f"it is {trial.held}")
        if trial.state is TrialState.RUNNING and place.preemption is None:
            self._lifecycle.preempt(trial, why=f"is told to pause: it is {trial.held}")


def is_leaving(trial: TrialRecord) -> bool:
    """Whether a held trial is about to leave its devices: its lanes owe an answer first."""
    if trial.state is TrialState.STARTING:
        return trial.placement.launched
    if trial.state is TrialState.RUNNING:
        return trial.placement.preemption is not None
    return trial.state is TrialState.RESIZING or trial.state is TrialState.STOPPING
