"""Fits of overheads: what the seconds measured at several co-residencies, or widths, say together."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping

from fluid.planning.measurements import Bucket
from fluid.planning.runtime_model import TOLERANCE


def slope(line: Mapping[int, Bucket], *, shared: bool) -> float:
    """log alpha, or log beta if the devices share the work (eq. 3.2), from at least two buckets."""
    logs = {step: math.log(bucket.estimate * (step if shared else 1)) for step, bucket in line.items()}
    slopes = []
    for a, b in itertools.combinations(line, 2):
        # A slope is the more certain the further apart its two buckets are, and the more observations they have.
        noise = math.sqrt(1 / len(line[a].seconds) + 1 / len(line[b].seconds))
        slopes.append(((logs[b] - logs[a]) / (b - a), (b - a) / noise))
    return weighted_median(slopes)


def weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The smallest value such that the values up to it have at least half of the weight."""
    ordered = sorted(weighted)
    sums = list(itertools.accumulate(weight for _, weight in ordered))
    return ordered[bisect.bisect_left(sums, 0.5 * sums[-1] * (1.0 - TOLERANCE))][0]


def bounded_exp(exponent: float) -> float:
    """exp without OverflowError: an absurd measurement gives an absurd number."""
    return math.exp(min(max(exponent, -700.0), 700.0))
