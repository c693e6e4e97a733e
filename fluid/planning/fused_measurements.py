"""What the measured seconds of fused packs say: how much a row more costs, and how many rows pay."""

from __future__ import annotations

import itertools
import math
from typing import TypeGuard

from fluid.planning.fused_rates import FusedRates, rows_worth_fusing
from fluid.planning.measurements import ALONE, HOPELESS, Bucket, KeyProfile

#: Observations after which the seconds of a pack count as measured. Fewer than of other buckets: while rows are
#: doubled, all trials of the pack wait for them, and doubling errs by a factor of two at most.
MIN_FUSED_OBSERVATIONS = 3


def fused_rates(known: KeyProfile) -> FusedRates | None:
    """T(k)/T(1) of packs alone on a device; ``None`` until a trial alone and a pack of two or more were measured."""
    seconds = _seconds(known)
    if 1 not in seconds or len(seconds) < 2:
        return None
    return FusedRates(tuple(seconds), tuple(each / seconds[1] for each in seconds.values()))


def fused_measured(known: KeyProfile) -> int:
    """The largest power of two such that 1, 2, 4, ... rows up to it were measured; 0 if a trial alone was not."""
    seconds, rows = _seconds(known), 1
    while rows in seconds:
        rows *= 2
    return rows // 2


def fused_limit(known: KeyProfile, most: int, threshold: float) -> int:
    """:func:`rows_worth_fusing`, by what was measured."""
    return rows_worth_fusing(_seconds(known), most, threshold)


def fused_packs(known: KeyProfile, rows: int) -> list[float]:
    """Measured seconds of an iteration with 1, 2, ... packs of so many rows on a device, up to the first gap."""
    buckets = (known.fused.get((processes, rows)) for processes in itertools.count(1))
    return [bucket.estimate for bucket in itertools.takewhile(is_measured, buckets) if bucket is not None]


def _seconds(known: KeyProfile) -> dict[int, float]:
    """Measured seconds of an iteration by rows, ascending, of a trial alone (1) and of packs alone on a device.

    One step suffices of rows that take far longer than so many trials one by one.
    """
    packs = {rows: bucket for (processes, rows), bucket in known.fused.items() if processes == 1}
    alone = known.buckets.get(ALONE)
    if is_measured(alone):
        packs[1] = alone
        hopeless = HOPELESS * alone.estimate
    else:
        hopeless = math.inf
    found = {rows: packs[rows] for rows in sorted(packs)}
    return {
        rows: bucket.estimate
        for rows, bucket in found.items()
        if is_measured(bucket) or min(bucket.seconds) > rows * hopeless
    }


def is_measured(bucket: Bucket | None) -> TypeGuard[Bucket]:
    """Whether the seconds in a bucket are reliable enough to judge by while rows are doubled."""
    if bucket is None:
        return False
    return len(bucket.seconds) >= MIN_FUSED_OBSERVATIONS or bucket.measured
