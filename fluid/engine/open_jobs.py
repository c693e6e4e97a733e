"""Open jobs: how much work is left of each job, kept up to date so that no event has to sum over its trials."""

from __future__ import annotations

from itertools import takewhile

from fluid.devices.occupancy import Occupancy
from fluid.engine import tuning
from fluid.engine.records import TrialRecord


class OpenJobs:
    """The jobs (:class:`fluid.engine.owners.JobTerms`) with trials that run or wait, and their owners.

    Args:
        occupancy: knows the time.

    Attributes:
        work: job -> seconds of work left on one device.
        rows: job -> number of its trials that run or wait; no zeros.
        owners: owner -> number of its trials that run or wait; no zeros.
        since: owner -> since when it has had open trials, seconds; gaps between its rungs are passed over.
        done: owner -> seconds of work that its trials have done since then; as ``since`` dropped once it is gone.
        version: changes when a job opens or closes.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self.work: dict[int, float] = {}
        self.rows: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.since: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self.version = 0
        self._occupancy = occupancy
        #: owner -> when it last had no open trials any more, of those that are not gone, by that time
        self._left: dict[int, float] = {}

    def join(self, trial: TrialRecord, seconds: float) -> None:
        """Counts a trial that now runs or waits."""
        job, owner = trial.job, trial.owner
        count = self.rows.get(job, 0)
        if not count:
            self.version += 1
        self.rows[job], self.work[job] = count + 1, self.work.get(job, 0.0) + seconds
        open_trials = self.owners.get(owner, 0)
        if not open_trials:
            now = self._occupancy.now
            for gone in list(takewhile(lambda each: now - self._left[each] > tuning.OWNER_GONE_S, self._left)):
                del self._left[gone], self.since[gone], self.done[gone]
            if self._left.pop(owner, None) is None:
                self.since[owner], self.done[owner] = now, 0.0
        self.owners[owner] = open_trials + 1

    def leave(self, trial: TrialRecord, seconds: float) -> None:
        """Counts a trial no more, which had so much work left."""
        job, owner = trial.job, trial.owner
        count = self.rows[job] - 1
        if count:
            self.rows[job], self.work[job] = count, self.work[job] - seconds
        else:
            self.version += 1
            del self.rows[job], self.work[job]  # rounding must not add up
        open_trials = self.owners[owner] - 1
        if open_trials:
            self.owners[owner] = open_trials
        else:
            del self.owners[owner]
            self._left[owner] = self._occupancy.now

    def change(self, trial: TrialRecord, seconds: float, count: int = 1) -> None:
        """Adds to the work that each of so many trials of a trial's job has left."""
        self.work[trial.job] += seconds * count
