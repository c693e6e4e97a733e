"""How long a group policy takes to plan 1,000 jobs on 50 kinds of devices: python benchmarks/plan_groups.py."""

from __future__ import annotations

import random
import time

from fluid.policies.owners.shares import Job, plan_groups

JOBS, KINDS, TIMES = 1000, 50, 50


def milliseconds(kinds_of_each: int, fairness: float) -> float:
    """Milliseconds of one core for a plan, where each job may use so many random kinds."""
    choose = random.Random(1)
    devices = [choose.uniform(1.0, 40.0) for _ in range(KINDS)]
    jobs = [
        Job(
            owner,
            sum(1 << kind for kind in choose.sample(range(KINDS), kinds_of_each)),
            demand=choose.uniform(1.0, 1000.0),
            waiting=choose.choice([0, 1, 3]),
            age=choose.uniform(0.0, 1000.0),
            alone=10.0,
        )
        for owner in range(JOBS)
    ]
    begin = time.process_time()
    for _ in range(TIMES):
        plan_groups("irs", jobs, devices, fairness)
    return (time.process_time() - begin) / TIMES * 1000


if __name__ == "__main__":
    print(f"{JOBS} jobs on {KINDS} kinds of devices; milliseconds of one core to plan, without and with fairness")
    for kinds in (1, 3, 10, 25, 45):
        print(f"{kinds:3d} kinds each  {milliseconds(kinds, 0.0):6.2f}  {milliseconds(kinds, 2.0):6.2f}")
