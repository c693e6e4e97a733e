"""Holds: a trial that the user pauses by hand waits for no device until the user resumes it.

One that a session sets aside, as no further iteration of it would end in time, is held in the same way, and saved.

It leaves its devices after its iteration, as a preempted trial does, and is then PAUSED: neither queued nor known to
planners. Its state stays resident in its lane, or is saved if the device needs the memory; a state that cannot be saved
stays. A trial that ends before it has paused has ended, and is held no more.
"""

from __future__ import annotations

from fluid.engine.claims import Claims
from fluid.engine.core import SessionState
from fluid.engine.events import PauseRequested, ResumeRequested
from fluid.engine.lifecycle import Lifecycle
from fluid.engine.records import Stage, TrialRecord
from fluid.engine.residency import Residency
from fluid.engine.resizing import Resizing
from fluid.engine.set_aside import BY_USER, SET_ASIDE, TrialSetAside
from fluid.errors import InvalidFieldError
from fluid.trialgroup import TrialState


class Holds:
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
            trial.held = SET_ASIDE if isinstance(event, TrialSetAside) else BY_USER
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

    def advance(self) -> None:
        """Makes held trials leave the queue and their devices, as far as they can now."""
        for row, trial in list(self.under_way.items()):
            if trial.held and not trial.state.ended:
                self._interrupt(trial)
            if not trial.held or trial.state is TrialState.PAUSED:
                del self.under_way[row]
                if trial.held == SET_ASIDE:
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
