"""What submitters ask for. Requests that cannot be are refused before anything changes."""

from __future__ import annotations

from collections.abc import Iterable

from fluid.engine.core import SessionState
from fluid.engine.events import (
    OUTCOMES,
    BudgetExtended,
    CallRequested,
    DeviceAdded,
    Event,
    GroupRecovered,
    GroupSubmitted,
    StopRequested,
    TrialAdded,
    TrialForgotten,
    TrialHistory,
    TrialSpec,
)
from fluid.engine.lifecycle import Lifecycle
from fluid.engine.records import GroupRecord, Progress, TrialRecord
from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of
from fluid.trialgroup import TrialState

_ENDS = ("DONE", "STOPPED", "FAILED")


class Submissions:
    """Checks and carries out what submitters ask for."""

    def __init__(self, core: SessionState, lifecycle: Lifecycle) -> None:
        self._core = core
        self._lifecycle = lifecycle

    # -- refusals ------------------------------------------------------------------------------------------

    def check(self, events: Iterable[Event]) -> None:
        """Refuses events that cannot be, each judged as if those before it had been carried out.

        Raises:
            InvalidFieldError: names the field and the value.
        """
        asked = _Asked(self._core)
        for event in events:
            if isinstance(event, GroupSubmitted):
                asked.new_group(event.group_id)
                for spec in event.trials:
                    asked.new_trial(spec)
            elif isinstance(event, GroupRecovered):
                asked.new_group(event.group_id)
                for history in event.trials:
                    asked.recovered_trial(history)
            elif isinstance(event, TrialAdded):
                asked.known_group(event.group_id)
                asked.new_trial(event.trial)
            elif isinstance(event, BudgetExtended):
                asked.extension(event)
            elif isinstance(event, StopRequested):
                asked.stop(event)
            elif isinstance(event, CallRequested):
                asked.call(event)
            elif isinstance(event, TrialForgotten):
                asked.forget(event.trial_id)
            elif isinstance(event, DeviceAdded):
                asked.new_device(event.device.index)

    # -- requests ------------------------------------------------------------------------------------------

    def group_submitted(self, event: GroupSubmitted) -> None:
        """Queues a group's trials."""
        self._core.groups[event.group_id] = GroupRecord(event.group_id)
        for spec in event.trials:
            self._core.enqueue(self._admit(event.group_id, spec), "submitted")

    def trial_added(self, event: TrialAdded) -> None:
        """Queues a further trial."""
        self._core.enqueue(self._admit(event.group_id, event.trial), "submitted")

    def group_recovered(self, event: GroupRecovered) -> None:
        """Takes a group over from an earlier session."""
        core = self._core
        group = core.groups[event.group_id] = GroupRecord(event.group_id)
        core.forgotten.update(event.forgotten)
        for history in event.trials:
            trial = self._admit(event.group_id, history.trial)
            trial.progress.budget, trial.progress.reported = history.budget, history.reported
            trial.limits.failures = history.failures
            trial.residence.checkpoint = history.checkpoint
            if history.checkpoint is not None and not history.checkpoint.in_memory:
                trial.residence.durable = history.checkpoint
            if history.ended is None:
                core.enqueue(trial, "recovered from an earlier session")
                continue
            group.open -= 1
            trial.progress.done = history.reported
            # One that was done could be extended, but its lane is gone, and with it what could not be saved.
            trial.residence.given_up = history.ended == "DONE" and not history.trial.can_save
            core.set_state(trial, TrialState(history.ended), "ended in an earlier session")

    def budget_extended(self, event: BudgetExtended) -> None:
        """Gives a trial more to do; one that was done is queued."""
        trial = self._core.trials[event.trial_id]
        if trial.state is TrialState.STOPPED or trial.state is TrialState.FAILED:
            self._core.log(trial, "was extended at the instant it ended")
            return  # the submitter hears of its end
        trial.progress.budget += event.iterations
        self._note_what_follows(trial, event.follow_up_iterations)
        if trial.restored_for_call:  # its submitter waits for it again
            trial.restored_for_call = False
            if trial.placement.launched and trial.state is not TrialState.STARTING:
                self._core.report_start(trial)
        if trial.state is TrialState.DONE:
            self._core.groups[trial.group_id].open += 1
            self._core.enqueue(trial, "extended")
        else:
            if trial.state is not TrialState.QUEUED or trial.row in self._core.scheduling.queue:
                self._core.allocations.update_work(trial)
            self._core.top_up(trial)

    def stop_requested(self, event: StopRequested) -> None:
        """Stops a trial; one that has ended for good stays as it is, but for what is said to have come of it."""
        trial = self._core.trials[event.trial_id]
        if event.outcome is not None:
            trial.outcome = event.outcome
        self._lifecycle.stop(trial)

    def trial_forgotten(self, event: TrialForgotten) -> None:
        """Drops a trial that has ended."""
        trial = self._core.trials[event.trial_id]
        if not trial.state.ended:  # at this very instant it was called
            self._lifecycle.stop(trial)
        self._lifecycle.forget(trial)

    def _note_what_follows(self, trial: TrialRecord, follow_up_iterations: int) -> None:
        """Notes what a trial leads to, by which those that wait are ordered."""
        before, trial.progress.follow_up_iterations = trial.progress.follow_up_iterations, follow_up_iterations
        if follow_up_iterations != before and trial.row in self._core.scheduling.queue:
            self._core.unqueue(trial)
            self._core.enqueue(trial, "extended")

    def _admit(self, group_id: str, spec: TrialSpec) -> TrialRecord:
        core = self._core
        trial = TrialRecord(
            spec, core.trials.new_row(), group_id, Progress(spec.budget, follow_up_iterations=spec.follow_up_iterations)
        )
        core.trials.add(trial)
        group = core.groups[group_id]
        group.trial_ids[spec.trial_id] = None
        group.open += 1
        return trial


class _Asked:
    """What there will be once the events looked at so far are carried out."""

    def __init__(self, core: SessionState) -> None:
        self._core = core
        self._groups: set[str] = set()
        self._trials: set[str] = set()
        self._stopped: set[str] = set()
        self._devices: set[int] = set()
        self._extended: set[str] = set()
        self._forgotten: set[str] = set()

    def new_group(self, group_id: str) -> None:
        if group_id in self._core.groups or group_id in self._groups:
            raise InvalidFieldError("group_id", group_id, "was submitted already")
        self._groups.add(group_id)

    def known_group(self, group_id: str) -> None:
        if group_id not in self._core.groups and group_id not in self._groups:
            raise InvalidFieldError("group_id", group_id, "is unknown")

    def new_trial(self, spec: TrialSpec) -> None:
        taken = (self._core.trials, self._core.forgotten, self._trials)
        if any(spec.trial_id in ids for ids in taken):
            raise InvalidFieldError("trial_id", spec.trial_id, "is taken by another trial of this session")
        require_integer("budget", spec.budget, at_least=1)
        require_integer("max_width", spec.max_width, at_least=1)
        require_number("priority", spec.priority, at_least=float("-inf"))
        require_integer("follow_up_iterations", spec.follow_up_iterations, at_least=0)
        if not self._core.estimates.could_hold(spec.memory):
            raise InvalidFieldError("memory", spec.memory, f"trial {spec.trial_id!r} fits on no device")
        self._trials.add(spec.trial_id)

    def recovered_trial(self, history: TrialHistory) -> None:
        self.new_trial(history.trial)
        require_integer("budget", history.budget, at_least=1)
        require_integer("reported", history.reported, at_least=0)
        if history.ended is not None:
            require_one_of("ended", history.ended, _ENDS)
            if history.ended != "DONE":
                self._stopped.add(history.trial.trial_id)

    def extension(self, event: BudgetExtended) -> None:
        trial = self._known(event.trial_id)
        require_integer("iterations", event.iterations, at_least=1)
        require_integer("follow_up_iterations", event.follow_up_iterations, at_least=0)
        if event.trial_id in self._stopped:
            raise InvalidFieldError("trial_id", event.trial_id, "has been stopped and cannot be extended")
        if trial is None:
            return
        if trial.state is TrialState.STOPPED or trial.state is TrialState.FAILED or trial.stopping:
            state = "STOPPED" if trial.stopping else trial.state.value
            raise InvalidFieldError("trial_id", event.trial_id, f"is {state} and cannot be extended")
        if trial.residence.given_up:
            reason = "cannot be extended: it cannot be saved, and its state was let go to make room for others"
            raise InvalidFieldError("trial_id", event.trial_id, reason)
        if trial.progress.finished_early:
            raise InvalidFieldError("trial_id", event.trial_id, "has said that it has no more to do")
        self._extended.add(event.trial_id)

    def stop(self, event: StopRequested) -> None:
        self._known(event.trial_id)
        if event.outcome is not None:
            require_one_of("outcome", event.outcome, OUTCOMES)
        self._stopped.add(event.trial_id)

    def call(self, event: CallRequested) -> None:
        trial = self._known(event.trial_id)
        if event.trial_id in self._stopped:
            raise InvalidFieldError("trial_id", event.trial_id, "has been stopped and cannot be called")
        if trial is None:
            return
        if trial.state is TrialState.STOPPED or trial.state is TrialState.FAILED or trial.stopping:
            state = "STOPPED" if trial.stopping else trial.state.value
            raise InvalidFieldError("trial_id", event.trial_id, f"is {state} and cannot be called")
        if trial.residence.given_up:
            reason = "cannot be called: it cannot be saved, and its state was let go to make room for others"
            raise InvalidFieldError("trial_id", event.trial_id, reason)

    def forget(self, trial_id: str) -> None:
        trial = self._known(trial_id)
        if trial is None or not trial.state.ended or trial_id in self._extended:
            raise InvalidFieldError("trial_id", trial_id, "has not ended and cannot be forgotten")
        self._forgotten.add(trial_id)

    def new_device(self, index: int) -> None:
        if index in self._core.occupancy.residents or index in self._devices:
            raise InvalidFieldError("device", index, "is there already")
        self._devices.add(index)

    def _known(self, trial_id: str) -> TrialRecord | None:
        """Its record; ``None`` if it is submitted in the same call."""
        known = trial_id in self._core.trials or trial_id in self._trials
        if not known or trial_id in self._forgotten:
            raise InvalidFieldError("trial_id", trial_id, "is unknown")
        return self._core.trials.get(trial_id)
