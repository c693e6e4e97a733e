"""Clean-ups that last: code of trials that have ended, and that others wait for.

A trial that starts waits until those that have ended on its devices were cleaned up. If that takes too long, their
lanes are killed. One that was stopped may be in the middle of an iteration: its lane tells when its clean-up lasts.

It is there for safety, and has no figure: without it, code that never cleans up keeps others waiting for ever.
"""

from __future__ import annotations

from collections.abc import Mapping

from fluid.engine import tuning
from fluid.engine.core import CleanUpDeadline, SessionState
from fluid.engine.events import CleanUpLasts, Event
from fluid.engine.policy import Check, Handler, Policy
from fluid.engine.records import LaneRecord


class CleanUps(Policy):
    """Ends clean-ups in lanes of trials that have a process of their own."""

    def __init__(self, core: SessionState) -> None:
        self._core = core

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """Clean-ups that last."""
        return {CleanUpLasts: (None, self.lasts)}

    def deadlines(self) -> Mapping[type, Handler]:
        """When to look at lanes."""
        return {CleanUpDeadline: self.look}

    def lasts(self, event: CleanUpLasts) -> None:
        """Sets a time by which a clean-up is to be over."""
        deadline = CleanUpDeadline(event.lane_id, event.trial_id)
        self._core.deadlines.set(deadline, max(event.at, event.since + tuning.CLEAN_UP_S))
        trial = self._core.holder(event.trial_id, event.lane_id)
        if trial is not None:  # It has raised, and its lane tells that afterwards.
            self._core.watching.answered(trial, event.at)

    def look(self, deadline: CleanUpDeadline) -> None:
        """Kills a lane whose trial should have left it, if any trial waits; else it is looked at again."""
        core, (lane_id, trial_id) = self._core, deadline
        lane = core.lanes.get(lane_id)
        if lane is None or lane.shared or not self._is_leaving(lane, trial_id):
            return
        core.deadlines.set(deadline, core.now + tuning.CLEAN_UP_S)
        if core.queue or core.clearing:
            reason = f"was killed: trial {trial_id!r} has ended, and did not leave it in time"
            core.commands += core.watching.kill(trial_id, (lane_id,), reason, core.now)

    def _is_leaving(self, lane: LaneRecord, trial_id: str) -> bool:
        if trial_id in lane.draining or trial_id in lane.dismissed:
            return True
        trial = self._core.trials.get(trial_id)
        if trial is None:
            return False
        saves = trial.residence.lane == lane.lane_id and trial.residence.saving
        return saves or lane.lane_id in trial.placement.stopping_lanes
