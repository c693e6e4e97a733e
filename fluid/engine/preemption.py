"""Chooses running trials to preempt for waiting ones, so that all end earlier (:mod:`fluid.policies.preemption`)."""

from __future__ import annotations

import math

from fluid.engine import tuning
from fluid.engine.core import SessionState
from fluid.engine.records import TrialRecord
from fluid.policies.preemption import Demand, choose_preemptions
from fluid.trialgroup import TrialState


class Preemptions:
    """Chooses which trial is preempted for which, and when to choose again.

    Args:
        core: the state of the session.
        wanted: whether the planner preempts.
    """

    def __init__(self, core: SessionState, wanted: bool) -> None:
        self._core = core
        self._wanted = wanted
        self._due = math.inf

    def is_due(self) -> bool:
        """Whether it is time to choose again: a waiting trial may be late by now."""
        return self._core.now >= self._due and bool(self._core.occupancy)

    def choose(self) -> list[tuple[TrialRecord, TrialRecord]]:
        """Returns the running trials to preempt now, each with the trial that takes its device over."""
        core = self._core
        self._due = math.inf
        if not self._wanted or len(core.occupancy) < 2 or core.resizing:
            return []
        if not 0 < len(core.queue) <= tuning.MOST_WAITING * len(core.occupancy):
            return []
        first = core.queue.first_priority
        owner = core.queue.first_owner if core.shares.ranks else None
        victims = {row for row in core.allocations.alone() if self._may_be_preempted(core.trials.by_row[row], first)}
        if owner is not None:
            victims = {row for row in victims if core.shares.outranks(owner, core.trials.by_row[row].owner)}
        if not victims:
            return []
        running = [core.trials.by_row[row] for row in core.allocations.running]
        waiting = [core.trials.by_row[row] for row in core.queue]
        if any(trial.placement.preemption is not None for trial in running):
            return []
        if not all(core.estimates.is_measured(trial) for trial in (*running, *waiting)):
            return []
        pace = core.estimates.usual_pace()
        plan = choose_preemptions(
            [self._demand(trial, pace, trial.row in victims) for trial in running],
            [self._demand(trial, pace, self._may_take_over(trial, first, owner)) for trial in waiting],
            len(core.occupancy),
        )
        self._due = core.now + plan.again_in
        preemptions = [
            (core.trials.by_row[swap.running], core.trials.by_row[swap.waiting]) for swap in plan.preemptions
        ]
        return [(leaving, coming) for leaving, coming in preemptions if self._fits(leaving, coming)]

    def _demand(self, trial: TrialRecord, usual_pace: float, yields: bool) -> Demand:
        estimates = self._core.estimates
        seconds = estimates.seconds_left(trial)
        holds = trial.row in self._core.occupancy.held
        width = 1.0 / estimates.co_residents(trial) if holds and trial.width < 1.0 else trial.width
        step = seconds / max(1, trial.progress.left)
        cost = estimates.of_key(trial).interruption()
        return Demand(trial.row, seconds, trial.progress.follow_up_iterations * usual_pace, step, width, cost, yields)

    @staticmethod
    def _may_be_preempted(trial: TrialRecord, first: tuple[float, float]) -> bool:
        if trial.state is not TrialState.RUNNING or trial.placement.preemption is not None or trial.calls:
            return False
        return trial.spec.can_save and trial.priority <= first

    @staticmethod
    def _may_take_over(trial: TrialRecord, first: tuple[float, float], owner: int | None) -> bool:
        if owner is not None and trial.owner != owner:
            return False
        return trial.width <= 1.0 and trial.priority == first and not trial.pinned and not trial.calls

    def _fits(self, leaving: TrialRecord, coming: TrialRecord) -> bool:
        """Whether a trial may have the device of a preempted one, and fits beside the state that that leaves there."""
        core = self._core
        (device,) = core.occupancy.held[leaving.row]
        allowed = core.scheduling.placing.allowed(coming)
        if allowed is not None and device not in allowed:
            return False
        return core.memory.fits_in_place_of(device, core.estimates.need_on(coming, device), leaving.row)
