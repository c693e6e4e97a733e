"""Jobs of the shape of the trace on which Salus was measured: 100 training jobs on one device.

The trace itself is not published. What its authors tell of it, in the paper and in the dissertation of one of them (Yu
and Chowdhury, Fine-grained GPU sharing primitives for deep learning applications, MLSys 2020, section on long-running
training), decides this generator:

* 100 jobs of 15 models with several batch sizes and durations. First come, first served takes 303.4 minutes, of which
  the device is busy all the time: the mean job takes 3.03 minutes. Lengths are scaled to that sum.
* Lengths follow those of a production cluster, which are heavy-tailed. They are lognormal here, with a sigma of 1.42:
  with it, shortest remaining time first is 3.19 times as good as first come, first served in the mean completion, in
  the geometric mean of 1,000 traces, as in the paper (170.6 and 53.4 minutes). Fair sharing, which was not fitted, then
  takes 94 minutes, 96.6 in the paper. The median job takes 70 seconds, the longest of 100 about 45 minutes.
* Jobs arrive online, and nearly all wait: first come, first served completes them after 170.6 minutes in the mean, more
  than half of 303.4. Here they arrive at random, 20 times as fast as they are done. Their mean completion is 146
  minutes: as lengths are independent of arrivals, it exceeds half of 303.4 only by chance.
* An iteration takes tens of milliseconds to a few seconds: log-uniform from 0.05 to 3 s.
* Persistent memory is 110.9 to 822.2 MB, and the peak of an iteration from less than 1 GB to 13.8 GB, on a GPU with
  16 GB: both log-uniform, the peak from 1 GB.

Pure, and the same for a seed. ``python benchmarks/salus_trace.py`` prints what the three policies make of it, by
formula.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from statistics import fmean, geometric_mean
from typing import NamedTuple

import numpy as np

JOBS = 100
#: Seconds of all jobs together, and sigma of their logarithms.
TOTAL_S = 303.4 * 60.0
SIGMA = 1.42
#: Mean completion of first come, first served over that of the shortest remaining time first in the paper.
PUBLISHED_RATIO = 170.6 / 53.4
#: Mean time between two arrivals, over the mean length of a job.
GAP = 0.05
ITERATION_S = (0.05, 3.0)
PERSISTENT_BYTES = (110.9e6, 822.2e6)
PEAK_BYTES = (1e9, 13.8e9)
DEVICE_BYTES = 16e9


class TraceJob(NamedTuple):
    """A training job.

    Attributes:
        name: ``job-0`` is the first that arrives.
        at: when it arrives, seconds since the first one did.
        iterations: at least 1.
        iteration_s: seconds of one alone on the device.
        persistent_bytes: device memory that it holds between iterations.
        ephemeral_bytes: device memory on top of that at the peak of one.
    """

    name: str
    at: float
    iterations: int
    iteration_s: float
    persistent_bytes: float
    ephemeral_bytes: float

    @property
    def seconds(self) -> float:
        """Its length, alone on the device."""
        return self.iterations * self.iteration_s


def salus_trace(
    seed: int, *, jobs: int = JOBS, scale: float = 1.0, iteration_s: tuple[float, float] = ITERATION_S
) -> list[TraceJob]:
    """Draws a trace, in order of arrival.

    Args:
        seed: of all draws.
        jobs: how many.
        scale: factor of lengths and arrivals.
        iteration_s: least and most seconds of an iteration; that of a shorter job is the whole job.
    """
    rng = np.random.default_rng(seed)
    lengths = np.exp(SIGMA * rng.standard_normal(jobs))
    mean = scale * TOTAL_S / JOBS
    lengths *= jobs * mean / lengths.sum()
    arrivals = np.cumsum(rng.exponential(GAP * mean, jobs))
    arrivals -= arrivals[0]
    paces = np.exp(rng.uniform(*np.log(iteration_s), jobs))
    persistent, peaks = (np.exp(rng.uniform(*np.log(bounds), jobs)) for bounds in (PERSISTENT_BYTES, PEAK_BYTES))
    found = []
    for job in range(jobs):
        iterations = max(1, round(lengths[job] / paces[job]))
        found.append(
            TraceJob(
                f"job-{job}",
                float(arrivals[job]),
                iterations,
                float(lengths[job]) / iterations,
                float(persistent[job]),
                float(peaks[job] - persistent[job]),
            )
        )
    return found


def first_come_first_served(trace: Sequence[TraceJob]) -> list[float]:
    """When each job ends if they run one after another."""
    now, ends = 0.0, []
    for job in trace:
        now = max(now, job.at) + job.seconds
        ends.append(now)
    return ends


def shortest_remaining_first(trace: Sequence[TraceJob]) -> list[float]:
    """When each job ends if the one with the least work left runs at any time: no schedule has a lower mean."""
    ends = [math.inf] * len(trace)
    now, coming = 0.0, 0
    left: list[tuple[float, int]] = []
    while coming < len(trace) or left:
        if not left:
            now = max(now, trace[coming].at)
        while coming < len(trace) and trace[coming].at <= now:
            heapq.heappush(left, (trace[coming].seconds, coming))
            coming += 1
        seconds, job = heapq.heappop(left)
        until = trace[coming].at if coming < len(trace) else math.inf
        if now + seconds <= until:
            now += seconds
            ends[job] = now
        else:
            heapq.heappush(left, (seconds - (until - now), job))
            now = until
    return ends


def fair_shares(trace: Sequence[TraceJob]) -> list[float]:
    """When each job ends if all that are there advance by equal seconds at any time."""
    ends = [math.inf] * len(trace)
    now, coming = 0.0, 0
    left: dict[int, float] = {}
    while coming < len(trace) or left:
        if not left:
            now = max(now, trace[coming].at)
        while coming < len(trace) and trace[coming].at <= now:
            left[coming] = trace[coming].seconds
            coming += 1
        until = trace[coming].at if coming < len(trace) else math.inf
        first = min(left, key=lambda job: (left[job], job))
        ends_at = now + left[first] * len(left)
        step = left[first] if ends_at <= until else (until - now) / len(left)
        left = {job: seconds - step for job, seconds in left.items()}
        now = min(ends_at, until)
        if ends_at <= until:
            ends[first] = now
            del left[first]
    return ends


def mean_completion(trace: Sequence[TraceJob], ends: Sequence[float]) -> float:
    """Mean seconds from a job's arrival to its end."""
    return fmean(end - job.at for job, end in zip(trace, ends, strict=True))


#: What the paper measured, by the formulas above.
POLICIES: dict[str, Callable[[Sequence[TraceJob]], list[float]]] = {
    "first come, first served": first_come_first_served,
    "shortest remaining time first": shortest_remaining_first,
    "fair shares": fair_shares,
}


def main() -> None:
    """Prints the mean completion under each policy, over 1,000 seeds."""
    traces = [salus_trace(seed) for seed in range(1000)]
    means = {
        name: [mean_completion(trace, policy(trace)) / 60.0 for trace in traces] for name, policy in POLICIES.items()
    }
    for name, minutes in means.items():
        print(f"{name}: {fmean(minutes):.1f} min")
    first, shortest = means["first come, first served"], means["shortest remaining time first"]
    ratios = [one / other for one, other in zip(first, shortest, strict=True)]
    print(f"ratio of the first two: {geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
