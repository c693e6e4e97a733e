from __future__ import annotations

import random
import time
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluid.policies.owners.shares import GROUP_POLICIES, Job, plan_groups

ODD, EVEN = 0b01, 0b10
KINDS = 6
JOBS = st.lists(
    st.builds(
        Job,
        owner=st.integers(0, 8),
        eligible=st.integers(1, 2**KINDS - 1),
        demand=st.floats(0.0, 1e6),
        waiting=st.integers(0, 5),
        arrived=st.sampled_from([0.0, 1.0, 2.0]),
        age=st.floats(0.0, 1e4),
        alone=st.floats(0.0, 1e4),
    ),
    max_size=12,
    unique_by=lambda job: (job.owner, job.eligible),
)
DEVICES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 8.0, 30.0]), min_size=KINDS, max_size=KINDS)
FAIRNESS = st.sampled_from([0.0, 1.0, 2.0])


def check_ins(policy: str) -> list[int]:
    """Figure 4.3 of Venn: a device checks in per second and serves one trial of one job at once."""
    eligible = {0: ODD | EVEN, 1: ODD, 2: ODD}
    left = {0: 3, 1: 4, 2: 4}
    ends = [0, 0, 0]
    jobs = [Job(owner, eligible[owner], float(left[owner]), left[owner]) for owner in left]
    plan = plan_groups(policy, jobs, (1.0, 1.0))
    order = sorted(left, key=lambda owner: plan.ranks[owner])
    now = 0
    while any(left.values()):
        now += 1
        kind = ODD if now % 2 else EVEN
        waiting = [owner for owner in order if left[owner] and eligible[owner] & kind]
        first = [owner for owner in waiting if plan.shares[eligible[owner]] & kind]
        for owner in (first or waiting)[:1]:
            left[owner] -= 1
            ends[owner] = now
    return ends


@pytest.mark.parametrize(("policy", "ends"), [("srsf", [3, 11, 19]), ("irs", [6, 7, 15])])
def test_scarce_devices_first_ends_jobs_sooner_on_average(policy: str, ends: list[int]) -> None:
    assert check_ins(policy) == ends  # Mean 11.0 under SRSF, 9.33 under IRS.


@example([Job(0, 1, 0.0, 0, 0.0, 0.0, 0.0), Job(0, 2, 0.0, 1, 0.0, 11.0, 7.5e-154)], [0.0] * 6, 2.0)  # Tiny times.
@given(JOBS, DEVICES, FAIRNESS)
def test_shares_are_disjoint_and_cover_every_kind_that_a_job_can_use(
    jobs: list[Job], devices: list[float], fairness: float
) -> None:
    shares = plan_groups("irs", jobs, devices, fairness).shares
    assert set(shares) == {job.eligible for job in jobs}
    taken = 0
    for eligible, share in shares.items():
        assert share & ~eligible == 0
        assert share & taken == 0
        taken |= share
    usable = 0
    for job in jobs:
        usable |= job.eligible
    assert taken == usable


@given(JOBS, DEVICES)
def test_jobs_for_which_nothing_waits_keep_no_device_from_others(jobs: list[Job], devices: list[float]) -> None:
    shares = plan_groups("irs", jobs, devices).shares
    in_want = {job.eligible for job in jobs if job.waiting}
    for eligible, share in shares.items():
        if eligible not in in_want:
            assert not any(share & other for other in in_want)


@given(JOBS, DEVICES, FAIRNESS, st.sampled_from(GROUP_POLICIES), st.randoms(use_true_random=False))
def test_the_order_of_the_jobs_does_not_matter(
    jobs: list[Job], devices: list[float], fairness: float, policy: str, shuffler: random.Random
) -> None:
    plan = plan_groups(policy, jobs, devices, fairness)
    shuffled = jobs.copy()
    shuffler.shuffle(shuffled)
    assert plan_groups(policy, shuffled, devices, fairness) == plan
    assert sorted(plan.ranks.values()) == list(range(len({job.owner for job in jobs})))


def test_fifo_ranks_by_arrival_and_then_by_owner() -> None:
    jobs = [
        Job(3, 1, 5.0, arrived=2.0),
        Job(1, 1, 9.0, arrived=2.0),
        Job(2, 1, 1.0, arrived=7.0),
        Job(0, 1, 3.0, arrived=4.0),
    ]
    plan = plan_groups("fifo", jobs, (1.0,))
    assert plan.ranks == {1: 0, 3: 1, 0: 2, 2: 3}
    assert plan.shares == {1: 1}


def test_srsf_ranks_by_demand_over_all_jobs_of_an_owner_and_keeps_no_device_from_any() -> None:
    jobs = [Job(0, 0b01, 5.0), Job(0, 0b10, 6.0), Job(1, 0b11, 10.0), Job(2, 0b11, 10.0, arrived=-1.0)]
    plan = plan_groups("srsf", jobs, (1.0, 1.0))
    assert plan.ranks == {2: 0, 1: 1, 0: 2}
    assert plan.shares == {0b01: 0b01, 0b10: 0b10, 0b11: 0b11}


def test_a_larger_set_takes_an_intersection_where_more_jobs_wait_per_device() -> None:
    scarce = [Job(0, 0b01, 1.0)]
    general = [Job(owner, 0b11, 1.0) for owner in range(1, 8)]
    assert plan_groups("irs", scarce + general[:6], (2.0, 10.0)).shares == {0b01: 0b01, 0b11: 0b10}
    assert plan_groups("irs", scarce + general, (2.0, 10.0)).shares == {0b01: 0, 0b11: 0b11}


def test_nested_sets_never_share_a_kind() -> None:
    jobs = [Job(owner, 2 ** (owner + 1) - 1, 1.0) for owner in range(5)]
    shares = plan_groups("irs", jobs, [1.0] * 5).shares
    assert shares == {0b1: 0b1, 0b11: 0b10, 0b111: 0b100, 0b1111: 0b1000, 0b11111: 0b10000}


def test_without_jobs_there_is_nothing_to_plan() -> None:
    plan = plan_groups("irs", [], [])
    assert plan.ranks == {} and plan.shares == {}


def test_fairness_brings_an_owner_forward_that_has_waited_for_long() -> None:
    short, long = Job(0, 1, 10.0, age=1.0, alone=10.0), Job(1, 1, 100.0, age=1000.0, alone=100.0)
    assert plan_groups("srsf", [short, long], (1.0,)).ranks == {0: 0, 1: 1}
    assert plan_groups("srsf", [short, long], (1.0,), 2.0).ranks == {1: 0, 0: 1}


def test_fairness_counts_jobs_that_have_waited_for_long_more_than_once() -> None:
    scarce, general = Job(0, 0b01, 1.0, age=1.0, alone=10.0), Job(1, 0b11, 1.0, age=90.0, alone=10.0)
    assert plan_groups("irs", [scarce, general], (1.0, 1.0)).shares == {0b01: 0b01, 0b11: 0b10}
    assert plan_groups("irs", [scarce, general], (1.0, 1.0), 1.0).shares == {0b01: 0, 0b11: 0b11}


def test_a_thousand_groups_on_fifty_kinds_are_planned_in_milliseconds() -> None:
    choose = random.Random(1)
    devices = [choose.uniform(1.0, 40.0) for _ in range(50)]
    for fairness in (0.0, 2.0):
        jobs = [
            Job(owner, choose.getrandbits(50) | 1 << choose.randrange(50), choose.random(), 3, 0.0, 1.0, 10.0)
            for owner in range(1000)
        ]
        seconds = []
        for _ in range(5):
            begin = time.process_time()  # Other programs on this machine do not count.
            for _ in range(4):
                plan_groups("irs", jobs, devices, fairness)
            seconds.append((time.process_time() - begin) / 4)
        assert median(seconds) < 0.03  # About 5 ms on a core of 2026.
