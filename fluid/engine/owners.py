"""The owners of groups, by number: the groups of one owner are scheduled as one."""

from __future__ import annotations

from typing import NamedTuple

from fluid.engine.device_kinds import Wants
from fluid.engine.group_terms import GroupTerms
from fluid.engine.trial_spec import TrialSpec
from fluid.resources import Requires


class JobTerms(NamedTuple):
    """What trials of one job have in common; trials of several jobs may get the same devices.

    Attributes:
        owner: number of their owner.
        group_priority: that of their groups.
        requires: what they require of a device; ``None`` if any will do.
        memory_bytes: the device memory that their submitter said they need; ``None`` if it said nothing.
        devices: how many a trial works on at once: those of a gang, else 1.
    """

    owner: int
    group_priority: float
    requires: Requires | None
    memory_bytes: float | None
    devices: int = 1

    @property
    def wants(self) -> Wants:
        """What decides which devices will do."""
        return self.requires, self.memory_bytes


class Owners:
    """Numbers owners in the order in which they first submit a group, and jobs in that of their first trial.

    Attributes:
        jobs: what the trials of each job have in common, by its number.
        expected: owner -> trials that its search algorithms have yet to submit, as far as they said how many there are.
    """

    def __init__(self) -> None:
        self.jobs: list[JobTerms] = []
        self.expected: dict[int, int] = {}
        self._numbers: dict[tuple[str, bool], int] = {}
        self._jobs: dict[JobTerms, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, group_id: str, terms: GroupTerms) -> int:
        """The number of a group's owner, which is the group itself if it names none."""
        name = (group_id, False) if terms.owner is None else (terms.owner, True)
        number = self._numbers.setdefault(name, len(self._numbers))
        if terms.expected_trials is not None:
            self.expected[number] = self.expected.get(number, 0) + terms.expected_trials
        return number

    def job(self, owner: int, terms: GroupTerms, spec: TrialSpec) -> int:
        """The number of a new trial's job."""
        if terms.expected_trials is not None:
            self.expected[owner] = max(0, self.expected[owner] - 1)
        constraint = spec.constraint()
        job = JobTerms(
            owner,
            terms.priority,
            None if constraint is None else constraint.requires,
            None if spec.memory is None else spec.memory.peak_bytes,
            constraint.width or 1 if constraint is not None and spec.gang else 1,
        )
        number = self._jobs.setdefault(job, len(self.jobs))
        if number == len(self.jobs):
            self.jobs.append(job)
        return number
