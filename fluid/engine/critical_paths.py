"""Critical paths: which of the trials that arrive start first, as others wait for them or are worth having early."""

from __future__ import annotations

from collections.abc import Sequence

from fluid.devices.occupancy import Occupancy
from fluid.engine import tuning
from fluid.engine.estimates import Estimates
from fluid.engine.records import TrialRecord
from fluid.engine.remaining_work import RemainingWork
from fluid.engine.running_table import RunningTable
from fluid.engine.trials import Trials


class CriticalPaths:
    """Knows how long the work is that begins with a trial.

    Args:
        trials: the trials of the session.
        occupancy: the devices.
        estimates: how fast trials are.
        table: the running trials.
        work: is told the critical paths.
    """

    def __init__(
        self, trials: Trials, occupancy: Occupancy, estimates: Estimates, table: RunningTable, work: RemainingWork
    ) -> None:
        self._trials = trials
        self._occupancy = occupancy
        self._estimates = estimates
        self._table = table
        self._work = work

    def measure(self, trials: Sequence[TrialRecord]) -> None:
        """Sets the critical paths of trials; the pace of the follow-up iterations, of other trials, is a guess."""
        leading = [trial for trial in trials if trial.progress.follow_up_iterations > 0]
        pace = self._estimates.usual_pace() if leading else 0.0
        for trial in leading:
            follow_up = trial.progress.follow_up_iterations * pace
            self._work.set_path(trial.row, self._estimates.height(trial) + follow_up)

    def to_start_early(self, trials: Sequence[TrialRecord]) -> set[int]:
        """Rows of an owner's first trials without follow-up iterations: with those that run, as many as their share.

        That is their share of its work.

        The others fill the devices at the end; but results of whole trials are of use from the beginning.
        """
        by_owner: dict[int, list[TrialRecord]] = {}
        for trial in trials:
            by_owner.setdefault(trial.owner, []).append(trial)
        return set().union(*(self._early_of(owner, some) for owner, some in by_owner.items()))

    def _early_of(self, owner: int, trials: Sequence[TrialRecord]) -> set[int]:
        others = [trial.row for trial in trials if trial.progress.follow_up_iterations == 0]
        if len(others) == len(trials) or not others:
            return set()
        heights = {trial.row: self._height(trial) for trial in trials}
        share = sum(heights[row] for row in others) / sum(heights.values())
        running = [trial for row in self._table if (trial := self._trials.by_row[row]).owner == owner]
        led = sum(trial.progress.follow_up_iterations == 0 for trial in running)
        return set(others[: max(0, round(share * len(self._occupancy)) - led)])

    def _height(self, trial: TrialRecord) -> float:
        """Seconds of work left, more than 0: a trial that is queued for a call has run its budget."""
        return max(self._estimates.height(trial), tuning.LEAST_HEIGHT_S)
