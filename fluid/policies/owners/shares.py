"""Group policies: which of several owners' groups gets which devices first (docs/theory.md, section 15).

A *job* is what one owner's trials that may use the same kinds of devices have left to do. Devices of one *kind* are
those that meet the same requirements, so a set of devices is a set of kinds, written as a bit mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

# -- device allocation ---------------------------------------------------------------------------
#
# Allocates kinds of devices to jobs whose eligible sets overlap, scarce sets first (docs/theory.md, section 15).
#
# This is Venn's intersection-aware order. A set that few devices meet gets them before one that more devices meet, and
# gives its part of an intersection to a larger one if more jobs wait per device there, those that it gives included.


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
