"""Group shares: which owner's trials start first, and on which devices (:mod:`fluid.policies.owners.shares`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine import tuning
from fluid.engine.device_kinds import DeviceKinds
from fluid.engine.estimates import Estimates
from fluid.engine.open_jobs import OpenJobs
from fluid.engine.owners import JobTerms, Owners
from fluid.engine.records import TrialRecord
from fluid.engine.remaining_work import RemainingWork
from fluid.engine.trials import Trials
from fluid.policies.owners.shares import Job, plan_groups


class _Owned(NamedTuple):
    """What an owner has to do.

    Attributes:
        scale: by how much its work exceeds that of its open trials, for those that are yet to come.
        work: seconds of work left on one device, with theirs.
        alone: seconds that all of it, done or not, would take on all devices that will do.
    """

    scale: float
    work: float
    alone: float


class GroupShares:
    """Applies a group policy while trials of several owners are open; with one owner, nothing is ranked or shared.

    Args:
        policy: one of :data:`fluid.policies.owners.shares.GROUP_POLICIES`.
        fairness: epsilon.
        owners: the owners and their jobs.
        trials: the trials of the session.
        queue: the trials that wait; its ranks are set here only.
        occupancy: the devices.
        estimates: how much work trials have left.
        work: the work of those that run or wait.

    Attributes:
        demands: owner -> seconds of work on one device that its trials, and those yet to come, had left when owners
            were last ranked.
    """

    def __init__(
        self,
        policy: str,
        fairness: float,
        owners: Owners,
        trials: Trials,
        queue: StartQueue,
        occupancy: Occupancy,
        estimates: Estimates,
        work: RemainingWork,
    ) -> None:
        self.policy = policy
        self.demands: dict[int, float] = {}
        self._fairness = fairness
        self._owners = owners
        self._trials = trials
        self._queue = queue
        self._occupancy = occupancy
        self._estimates = estimates
        self._work = work
        self._kinds = DeviceKinds(occupancy)
        #: job -> the devices that its trials get first; those of jobs that may get all of theirs are left out
        self._shares: dict[int, frozenset[int]] = {}
        #: The versions of the open jobs and of the devices with which owners were last ranked, and when, seconds.
        self._ranked: tuple[int, int] | None = None
        self._ranked_at = 0.0

    @property
    def restricts(self) -> bool:
        """Whether some trials get some of the devices that they may use only once others have had their choice."""
        return bool(self._shares)

    @property
    def ranks(self) -> Mapping[int, int]:
        """Owner -> place in the starting order; empty while one owner has open trials."""
        return self._queue.ranks

    def outranks(self, owner: int, other: int) -> bool:
        """Whether an owner's trials may take devices of another's: it comes first, or is the same."""
        last = len(self.ranks)
        return owner == other or self.ranks.get(owner, last) < self.ranks.get(other, last)

    def share_of(self, trial: TrialRecord) -> frozenset[int] | None:
        """The devices that a trial gets first; ``None`` for all that it may get."""
        return self._shares.get(trial.job)

    def share_of_job(self, job: int) -> frozenset[int] | None:
        """The devices that a job's trials get first; ``None`` for all that they may get."""
        return self._shares.get(job)

    def terms_of(self, job: int) -> JobTerms:
        """What the trials of a job have in common."""
        return self._owners.jobs[job]

    def forget_devices(self) -> None:
        """Has to be called when devices came or went."""
        self._kinds.forget_devices()
        there = self._occupancy.residents.keys()
        self._shares = {job: share.intersection(there) for job, share in self._shares.items()}

    def update(self, arriving: Sequence[TrialRecord] = ()) -> None:
        """Ranks owners, and shares devices out among their jobs, if something has changed.

        Args:
            arriving: trials that are about to be queued.
        """
        if len(self._owners) < 2:
            return
        jobs = self._work.jobs
        new = {trial.job for trial in arriving if trial.job not in jobs.rows}
        owners = jobs.owners.keys() | {self._owners.owner_of[job] for job in new}
        if len(owners) < 2:
            if self._ranked is not None:
                self._queue.ranks, self._shares, self._ranked = {}, {}, None
            return
        known = jobs.version, self._kinds.version
        now = self._occupancy.now
        if not new and known == self._ranked and now - self._ranked_at < tuning.SHARES_S:
            return
        self._ranked, self._ranked_at = (-1, -1) if new else known, now
        self._rank(jobs, arriving)

    def _rank(self, jobs: OpenJobs, arriving: Sequence[TrialRecord]) -> None:
        waiting = self._waiting()
        demand = {job: seconds * self._owners.jobs[job].devices for job, seconds in jobs.work.items()}
        for trial in arriving:
            seconds = self._estimates.height(trial) * self._owners.jobs[trial.job].devices
            demand[trial.job] = demand.get(trial.job, 0.0) + seconds
            waiting[trial.job] = waiting.get(trial.job, 0) + 1
        self._kinds.find({self._owners.jobs[job].wants for job in demand})
        owned = self._of_owners(demand)
        made = {
            job: self._job(job, seconds, waiting.get(job, 0), owned[self._owners.owner_of[job]])
            for job, seconds in demand.items()
        }
        self.demands = {owner: each.work for owner, each in owned.items()}
        devices = self._kinds.speeds
        self._queue.ranks = plan_groups(self.policy, _merged(made.values()), devices, self._fairness).ranks
        self._shares = {}
        if len(devices) > 1:
            for priority in {self._owners.jobs[job].group_priority for job in made}:
                level = {job: each for job, each in made.items() if self._owners.jobs[job].group_priority == priority}
                plan = plan_groups(self.policy, _merged(level.values()), devices, self._fairness)
                for job, each in level.items():
                    share = plan.shares.get(each.eligible, each.eligible)
                    if share != each.eligible:
                        self._shares[job] = self._kinds.devices_of(share)

    def _job(self, job: int, demand: float, waiting: int, owned: _Owned) -> Job:
        owner, now = self._owners.owner_of[job], self._occupancy.now
        since = self._work.jobs.since.get(owner, now)
        eligible = self._kinds.eligible(self._owners.jobs[job].wants)
        return Job(owner, eligible, demand * owned.scale, waiting, since, now - since, owned.alone)

    def _of_owners(self, demand: Mapping[int, float]) -> dict[int, _Owned]:
        """What the owners of jobs have to do in all."""
        jobs = self._work.jobs
        left: dict[int, float] = {}
        kinds: dict[int, int] = {}
        for job, seconds in demand.items():
            owner, wants = self._owners.owner_of[job], self._owners.jobs[job].wants
            left[owner] = left.get(owner, 0.0) + seconds
            kinds[owner] = kinds.get(owner, 0) | self._kinds.eligible(wants)
        found = {}
        for owner, seconds in left.items():
            rows, further = jobs.owners.get(owner, 0), self._owners.expected.get(owner, 0)
            more = self._work.longest_path(owner) + (further * seconds / rows if rows else 0.0)
            scale = 1.0 + more / seconds if seconds > 0.0 else 1.0
            work = seconds * scale
            alone = (work + jobs.done.get(owner, 0.0)) / (self._kinds.speed_of(kinds[owner]) or 1.0)
            found[owner] = _Owned(scale, work, alone)
        return found

    def _waiting(self) -> dict[int, int]:
        waiting: dict[int, int] = {}
        for row, count in self._queue.lines():
            job = self._trials.by_row[row].job
            waiting[job] = waiting.get(job, 0) + count
        return waiting


def _merged(jobs: Iterable[Job]) -> list[Job]:
    """One job for each owner and set of devices; those that no device will do for are left out."""
    merged: dict[tuple[int, int], Job] = {}
    for job in jobs:
        before = merged.get(key := (job.owner, job.eligible))
        if before is not None:
            job = job._replace(demand=job.demand + before.demand, waiting=job.waiting + before.waiting)
        merged[key] = job
    return [job for job in merged.values() if job.eligible]
