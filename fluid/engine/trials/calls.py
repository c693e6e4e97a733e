"""Calls of trials' methods: handed to the lane that has the trial's state, and answered in the order requested.

A call waits while no lane has the state: the trial starts, moves, or was saved out of its lane. A trial that is done
and has left its lane is queued again for it. A call whose lane is lost is made again where the trial goes on: a method
may be called more than once, but not before the trial has repeated what had been reported when the call was requested.
"""

from __future__ import annotations

from fluid.engine.commands import Answer, Call, ReportRequest
from fluid.engine.core import Claims, SessionState
from fluid.engine.events import CallRequested, Failure, RequestAnswered, TrialAsked, TrialCalled
from fluid.engine.records import PendingCall, Stage, TrialRecord
from fluid.trialgroup import TrialState


class Calls:
    """Hands calls to lanes."""

    def __init__(self, core: SessionState) -> None:
        self._core = core

    def check(self, event: CallRequested, claims: Claims) -> None:
        """Refuses to call a trial that cannot go on."""
        self._core.require_alive(event.trial_id, "called")

    def requested(self, event: CallRequested) -> None:
        """Adds a call, and makes it if a lane has the trial's state."""
        trial = self._core.trials[event.trial_id]
        progress, residence = trial.progress, trial.residence
        call = PendingCall(event.call_id, event.method, event.payload, progress.reported, progress.budget)
        trial.calls = (*trial.calls, call)
        if trial.state.is_over:
            self._core.refuse_calls(trial)  # it ended at this very instant
        elif trial.state is TrialState.DONE and (residence.lane is None or residence.saving):
            self.restore(trial)
        else:
            self.deliver(trial)

    def deliver(self, trial: TrialRecord) -> None:
        """Hands the calls that wait to the lane that has the trial's state, if there is one."""
        if not trial.calls:
            return
        lane_id = _lane_for_calls(trial)
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
        """Reports an answer to the submitter; returns the trial, unless the answer is out of date."""
        trial = self._core.trials.get(event.trial_id)
        if trial is None:
            return None
        for position, call in enumerate(trial.calls):
            # The answer of a lane that was lost meanwhile counts, as its iterations do.
            heard = call.lane_id == event.lane_id or event.lane_id in trial.placement.lost_lanes
            if heard and call.call_id == event.call_id:
                trial.calls = (*trial.calls[:position], *trial.calls[position + 1 :])
                trial.outdate_checkpoint()  # the method may have changed the trial
                self._core.report_call(trial, call.call_id, event.result, event.failure)
                return trial
        return None

    def recall(self, trial: TrialRecord) -> None:
        """Makes calls that a lane was told to make wait again: the lane, or the trial's state there, is gone."""
        for call in trial.calls:
            call.lane_id = None
        if trial.calls and trial.state is TrialState.DONE:
            self.restore(trial)

    def blame(self, trial: TrialRecord, reason: str, max_losses: int) -> None:
        """Counts the loss of a lane against the call that it may have been making; a call that kills too many fails.

        Args:
            trial: the trial whose calls the lane was told to make.
            reason: why the lane is gone.
            max_losses: lanes that one call may cost, besides the last.
        """
        if trial.calls and trial.calls[0].lane_id is not None:
            call = trial.calls[0]
            call.losses += 1
            if call.losses > max_losses:
                trial.calls = trial.calls[1:]
                self._core.report_call(trial, call.call_id, failure=Failure("lane_lost", reason))

    def restore(self, trial: TrialRecord, why: str = "it was called", to: str = "be called") -> None:
        """DONE -> QUEUED, so that a lane has the trial's state again; says to people why, and to what end."""
        self._core.groups[trial.group_id].open += 1
        trial.restored_for_call = True
        self._core.tell_if_set_back(trial, why)
        self._core.enqueue(trial, f"restored to {to}")


def _lane_for_calls(trial: TrialRecord) -> int | None:
    """The lane that can call a method of the trial now; ``None`` if there is none."""
    residence, place = trial.residence, trial.placement
    if residence.lane is not None:
        return residence.lane if not residence.saving else None
    warming = trial.state is TrialState.RESIZING and place.move is not None and place.move.stage is Stage.WARMING
    return place.hosts[0] if trial.state is TrialState.RUNNING or warming else None


# -- requests ------------------------------------------------------------------------------------
#
# Requests of trials to the driver: a trial's code asks its submitter, in the middle of an iteration, and waits.
#
# The engine passes a request to the submitter and the answer to the lane. It does not look at them. A trial that waits
# for an answer does not hang.


class Requests:
    """Passes requests of trials to their submitters, and the answers to the lanes."""

    def __init__(self, core: SessionState) -> None:
        self._core = core

    def asked(self, event: TrialAsked) -> None:
        """Passes a request to the submitter; refuses that of a trial that has ended, or has left that lane."""
        core, trial = self._core, self._core.trials.get(event.trial_id)
        here = trial is not None and event.lane_id in (*trial.placement.hosts, trial.residence.lane)
        # One that is STOPPING ends with its iteration.
        if trial is None or trial.state is TrialState.STOPPING or trial.state.is_over or not here:
            answer = Answer(event.trial_id, event.lane_id, request_id=event.request_id, payload=None, failed=True)
            core.commands.append(answer)
            return
        place = trial.placement
        if place.launched:
            place.asking |= {(event.lane_id, event.request_id)}
        core.commands.append(
            ReportRequest(
                trial_id=trial.trial_id,
                group_id=trial.group_id,
                lane_id=event.lane_id,
                request_id=event.request_id,
                payload=event.payload,
            )
        )

    def answered(self, event: RequestAnswered) -> None:
        """Passes an answer to the lane that asked, if that is still there; the trial's time goes on from now."""
        core, trial = self._core, self._core.trials.get(event.trial_id)
        key = (event.lane_id, event.request_id)
        if trial is not None and key in trial.placement.asking:
            trial.placement.asking -= {key}
            core.watching.answered(trial, core.now)
        if event.lane_id in core.lanes:
            core.commands.append(
                Answer(
                    event.trial_id,
                    event.lane_id,
                    request_id=event.request_id,
                    payload=event.payload,
                    failed=event.failed,
                )
            )
