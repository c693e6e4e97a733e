"""Lost lanes: what becomes of the trials that held one, or whose state it kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from fluid.engine import tuning
from fluid.engine.calls import Calls
from fluid.engine.core import SessionState
from fluid.engine.events import Failure
from fluid.engine.lane_record import LaneRecord
from fluid.engine.records import TrialRecord
from fluid.engine.residency import Residency
from fluid.engine.resizing import Resizing
from fluid.trialgroup import TrialState


class LaneLoss(NamedTuple):
    """A lane that is gone.

    Attributes:
        lane: its record.
        reason: why it is gone.
        culprit: the trial whose code killed it, if known.
        blameless: whether no trial is to blame.
        failure: what the culprit is to blame for; ``None`` for the loss of the lane.
        trials: how many held it.
    """

    lane: LaneRecord
    reason: str
    culprit: str | None
    blameless: bool
    failure: Failure | None
    trials: int

    def blames(self, trial_id: str) -> bool:
        """Whether a trial is to blame, or may be."""
        return not self.blameless and self.culprit in (None, trial_id)


class LaneLosses:
    """Takes trials off lanes that are gone.

    Args:
        core: the session.
        calls, residency, resizing: the parts whose transitions a loss causes.
        max_failures: times that a failed trial is queued again.
        count: queues a trial again after a failure, or ends it if it failed too often.
    """

    def __init__(
        self,
        core: SessionState,
        calls: Calls,
        residency: Residency,
        resizing: Resizing,
        max_failures: int,
        count: Callable[[TrialRecord, Failure], None],
    ) -> None:
        self._core = core
        self._calls = calls
        self._residency = residency
        self._resizing = resizing
        self._max_failures = max_failures
        self._count = count

    def evacuate(
        self,
        lane: LaneRecord,
        reason: str,
        *,
        culprit: str | None = None,
        blameless: bool = False,
        failure: Failure | None = None,
    ) -> None:
        """Sets the trials of a lane that was removed back to their newest checkpoint; arguments: see LaneLoss."""
        core = self._core
        loss = LaneLoss(lane, reason, culprit, blameless, failure, len(lane.holders))
        for trial_id in list(lane.residents):
            trial = core.trials[trial_id]
            if loss.blames(trial_id):
                self._calls.blame(trial, reason, self._max_failures)
            self._residency.lose_state(trial, reason)
            if trial.state is TrialState.STARTING:  # here or elsewhere, and waits for its state
                core.release(trial)
                core.enqueue(trial, reason)
        for trial_id in list(lane.holders):
            trial = core.trials[trial_id]
            if trial.state.holds_devices:
                self._take_off(trial, loss)

    def _take_off(self, trial: TrialRecord, loss: LaneLoss) -> None:
        """Sets a trial that held a lost lane back, or lets it go on in the lanes that are left."""
        core, lane, reason = self._core, loss.lane, loss.reason
        if trial.state is TrialState.STOPPING:
            self._stopped_by_loss(trial, lane.lane_id, reason)
        elif not trial.placement.launched:
            core.release(trial)
            core.enqueue(trial, reason)
        elif lane.lane_id not in trial.placement.hosts:
            self._resizing.call_off(trial, f"a lane that it was to go to is gone: {reason}")
            core.top_up(trial)
        elif (
            trial.fixed_width is None and self._resizing.survivors(trial, lane.lane_id) and self._may_go_on(trial, loss)
        ):
            self._resizing.go_on_without(trial, lane.lane_id, reason)
        else:
            self._killed(trial, loss)

    def _may_go_on(self, trial: TrialRecord, loss: LaneLoss) -> bool:
        """Counts the loss of one of a trial's lanes as a failure; returns whether the trial may still go on."""
        if not loss.blames(trial.trial_id):
            return True
        if trial.limits.failures >= self._max_failures:
            return False
        trial.add_failure(Failure("lane_lost", loss.reason))
        self._calls.blame(trial, loss.reason, self._max_failures)
        return True

    def _stopped_by_loss(self, trial: TrialRecord, lane_id: int, reason: str) -> None:
        """STOPPING -> STOPPED: the other lanes may hang waiting for the lost one, and are drained."""
        others = tuple(lane for lane in trial.placement.stopping_lanes if lane != lane_id and lane in self._core.lanes)
        self._core.release(trial)
        self._core.drain(trial, others, told=True)
        self._core.end(trial, TrialState.STOPPED, reason)

    def _killed(self, trial: TrialRecord, loss: LaneLoss) -> None:
        core, lane, reason = self._core, loss.lane, loss.reason
        others = tuple(host for host in trial.placement.stays_in if host != lane.lane_id and host in core.lanes)
        core.release(trial)
        core.drain(trial, others)
        blamed = loss.blames(trial.trial_id)
        if blamed:
            self._calls.blame(trial, reason, self._max_failures)
        self._residency.lose_state(trial, reason)
        if blamed and loss.culprit is None and loss.trials > 1:
            # One of the trials in the lane killed it: with half of them at a time, in the end it runs alone.
            trial.limits = replace(trial.limits, packing_cap=loss.trials // 2)
            blamed = False
        if not blamed:
            core.enqueue(trial, reason)
        elif loss.failure is not None:
            self._timed_out(trial, loss.failure)
        else:
            if loss.culprit is not None:
                # A trial that kills its lane may kill those of its neighbours.
                trial.limits = replace(trial.limits, packing_cap=1)
            self._count(trial, Failure("lane_lost", reason))

    def _timed_out(self, trial: TrialRecord, failure: Failure) -> None:
        """Queues a trial again whose lanes were killed because it gave no result; the second time it has failed."""
        trial.limits = replace(trial.limits, timeouts=trial.limits.timeouts + 1, failure=failure)
        if trial.limits.timeouts > tuning.MOST_TIMEOUTS:
            self._core.end(trial, TrialState.FAILED, failure.message)
        else:
            self._core.enqueue(trial, f"timed out: {failure.message}", kind=failure.kind)
