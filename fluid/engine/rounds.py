"""Rounds: all trials advance together, an iteration each in turn, though they do not all fit at once.

Trials that share a lane take turns there by the lane's policy. This is about those that wait for a device: a running
trial makes room once it has done as many iterations as one that waits.
"""

from __future__ import annotations

from fluid.engine.core import SessionState
from fluid.engine.lifecycle import Lifecycle
from fluid.engine.records import TrialRecord
from fluid.engine.residency import Residency
from fluid.trialgroup import TrialState


class Rounds:
    """Lets running trials make room for waiting ones after each iteration.

    Lanes are told to run one iteration at a time as long as trials wait: else each trial would run a further iteration
    before it is told to pause.
    """

    def __init__(self, core: SessionState, lifecycle: Lifecycle, residency: Residency) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._residency = residency

    def advance(self) -> None:
        """Lets those that are ahead make room, and the others go on; to be called once all that fits has started."""
        core = self._core
        if not core.in_rounds:
            return
        were_stepwise, core.stepwise = core.stepwise, bool(core.queue)
        if not (were_stepwise or core.stepwise):
            return
        running = [core.trials.by_row[row] for row in core.allocations.running]
        able = [trial for trial in running if trial.state is TrialState.RUNNING and trial.placement.preemption is None]
        if core.stepwise:
            self._rotate(running, [trial for trial in able if not trial.calls and _is_at_end(trial)])
        for trial in (*able, *core.resizing.values()):
            core.top_up(trial)

    def _rotate(self, running: list[TrialRecord], able: list[TrialRecord]) -> None:
        """Preempts trials that have done as many iterations as others that wait, one for each."""
        core = self._core
        if not able:
            return
        waiting = sorted((core.trials.by_row[row] for row in core.queue), key=lambda trial: trial.progress.done)
        # The first of them get the room that others are making now.
        coming = iter(waiting[sum(trial.placement.preemption is not None for trial in running) :])
        following = next(coming, None)
        for trial in sorted(able, key=lambda trial: -trial.progress.done):
            if following is None or trial.progress.done < following.progress.done:
                return
            if trial.group_priority > following.group_priority or not self._can_leave(trial):
                continue
            self._lifecycle.preempt(trial, why=f"makes room for {following.trial_id!r}, as trials advance in rounds")
            following = next(coming, None)

    def _can_leave(self, trial: TrialRecord) -> bool:
        """Whether a trial's device is free for others once it has paused: its state stays, or can be fetched back."""
        bounded = any(self._core.memory.usable_bytes(device) for device in self._core.occupancy.held[trial.row])
        return trial.spec.can_save or not bounded

    def make_room(self, trial: TrialRecord | None) -> None:
        """Evicts the state of a trial that has just paused, if a waiting trial does not fit beside it."""
        core = self._core
        if not core.in_rounds or trial is None or not trial.spec.can_save:
            return
        device = trial.residence.device
        if device is None:
            return
        others = [core.trials.by_row[row] for row in core.queue]
        first = min(others, key=lambda other: other.progress.done, default=None)
        if first is not None and not core.memory.fits(device, core.estimates.need(first)):
            self._residency.evict(trial)


def _is_at_end(trial: TrialRecord) -> bool:
    """Whether a trial has run what its lanes were told to; or they were told before others waited, and it runs on."""
    granted, done = trial.progress.granted, trial.progress.done
    return trial.placement.move is None and done > 0 and (granted <= done or granted > done + 1)
