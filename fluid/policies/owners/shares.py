"""Group policies: which of several owners' groups gets which devices first (docs/theory.md, section 15).

A *job* is what one owner's trials that may use the same kinds of devices have left to do. Devices of one *kind* are
those that meet the same requirements, so a set of devices is a set of kinds, written as a bit mask.

What it gains (``benchmarks/groups.py``): mean completions of groups are 1.35 times as long under FIFO, and 1.05 times
under SRSF, as under the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import NamedTuple

import numpy as np

from fluid.devices.constraints import Constraint
from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.events import PLAIN_TERMS, GroupTerms, TrialSpec
from fluid.engine.placing.allocations import RemainingWork
from fluid.engine.placing.sharing import DeviceShare
from fluid.engine.records import TrialRecord, Trials
from fluid.policies.owners.kinds import DeviceKinds
from fluid.policies.owners.lateness import CAN_MEET, GroupLateness, Unit, end_alone, ends_of, order_units
from fluid.policies.owners.owners import JobTerms, OpenJobs, Owners, is_by_itself
from fluid.policies.owners.units import OpenUnits, OwnedWork
from fluid.resources import Requires

#: Owners are ranked anew, and devices shared out, at most so often while the same jobs are open.
SHARES_S = 1.0

# -- device allocation ---------------------------------------------------------------------------
#
# Allocates kinds of devices to jobs whose eligible sets overlap, scarce sets first (docs/theory.md, section 15).
#
# This is Venn's intersection-aware order. A set that few devices meet gets them before one that more devices meet, and
# gives its part of an intersection to a larger one if more jobs wait per device there, those that it gives included.
# Unlike Venn's listing, a set gives only what it has, as S_k & S_j would give a kind to two sets where three are
# nested, and sets with nothing to give are passed over, where the listing ends the search. m' counts jobs: with waiting
# trials, or their seconds, groups take longer in the mean than under SRSF.


class EligibleSet(NamedTuple):
    """The kinds of devices that some jobs may use, and how many of these jobs wait.

    Attributes:
        kinds: bit k is set for kind k.
        queue: m', the jobs that wait for one of these devices, adjusted for fairness.
    """

    kinds: int
    queue: float


def allocate(sets: Iterable[EligibleSet], devices: Sequence[float]) -> dict[int, int]:
    """Gives each set its share of the devices.

    Every kind in any set is in exactly one share, that of a set which has it. Takes about
    (number of sets) x (number of kinds) steps at most, as no more sets than there are kinds have a share.

    Args:
        sets: in any order; no two with the same kinds.
        devices: number of devices of each kind, weighted; sets have these kinds only.

    Returns:
        Kinds of a set -> those in its share, 0 where it has none.
    """
    known = sorted(sets)
    sizes = _sizes([each.kinds for each in known], devices)
    larger_first = sorted(range(len(known)), key=lambda number: (-sizes[number], number))
    free = (1 << len(devices)) - 1
    shares = [0] * len(known)
    # Sets for which nothing waits come last: they keep only what no other set may use.
    for number in sorted(larger_first, key=lambda number: (known[number].queue <= 0.0, sizes[number], number)):
        shares[number] = known[number].kinds & free
        free &= ~shares[number]
    pressure_on = _Pressures(devices)
    holders = [number for number in larger_first if shares[number]]
    pressures = {number: pressure_on(known[number], shares[number]) for number in holders}
    for taker in larger_first:
        kinds, queue = known[taker]
        while holders and sizes[holders[0]] >= sizes[taker]:  # Only smaller sets give.
            del holders[0]
        if queue <= 0.0:
            continue
        for giver in holders:
            common = shares[giver] & kinds
            if not common:
                continue
            if pressure_on(known[taker], shares[taker] | common) <= pressures[giver]:
                break
            shares[taker] |= common
            shares[giver] &= ~common
            pressures[giver] = pressure_on(known[giver], shares[giver])
    return {each.kinds: share for each, share in zip(known, shares, strict=True)}


def _sizes(masks: Sequence[int], devices: Sequence[float]) -> list[float]:
    """Number of devices in each of these sets of kinds."""
    if not masks or not devices:
        return [0.0] * len(masks)
    length = (len(devices) + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(length, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(masks), length), axis=1, count=len(devices), bitorder="little")
    # Not a matrix product: its last digits may depend on which rows there are.
    sizes: list[float] = (bits * np.asarray(devices, dtype=float)).sum(axis=1).tolist()
    return sizes


class _Pressures:
    """Jobs that wait per device of their set's share: m'/|S'|."""

    def __init__(self, devices: Sequence[float]) -> None:
        self._devices = devices
        self._sizes: dict[int, float] = {}

    def __call__(self, each: EligibleSet, share: int) -> float:
        if each.queue <= 0.0:
            return 0.0
        size = self._size(share)
        return each.queue / size if size > 0.0 else inf

    def _size(self, kinds: int) -> float:
        size = self._sizes.get(kinds)
        if size is None:
            size = self._sizes[kinds] = sum(count for kind, count in enumerate(self._devices) if kinds >> kind & 1)
        return size


# -- group policy --------------------------------------------------------------------------------


#: Most by which fairness weighs: beyond, floats end.
_MOST = 1e100

GROUP_POLICIES = ("irs", "srsf", "fifo")
DEFAULT_GROUP_POLICY = "irs"


class Job(NamedTuple):
    """What one owner's trials that may use the same devices have left to do.

    Attributes:
        owner: the caller's number of the owner.
        eligible: the kinds of devices that will do: bit k is set for kind k.
        demand: d, seconds of work left on one device.
        waiting: m, number of trials that want a device and have none; 0 takes the job's set no devices from others.
        arrived: when the owner's first open group came, seconds.
        age: seconds since then; the same in all of an owner's jobs. Only fairness depends on it.
        alone: sd, seconds that all of the owner's open work, done or not, would take if it had all devices that its
            jobs may use to itself; the same in all of its jobs. Only fairness depends on it.
    """

    owner: int
    eligible: int
    demand: float
    waiting: int = 1
    arrived: float = 0.0
    age: float = 0.0
    alone: float = 0.0


@dataclass(frozen=True)
class GroupPlan:
    """Who comes first, and where.

    Attributes:
        ranks: owner -> place in the starting order, from 0.
        shares: eligible kinds -> those of them whose devices are for jobs with that eligible set first. The devices
            that such jobs leave idle are for any others, in order of rank. Under ``"irs"`` no two shares have a kind
            in common; under the other policies all of a job's kinds are its share.
    """

    ranks: Mapping[int, int]
    shares: Mapping[int, int]


def plan_groups(policy: str, jobs: Sequence[Job], devices: Sequence[float], fairness: float = 0.0) -> GroupPlan:
    """Ranks owners and allocates devices.

    Under ``"fifo"`` the owner that came first is first. Under ``"srsf"`` the one with the least demand left is, over
    all its jobs, and under ``"irs"`` too, but jobs with scarce devices get those for themselves (:func:`allocate`).

    Fairness brings forward what takes long: with T = M sd, the time in which M owners side by side would all end, and
    t = T T/(T + age), an owner's demand counts as d (t/T)^epsilon, and the queue of a set as m (sum T/sum t)^epsilon.
    (With t the time of which an owner has had use, it would come the later, the more of its work is done.)

    Args:
        policy: one of :data:`GROUP_POLICIES`.
        jobs: the open jobs, in any order; an owner has one for each eligible set.
        devices: number of devices of each kind, weighted by their speeds; jobs are eligible for these kinds only.
        fairness: epsilon; 0 for the shortest mean completion time, which knows neither ``age`` nor ``alone``.
    """
    demands: dict[int, float] = {}
    arrivals: dict[int, float] = {}
    jobs = sorted(jobs)  # Sums of floats depend on their order.
    for job in jobs:
        demands[job.owner] = demands.get(job.owner, 0.0) + job.demand
        arrivals[job.owner] = min(arrivals.get(job.owner, job.arrived), job.arrived)
    if policy == "fifo":
        order = sorted(arrivals, key=lambda owner: (arrivals[owner], owner))
    else:
        if fairness:
            times = {job.owner: _fair_times(job, len(demands)) for job in jobs}
            demands = {owner: demand * _power(*times[owner][::-1], fairness) for owner, demand in demands.items()}
        order = sorted(demands, key=lambda owner: (demands[owner], arrivals[owner], owner))
    ranks = {owner: rank for rank, owner in enumerate(order)}
    if policy != "irs":
        return GroupPlan(ranks, {job.eligible: job.eligible for job in jobs})
    return GroupPlan(ranks, allocate(_sets(jobs, len(demands), fairness), devices))


def _fair_times(job: Job, owners: int) -> tuple[float, float]:
    """T and t, seconds."""
    fair = owners * job.alone
    return fair, fair * fair / (fair + job.age) if fair > 0.0 else 0.0


def _sets(jobs: Sequence[Job], owners: int, fairness: float) -> list[EligibleSet]:
    """The eligible sets of all jobs, and how many wait for each."""
    waiting: dict[int, float] = {}
    for job in jobs:
        waiting[job.eligible] = waiting.get(job.eligible, 0.0) + (job.waiting > 0)
    if fairness:
        times = dict.fromkeys(waiting, (0.0, 0.0))
        for job in jobs:
            if job.waiting:
                (fair, used), (more_fair, more_used) = times[job.eligible], _fair_times(job, owners)
                times[job.eligible] = fair + more_fair, used + more_used
        for eligible, (fair, used) in times.items():
            waiting[eligible] *= _power(fair, used, fairness)
    return [EligibleSet(eligible, queue) for eligible, queue in waiting.items()]


def _power(part: float, whole: float, exponent: float) -> float:
    """(part / whole) ** exponent, at most ``_MOST``; 1 if there is no whole."""
    if whole <= 0.0:
        return 1.0
    try:
        return min(_MOST, float((part / whole) ** exponent))
    except OverflowError:
        return _MOST


# -- group shares --------------------------------------------------------------------------------
#
# Group shares: which owner's trials start first, and on which devices (:mod:`fluid.policies.owners.shares`).


class _Owned(NamedTuple):
    """What an owner has to do.

    Attributes:
        scale: by how much its work exceeds that of its open trials, for those that are yet to come.
        work: seconds of work left on one device, with theirs.
        alone: seconds that all of it, done or not, would take on all devices that will do.
        devices: those devices, weighted by their speeds.
    """

    scale: float
    work: float
    alone: float
    devices: float


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
        jobs: the same by job.

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
        jobs: OpenJobs,
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
        self._jobs = jobs
        self._kinds = DeviceKinds(occupancy)
        self._units = OpenUnits(trials, queue, occupancy, estimates)
        #: Owner -> the terms of its one group, which has a deadline or a weight, and when that was submitted, seconds.
        self._own_terms: dict[int, tuple[GroupTerms, float]] = {}
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
        """Whether an owner's trials may take devices of another's: it comes first, or is the same.

        Of groups that are ordered by themselves, none does by its rank alone
        (:class:`fluid.policies.owners.pauses.DeadlinePauses`).
        """
        if owner != other and (self.is_by_itself(owner) or self.is_by_itself(other)):
            return False
        return owner == other or self.is_before(owner, other)

    def share_of(self, trial: TrialRecord) -> frozenset[int] | None:
        """The devices that a trial gets first; ``None`` for all that it may get."""
        return self._shares.get(trial.job)

    def owner(self, terms: GroupTerms) -> int:
        """The number of a new group's owner: the group itself if it names none, or is ordered by itself."""
        self._kinds.supply.begin(self._occupancy.now)
        number = self._owners.number(terms)
        if is_by_itself(terms):
            passed = 0.0 if terms.deadline is None else terms.deadline.passed
            self._own_terms[number] = terms, self._occupancy.now - passed
        return number

    def job(self, owner: int, terms: GroupTerms, spec: TrialSpec) -> int:
        """The number of a new trial's job."""
        return self._owners.job(owner, terms, spec)

    def parts(self, arriving: Sequence[TrialRecord], positions: Sequence[int]) -> list[DeviceShare]:
        """The arriving trials at these positions, by devices, in order of the first of each."""
        return DeviceShares(self._occupancy, self._estimates, self._jobs, arriving, self).parts(positions)

    def share_of_job(self, job: int) -> frozenset[int] | None:
        """The devices that a job's trials get first; ``None`` for all that they may get."""
        return self._shares.get(job)

    def terms_of(self, job: int) -> JobTerms:
        """What the trials of a job have in common."""
        return self._owners.jobs[job]

    def forget_devices(self, changed: int) -> None:
        """Has to be called once a device has come, gone, or is closed or open again; its index."""
        self._kinds.forget_devices(changed)
        there = self._occupancy.residents.keys()
        self._shares = {job: share.intersection(there) for job, share in self._shares.items()}

    def rank_anew(self) -> None:
        """Ranks owners by what is known now, as that of an owner's work was a guess before."""
        self._ranked = None if self._ranked is None else (-1, -1)
        self.update()

    def update(self, arriving: Sequence[TrialRecord] = ()) -> None:
        """Ranks owners, and shares devices out among their jobs, if something has changed.

        Args:
            arriving: trials that are about to be queued.
        """
        if len(self._owners) < 2:
            return
        jobs = self._jobs
        new = {trial.job for trial in arriving if trial.job not in jobs.rows}
        owners = jobs.owners.keys() | {self._owners.owner_of[job] for job in new}
        if len(owners) < 2:
            if self._ranked is not None:
                self._queue.ranks, self._shares, self._ranked = {}, {}, None
            return
        known = jobs.version, self._kinds.version
        now = self._occupancy.now
        if not new and known == self._ranked and now - self._ranked_at < SHARES_S:
            return
        self._ranked, self._ranked_at = (-1, -1) if new else known, now
        self._rank(jobs, arriving)

    def lateness(self, owner: int, now: float) -> GroupLateness | None:
        """How the group that is this owner stands with regard to its deadline; ``None`` if it has none, or has ended.

        Args:
            owner: the number of the group's owner.
            now: seconds.
        """
        terms, since = self._own_terms.get(owner, (PLAIN_TERMS, 0.0))
        if terms.deadline is None or not self._jobs.owners.get(owner):
            return None
        missed = now - since >= terms.deadline.steps[-1][0]
        order, devices = self.units_in_order()
        at = next(place for place, unit in enumerate(order) if unit.owner == owner)
        unit, passed = order[at], now - self._occupancy.now
        alone = end_alone(unit, devices)
        earliest = None if isinf(alone.mean) else max(0.0, alone.mean - passed)
        if missed:
            return GroupLateness(0.0, earliest, False, True)
        if not unit.measured:
            return GroupLateness(None, earliest, None, False)
        due = next(seconds for seconds, _ in terms.deadline.steps if seconds > now - since) - (now - since) + passed
        odds = 1.0 - ends_of(order, devices)[at].late(due)
        return GroupLateness(odds, earliest, 1.0 - alone.late(due) >= CAN_MEET, False)

    def can_wait(self, owner: int) -> bool:
        """Whether an owner's trials may make room for what nothing is known of, endangering no deadline of theirs.

        One that can be met is safe if the group is expected to meet it even if half of its deadline's time is lost.
        """
        terms, _ = self._own_terms.get(owner, (PLAIN_TERMS, 0.0))
        if terms.deadline is None:
            return True
        order, devices = self.units_in_order()
        at = next((place for place, unit in enumerate(order) if unit.owner == owner), None)
        if at is None or not order[at].ahead:
            return True
        unit, due = order[at], order[at].ahead[0][0]
        if unit.measured and end_alone(unit, devices).late(due) > CAN_MEET:
            return True
        return unit.measured and ends_of(order, devices)[at].mean + 0.5 * unit.scale <= due

    def is_before(self, owner: int, other: int) -> bool:
        """Whether an owner comes before another in the starting order."""
        last = len(self.ranks)
        return self.ranks.get(owner, last) < self.ranks.get(other, last)

    def is_by_itself(self, owner: int) -> bool:
        """Whether an owner is one group that has a deadline or a weight."""
        return owner in self._own_terms

    @property
    def knows_lateness(self) -> bool:
        """Whether owners are ordered by what it costs if they end late: one of them has a deadline or a weight."""
        return bool(self._own_terms) and any(owner in self._own_terms for owner in self._jobs.owners)

    def units_in_order(self) -> tuple[list[Unit], float]:
        """The owners with open trials as units, in the present order, and the devices, weighted by their speeds."""
        demand, last = self._demand(()), len(self.ranks)
        units = self._made(demand, self._of_owners(demand), ())
        order = sorted(units, key=lambda unit: (-unit.priority, self.ranks.get(unit.owner, last), unit.owner))
        return order, sum(self._kinds.speeds)

    def _demand(self, arriving: Sequence[TrialRecord]) -> dict[int, float]:
        """Seconds of work left on one device by job; sorts the devices into the kinds that are wanted."""
        demand = {job: seconds * self._owners.jobs[job].devices for job, seconds in self._jobs.work.items()}
        for trial in arriving:
            seconds = self._estimates.height(trial) * self._owners.jobs[trial.job].devices
            demand[trial.job] = demand.get(trial.job, 0.0) + seconds
        self._kinds.find({self._owners.jobs[job].wants for job in demand})
        return demand

    def _made(
        self, demand: Mapping[int, float], owned: Mapping[int, _Owned], arriving: Sequence[TrialRecord]
    ) -> list[Unit]:
        """The owners as units that are ordered by what it costs if they end late."""
        now, priority = self._occupancy.now, dict[int, float]()
        for job in demand:
            owner, own = self._owners.owner_of[job], self._owners.jobs[job].group_priority
            priority[owner] = max(own, priority.get(owner, own))
        works = []
        for owner, each in owned.items():
            terms, since = self._own_terms.get(owner, (PLAIN_TERMS, self._jobs.since.get(owner, now)))
            works.append(OwnedWork(owner, each.work, each.devices, since, priority[owner], terms))
        return self._units.make(works, arriving)

    def _rank(self, jobs: OpenJobs, arriving: Sequence[TrialRecord]) -> None:
        waiting = self._waiting()
        demand = self._demand(arriving)
        for trial in arriving:
            waiting[trial.job] = waiting.get(trial.job, 0) + 1
        owned = self._of_owners(demand)
        made = {
            job: self._job(job, seconds, waiting.get(job, 0), owned[self._owners.owner_of[job]])
            for job, seconds in demand.items()
        }
        self.demands = {owner: each.work for owner, each in owned.items()}
        devices = self._kinds.speeds
        if any(owner in self._own_terms for owner in owned):
            order = order_units(self._made(demand, owned, arriving), sum(devices))
            self._queue.ranks = {unit.owner: rank for rank, unit in enumerate(order)}
        else:
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
        since = self._jobs.since.get(owner, now)
        eligible = self._kinds.eligible(self._owners.jobs[job].wants)
        return Job(owner, eligible, demand * owned.scale, waiting, since, now - since, owned.alone)

    def _of_owners(self, demand: Mapping[int, float]) -> dict[int, _Owned]:
        """What the owners of jobs have to do in all."""
        jobs = self._jobs
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
            work, devices = seconds * scale, self._kinds.speed_of(kinds[owner])
            alone = (work + jobs.done.get(owner, 0.0)) / (devices or 1.0)
            found[owner] = _Owned(scale, work, alone, devices)
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


# -- device shares -------------------------------------------------------------------------------
#
# Device shares: trials that may get certain devices only, parted by those, and the other trials' work there.


#: What trials require of their devices, and those that they get first; ``None`` for nothing, and for any.
_Where = tuple[Requires | None, frozenset[int] | None]


class DeviceShares:
    """Parts arriving trials by the devices that they may get.

    Another trial's work counts on a set of devices in proportion to how many of its own devices are among these. A gang
    works on all of its devices.

    Args:
        occupancy: which trial holds which device.
        estimates: what work trials have left.
        jobs: the work of those that run or wait.
        arriving: the trials that arrive.
        shares: the devices that each job gets first; the others count for nothing, as they may be other jobs' for long.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        estimates: Estimates,
        jobs: OpenJobs,
        arriving: Sequence[TrialRecord],
        shares: GroupShares,
    ) -> None:
        self._occupancy = occupancy
        self._arriving = arriving
        self._open = {device.index: device for device in occupancy.open_devices}
        self._shares = shares
        #: Seconds of work by the devices for which it is, of the trials that run, wait or arrive.
        self._work: dict[_Where, float] = {}
        for job, seconds in jobs.work.items():
            self._count(job, seconds)
        for trial in arriving:
            self._count(trial.job, estimates.height(trial))
        self._estimates = estimates

    def parts(self, positions: Sequence[int]) -> list[DeviceShare]:
        """The arriving trials at these positions, by devices, in order of the first of each."""
        parts: dict[_Where, list[int]] = {}
        for position in positions:
            parts.setdefault(self._where(self._arriving[position].job), []).append(position)
        return [self._share(where, some) for where, some in parts.items()]

    def _share(self, where: _Where, positions: list[int]) -> DeviceShare:
        wanted = self._indices(where)
        others = -sum(self._estimates.height(self._arriving[position]) for position in positions)
        for other, seconds in self._work.items():
            theirs = self._indices(other)
            others += seconds * len(theirs & wanted) / max(1, len(theirs))
        idle = sum(index in wanted for index in self._occupancy.idle_since)
        return DeviceShare(positions, [self._open[index] for index in sorted(wanted)], idle, max(0.0, others))

    def _indices(self, where: _Where) -> set[int]:
        requires, share = where
        if share:  # Those without a share of their own get what others leave, anywhere.
            return self._open.keys() & share
        eligible = self._occupancy.eligible.of(None if requires is None else Constraint(requires))
        return set(self._open) if eligible is None else self._open.keys() & eligible

    def _count(self, job: int, seconds: float) -> None:
        where = self._where(job)
        self._work[where] = self._work.get(where, 0.0) + seconds * self._shares.terms_of(job).devices

    def _where(self, job: int) -> _Where:
        return self._shares.terms_of(job).requires, self._shares.share_of_job(job)
