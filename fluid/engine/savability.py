"""Whether a trial's state can be saved, as its lane finds out while the trial runs.

Some functions yield a state that cannot be pickled, and functions for Ray Tune can be saved once they have reported a
checkpoint. A lane tells when that changes, and answers a Save that it cannot carry out: the trial stays in its lane.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from fluid.engine.calls import Calls
from fluid.engine.commands import TrialNotice
from fluid.engine.core import SessionState
from fluid.engine.events import Event
from fluid.engine.records import Stage, TrialRecord
from fluid.engine.residency import Residency
from fluid.engine.resizing import Resizing
from fluid.trialgroup import TrialState


@dataclass(frozen=True, slots=True)
class SavabilityChanged(Event):
    """A lane found that a trial's state can be saved from now on, or cannot.

    Attributes:
        can_save: whether it can.
        reason: why not, in one line; empty where that is no news to the submitter.
        refuses: whether this answers a Save, or a Resize that began with one: the trial is in that lane as before.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    can_save: bool
    reason: str = ""
    refuses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportUnsavable(TrialNotice):
    """The trial's state cannot be saved: Fluid moves the trial no more, and it begins again if its process dies.

    Attributes:
        reason: why, in one line.
    """

    at: float
    reason: str


class Savability:
    """Takes over what lanes find: writes ``can_save`` of a trial's spec."""

    def __init__(self, core: SessionState, calls: Calls, residency: Residency, resizing: Resizing) -> None:
        self._core = core
        self._calls = calls
        self._residency = residency
        self._resizing = resizing

    def changed(self, event: SavabilityChanged) -> None:
        """Records whether a trial can be saved; one that was to leave its lane stays there if it cannot."""
        trial = self._core.trials.get(event.trial_id)
        if trial is None:
            return
        residence, place = trial.residence, trial.placement
        if event.refuses and residence.saving and residence.lane == event.lane_id:
            self._set(trial, event)
            self._stays_resident(trial)
        elif event.refuses and place.move is not None and place.move.stage is Stage.MOVING:
            if event.lane_id in place.move.old_lanes:
                self._set(trial, event)
                self._resizing.stays(trial, f"it cannot be saved: {event.reason}")
        elif not residence.saving and event.lane_id in (residence.lane, *place.hosts):
            self._set(trial, event)  # If it is being saved, the answer to that is still to come.

    def _set(self, trial: TrialRecord, event: SavabilityChanged) -> None:
        core, can_save = self._core, event.can_save
        if trial.spec.can_save is can_save or (can_save and trial.limits.cannot_load):
            return
        waits = trial.state is TrialState.QUEUED
        if waits:
            core.unqueue(trial)
        trial.spec = replace(trial.spec, can_save=can_save)
        if waits:
            core.enqueue(trial, "can be saved now" if can_save else "can go on only where its state is")
        core.changed = True
        if can_save:
            core.lanes.check_memory(trial.residence.lane)  # its state may leave now
        if event.reason:
            core.tell(trial, f"its state cannot be saved: {event.reason}")
            notice = ReportUnsavable(trial_id=trial.trial_id, group_id=trial.group_id, at=core.now, reason=event.reason)
            core.commands.append(notice)

    def _stays_resident(self, trial: TrialRecord) -> None:
        """Leaves a trial where its state is; if it was about to start elsewhere, it waits for that lane instead."""
        core = self._core
        trial.residence = replace(trial.residence, saving=False)
        core.changed = True
        if trial.state is TrialState.STARTING:
            core.release(trial)
            core.enqueue(trial, "goes on where its state is, which cannot be saved")
        core.lanes.check_memory(trial.residence.lane)
        self._calls.deliver(trial)
        self._residency.let_go(trial, saves=False)
