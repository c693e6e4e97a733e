"""The owners of groups, by number: the groups of one owner are scheduled as one."""

from __future__ import annotations

import functools
from itertools import takewhile
from typing import NamedTuple

from fluid.devices.occupancy import Occupancy
from fluid.engine.events import GroupTerms, TrialSpec
from fluid.engine.records import TrialRecord
from fluid.policies.owners.kinds import Wants
from fluid.resources import Requires

#: An owner without open trials for so long has ended: if it comes again, it is the last that came.
OWNER_GONE_S = 30.0


class JobTerms(NamedTuple):
    """What trials of one job have in common; trials of several jobs may get the same devices.

    Attributes:
        group_priority: that of their groups.
        requires: what they require of a device; ``None`` if any will do.
        memory_bytes: the device memory that their submitter said they need; ``None`` if it said nothing.
        devices: how many a trial works on at once: those of a gang, else 1.
    """

    group_priority: float
    requires: Requires | None
    memory_bytes: float | None
    devices: int = 1

    @property
    def wants(self) -> Wants:
        """What decides which devices will do."""
        return self.requires, self.memory_bytes


def is_by_itself(terms: GroupTerms) -> bool:
    """Whether the scheduler orders a group apart from its owner's other groups: it has a deadline, or a weight."""
    return terms.deadline is not None or terms.weight != 1.0


@functools.lru_cache(256)
def _one_of(alike: JobTerms) -> JobTerms:
    """One object for all that are alike."""
    return alike


class Owners:
    """Numbers owners in the order in which they first submit a group, and jobs in that of their first trial.

    Attributes:
        jobs: what the trials of each job have in common, by its number.
        owner_of: the number of its owner, by that of the job.
        expected: owner -> trials that its search algorithms have yet to submit, as far as they said how many there are.
    """

    def __init__(self) -> None:
        self.jobs: list[JobTerms] = []
        self.owner_of: list[int] = []
        self.expected: dict[int, int] = {}
        #: Those that have a name.
        self._named: dict[str, int] = {}
        #: The first job of each owner; most have one. ``None`` for an owner without trials.
        self._first: list[int | None] = []
        self._further: dict[tuple[int, JobTerms], int] = {}

    def __len__(self) -> int:
        return len(self._first)

    def number(self, terms: GroupTerms) -> int:
        """The number of a new group's owner: the group itself if it names none, or is ordered by itself."""
        name = None if is_by_itself(terms) else terms.owner
        number = len(self) if name is None else self._named.setdefault(name, len(self))
        if number == len(self):
            self._first.append(None)
        if terms.expected_trials is not None:
            self.expected[number] = self.expected.get(number, 0) + terms.expected_trials
        return number

    def job(self, owner: int, terms: GroupTerms, spec: TrialSpec) -> int:
        """The number of a new trial's job."""
        if terms.expected_trials is not None:
            self.expected[owner] = max(0, self.expected[owner] - 1)
        constraint = spec.constraint()
        job = JobTerms(
            terms.priority,
            None if constraint is None else constraint.requires,
            None if spec.memory is None else spec.memory.peak_bytes,
            constraint.width or 1 if constraint is not None and spec.gang else 1,
        )
        first = self._first[owner]
        if first is None:
            number = self._first[owner] = len(self.jobs)
        elif self.jobs[first] == job:
            return first
        else:
            number = self._further.setdefault((owner, job), len(self.jobs))
        if number == len(self.jobs):
            self.jobs.append(_one_of(job))
            self.owner_of.append(owner)
        return number


# -- open jobs -----------------------------------------------------------------------------------
#
# Open jobs: how much work is left of each job, kept up to date so that no event has to sum over its trials.


class OpenJobs:
    """The jobs (:class:`fluid.policies.owners.owners.JobTerms`) with trials that run or wait, and their owners.

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
            for gone in list(takewhile(lambda each: now - self._left[each] > OWNER_GONE_S, self._left)):
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

    def do(self, trial: TrialRecord, seconds: float) -> None:
        """Counts work that a trial has done."""
        self.done[trial.owner] += seconds
