"""The owners of groups, by number: the groups of one owner are scheduled as one."""

from __future__ import annotations

import functools
from typing import NamedTuple

from fluid.engine.device_kinds import Wants
from fluid.engine.group_terms import GroupTerms
from fluid.engine.trial_spec import TrialSpec
from fluid.resources import Requires


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
        """The number of a new group's owner, which is the group itself if it names none."""
        number = len(self) if terms.owner is None else self._named.setdefault(terms.owner, len(self))
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
