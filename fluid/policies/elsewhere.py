"""Trials that other drivers run, which work the same sweep through a shared folder (docs/cluster.md).

The engine of each driver knows all trials of the sweep. One that this driver is not to run is held: PAUSED until the
session learns from the folder's log how it went on, or is given the trial. What a record says of a state in a lane here
is then worth nothing, so a trial that comes or goes gets a record of its own anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fluid.engine.commands import Persist
from fluid.engine.core import Claims, SessionState
from fluid.engine.events import (
    ELSEWHERE,
    CallRequested,
    Checkpoint,
    EndedElsewhere,
    Event,
    IteratedElsewhere,
    PauseRequested,
    ResumeRequested,
    TrialMoved,
    TrialOffered,
    TrialSaved,
)
from fluid.engine.policy import Check, Handler, Policy
from fluid.engine.records import Stage, TrialRecord
from fluid.engine.trials.residency import Residency
from fluid.engine.trials.resizing import Resizing
from fluid.engine.trials.submissions import Submissions
from fluid.errors import InvalidFieldError
from fluid.trialgroup import TrialState


class Elsewhere(Policy):
    """Follows trials that other drivers run.

    Args:
        core: the session.
        submissions: makes and drops records.
        residency, resizing: the parts whose transitions a move causes.
    """

    def __init__(self, core: SessionState, submissions: Submissions, residency: Residency, resizing: Resizing) -> None:
        self._core = core
        self._submissions = submissions
        self._residency = residency
        self._resizing = resizing
        #: Ids of the trials that this driver does not run.
        self._away: set[str] = set()
        #: The checkpoints in memory that are copied to disk, by id.
        self._copied: dict[str, Checkpoint] = {}

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """What the shared folder tells; and requests that need the trial here."""
        return {
            TrialMoved: (None, self.moved),
            TrialOffered: (None, self.offered),
            TrialSaved: (None, self.saved),
            IteratedElsewhere: (None, self.iterated_elsewhere),
            EndedElsewhere: (None, self.ended_elsewhere),
            PauseRequested: (self._check_here, self._nothing),
            ResumeRequested: (self._check_here, self._nothing),
            CallRequested: (self._check_here, self._nothing),
        }

    def _check_here(self, event: PauseRequested | ResumeRequested | CallRequested, claims: Claims) -> None:
        if event.trial_id in self._away:
            reason = "is not run by this driver, but by another one of the shared folder"
            raise InvalidFieldError("trial_id", event.trial_id, reason)

    def _nothing(self, event: Event) -> None:
        pass

    def extended(self, trial: TrialRecord) -> None:
        """One that goes on elsewhere is not queued."""
        if trial.trial_id in self._away:
            trial.held = ELSEWHERE

    def forgotten(self, trial: TrialRecord) -> None:
        """Knows it no more."""
        self._away.discard(trial.trial_id)
        self._copied.pop(trial.trial_id, None)

    def offered(self, event: TrialOffered) -> None:
        """Has the state of a trial that is at rest saved to disk."""
        trial = self._core.trials.get(event.trial_id)
        if trial is None or trial.state.holds_devices:
            return
        residence = trial.residence
        if residence.lane is not None:
            if trial.spec.can_save and not (trial.calls or residence.saving):
                self._residency.save_out(trial, durable=True)
        elif (checkpoint := residence.checkpoint) is not None and checkpoint.in_memory:
            self._copied[event.trial_id] = checkpoint
            self._core.commands.append(Persist(event.trial_id, checkpoint))

    def saved(self, event: TrialSaved) -> None:
        """Takes it that a state was copied to disk."""
        trial = self._core.trials.get(event.trial_id)
        if trial is not None and event.copied and not event.checkpoint.in_memory:
            original = self._copied.pop(event.trial_id, None)
            if original is not None:
                self._residency.copied(trial, original, event.checkpoint)

    def moved(self, event: TrialMoved) -> None:
        """Drops what the engine has of a trial, and has it go on as it is said to stand."""
        core, before = self._core, self._core.trials.get(event.trial_id)
        if before is None:
            return
        self._take_off(before)
        self._submissions.drop(before)
        group = core.groups[before.group_id]
        group.drop(before)
        trial = self._submissions.recover(before.group_id, event.history)
        if not event.here:
            self._away.add(trial.trial_id)
        if trial.state.ended:
            group.open -= 1
            if before.progress.finished_early and before.progress.done == event.history.reported:
                trial.progress.finish_early()
            return
        trial.held = "" if event.here else ELSEWHERE
        core.enqueue(trial, "is run by this driver" if event.here else ELSEWHERE)

    def _take_off(self, trial: TrialRecord) -> None:
        core, place = self._core, trial.placement
        if trial.state is TrialState.QUEUED:
            core.unqueue(trial)
        elif trial.state.holds_devices:
            told = trial.state is TrialState.STOPPING
            if not told and place.move is not None and place.move.stage is not Stage.MOVING:
                self._resizing.call_off(trial, "another driver runs it")
            lanes = tuple(place.stopping_lanes) if told else place.lanes if place.launched else ()
            core.release(trial)
            core.drain(trial, tuple(lane_id for lane_id in lanes if lane_id in core.lanes), told=told)

    def iterated_elsewhere(self, event: IteratedElsewhere) -> None:
        """Counts iterations."""
        trial = self._core.trials.get(event.trial_id)
        if trial is not None and trial.trial_id in self._away:
            trial.progress.done = trial.progress.reported = event.iteration

    def ended_elsewhere(self, event: EndedElsewhere) -> None:
        """Ends a trial that another driver has ended."""
        core, trial = self._core, self._core.trials.get(event.trial_id)
        if trial is None or trial.trial_id not in self._away or trial.state is event.state or trial.state.is_over:
            return
        trial.progress.done = trial.progress.reported = event.iteration
        if event.by_itself:
            trial.progress.finish_early()
        if event.failure is not None:
            trial.limits = replace(trial.limits, failure=event.failure)
        core.end(trial, event.state, "ended in another driver", tells=False)  # Its submitter hears that from the log.
