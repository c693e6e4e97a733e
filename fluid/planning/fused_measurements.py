"""What the measured seconds of fused packs say: how much a row more costs, and how many rows pay."""

from __future__ import annotations

from fluid.planning.fused_rates import FusedRates
from fluid.planning.measurements import ALONE, Bucket, KeyProfile
from fluid.planning.runtime_model import TOLERANCE

#: Observations after which the seconds of a pack count as measured. Fewer than of other buckets: while rows are
#: doubled, all trials of the pack wait for them, and doubling errs by a factor of two at most.
MIN_FUSED_OBSERVATIONS = 3
#: If two rows take at most this many times as long as two trials one by one, four rows are tried before fusing is given
#: up. A batched step has a fixed cost, which the first doubling may not repay: MLPs and small CNNs ran at 0.5x to 0.9x
#: in a pack of one row, and at 1.1x to 1.8x in a pack of four (docs/fused.md).
LENIENT = 1.25


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
    """The largest power of two up to ``most`` whose doublings from 1 on all gain more than ``threshold``.

    The gain of doubling k rows is 1 - T(2k) / (2 T(k)). Doublings that were not measured count as worth trying. If the
    first does not gain enough, but T(2) / (2 T(1)) is at most ``LENIENT``, the first two are judged together, by
    1 - T(4) / (4 T(1)).
    """
    seconds = _seconds(known)

    def pays(rows: int, more: int) -> bool:
        if rows not in seconds or more not in seconds:
            return True
        return 1.0 - rows * seconds[more] / (more * seconds[rows]) > threshold + TOLERANCE

    rows = 1
    if most >= 4 and not pays(1, 2) and seconds[2] <= LENIENT * 2.0 * seconds[1] and pays(1, 4):
        rows = 4
    while 2 * rows <= most and pays(rows, 2 * rows):
        rows *= 2
    return rows


def _seconds(known: KeyProfile) -> dict[int, float]:
    """Measured seconds of an iteration by rows, ascending, of a trial alone (1) and of packs alone on a device."""
    packs = {rows: bucket for (processes, rows), bucket in known.fused.items() if processes == 1}
    if ALONE in known.buckets:
        packs[1] = known.buckets[ALONE]
    return {rows: packs[rows].estimate for rows in sorted(packs) if is_measured(packs[rows])}


def is_measured(bucket: Bucket) -> bool:
    """Whether the seconds in a bucket are reliable enough to judge by while rows are doubled."""
    return len(bucket.seconds) >= MIN_FUSED_OBSERVATIONS or bucket.measured
