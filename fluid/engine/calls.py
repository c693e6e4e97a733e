"""Calls of trials' methods: handed to the lane that has the trial's state, and answered in the order asked for.

A call waits while no lane has the state: the trial starts, moves, or was saved out of its lane. A trial that is done
and has left its lane is queued again for it. A call whose lane is lost is made again where the trial goes on: a method
may be called more than once, but not before the trial has again done what had been reported when it was asked for.
"""

from __future__ import annotations

from fluid.engine.commands import Call
from fluid.engine.core import SessionState
from fluid.engine.events import CallRequested, Failure, TrialCalled
from fluid.engine.records import PendingCall, Stage, TrialRecord
from fluid.trialgroup import TrialState


class Calls:
    """Hands calls to lanes."""

    def __init__(self, core: SessionState) -> None:
        self._core = core

    def requested(self, event: CallRequested) -> None:
        """Takes a call in."""
        trial = self._core.trials[event.trial_id]
        call = PendingCall(event.call_id, event.method, event.payload, trial.progress.reported, trial.progress.budget)
        trial.calls.append(call)
        if trial.state is TrialState.STOPPED or trial.state is TrialState.FAILED or trial.residence.given_up:
            self._core.refuse_calls(trial)  # it ended at this very instant
        elif trial.state is TrialState.DONE and (trial.residence.lane is None or trial.residence.saving):
            self._wake(trial)
        else:
            self.deliver(trial)

    def deliver(self, trial: TrialRecord) -> None:
        """Hands the calls that wait to the lane that has the trial's state, if there is one."""
        if not trial.calls:
            return
        lane_id = _able(trial)
        if lane_id is None:
            return
        for call in trial.calls:
            if call.lane_id is None:
                if trial.progress.done < min(call.after, trial.progress.budget):
                    return
                call.lane_id = lane_id
                self._core.commands.append(
                    Call(trial.trial_id, (lane_id,), call_id=call.call_id, method=call.method, payload=call.payload)
                )

    def answered(self, event: TrialCalled) -> TrialRecord | None:
        """Passes an answer on; returns the trial, unless the answer is out of date."""
        trial = self._core.trials.get(event.trial_id)
        if trial is None:
            return None
        for position, call in enumerate(trial.calls):
            # What a lane that is gone had answered counts, as what it had reported does.
            heard = call.lane_id == event.lane_id or event.lane_id in trial.placement.lost_lanes
            if heard and call.call_id == event.call_id:
                del trial.calls[position]
                trial.residence.checkpoint_is_current = False  # it may have changed the trial
                self._core.report_call(trial, call.call_id, event.result, event.failure)
                return trial
        return None

    def recall(self, trial: TrialRecord) -> None:
        """Has calls that a lane was told to make wait again: it is gone, or the trial's state is."""
        for call in trial.calls:
            call.lane_id = None
        if trial.calls and trial.state is TrialState.DONE:
            self._wake(trial)

    def blame(self, trial: TrialRecord, reason: str, max_losses: int) -> None:
        """Counts the loss of a lane against the call it may have been making; one that kills too many is not repeated.

        Args:
            trial: whose calls the lane was told to make.
            reason: why the lane is gone.
            max_losses: lanes that one call may cost, besides the last.
        """
        if trial.calls and trial.calls[0].lane_id is not None:
            call = trial.calls[0]
            call.losses += 1
            if call.losses > max_losses:
                del trial.calls[0]
                self._core.report_call(trial, call.call_id, failure=Failure("lane_lost", reason))

    def _wake(self, trial: TrialRecord) -> None:
        """Queues a trial that is done, so that a lane has its state again."""
        self._core.groups[trial.group_id].open += 1
        trial.restored_for_call = True
        self._core.enqueue(trial, "woken to be called")


def _able(trial: TrialRecord) -> int | None:
    """The lane that can call a method of the trial now."""
    if trial.residence.lane is not None:
        return trial.residence.lane if not trial.residence.saving else None
    if not trial.placement.launched or trial.stopping:
        return None
    warming = trial.placement.move is not None and trial.placement.move.stage is Stage.WARMING
    return trial.placement.hosts[0] if trial.state is TrialState.RUNNING or warming else None
