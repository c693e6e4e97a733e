"""Widths in proportion to work: StaticFluid's water-filling, and the same for trials that arrive while others run."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fluid.measure.runtime_model import FloatArray, IntArray
from fluid.planners.arrangement import Running, WidthChange
from fluid.planners.instance import Instance
from fluid.resources import TOLERANCE

#: A share below this is one that rounding does not make a whole device.
_BELOW_ONE = 0.999


def shares(heights: FloatArray, n: int) -> FloatArray:
    """(k,) each trial's share of ``n`` devices, in proportion to its height."""
    total = float(heights.sum())
    return heights / total * n if total > 0.0 else np.zeros(len(heights))


def static_widths(heights: FloatArray, c: ArrayLike, d: ArrayLike, n: int) -> FloatArray:
    """``w_i = min(max(floor(h_i(1) / sum_j h_j(1) * n), 1/c), d_i)``.

    Args:
        heights: (k,) h_i(1), seconds.
        c: most co-resident trials, one number or (k,).
        d: most devices, one number or (k,).
        n: number of devices.

    Returns:
        (k,) widths; those above 1/c sum to at most n.
    """
    # With k = n alike trials each share is 1; TOLERANCE keeps rounding errors from flooring it to 0.
    whole = np.floor(shares(heights, n) + TOLERANCE)
    return np.minimum(np.maximum(whole, 1.0 / np.asarray(c, dtype=np.float64)), np.asarray(d, dtype=np.float64))


def arrival_widths(instance: Instance, others: FloatArray, idle: int) -> FloatArray:
    """Widths of trials that arrive while others run or wait: their shares of the total work.

    A trial whose share is below one device, or for which no device is idle, is packed.

    Args:
        instance: the k new trials, and all devices of the job.
        others: heights of the trials that run or wait, seconds.
        idle: number of idle devices.

    Returns:
        (k,) widths; those above 1/c sum to at most ``idle``.
    """
    model, k = instance.model, len(instance)
    everything = np.concatenate([instance.heights, others])
    whole = np.minimum(np.floor(shares(everything, instance.n)[:k] + TOLERANCE), model.d)
    widths = 1.0 / model.c
    for row in np.argsort(-instance.heights, kind="stable").tolist():
        devices = min(int(whole[row]), idle)
        if devices < 1:
            break
        widths[row] = devices
        idle -= devices
    return widths


def packed_widths(kinds: Instance, counts: IntArray, idle: int) -> FloatArray | None:
    """:func:`arrival_widths` of trials of which many are alike, if no trial gets a whole device.

    Args:
        kinds: the new trials, one of each kind, and all devices of the job.
        counts: (kinds,) trials of each kind.
        idle: number of idle devices.

    Returns:
        (kinds,) widths; ``None`` if a trial may get a whole device.
    """
    # The work of other trials only makes shares smaller.
    tallest, total = float(kinds.heights.max()), float((kinds.heights * counts).sum())
    if idle > 0 and tallest * kinds.n >= _BELOW_ONE * total:
        return None
    return 1.0 / kinds.model.c


def make_room(running: Running, waiting: FloatArray) -> list[WidthChange]:
    """Narrows running trials for queued ones, down to their shares of the total work.

    Wide trials shrink to a whole width. A trial alone on a device whose share is below one device allows packing: it
    stays where it is, so that it pays no epsilon.

    Args:
        running: the trials that run.
        waiting: heights of the queued trials, seconds, or their sum.

    Returns:
        Width changes, the widest trial first; none for a trial that ends within epsilon.
    """
    alone = np.flatnonzero(running.widths >= 1.0)
    if not len(alone) or not len(waiting):
        return []
    work = np.concatenate([running.remaining, waiting])
    whole = np.floor(shares(work, running.n)[alone] + TOLERANCE)
    widths = running.widths[alone]
    packed = np.where(whole < 1.0, 1.0 / running.c[alone], 1.0)
    target = np.where(widths >= 2.0, np.maximum(whole, 1.0), packed)
    ends_in = running.remaining[alone] / running.speed[alone] * running.beta[alone] ** (widths - 1.0) / widths
    moves = np.flatnonzero((target < widths) & (ends_in > running.epsilon))
    moves = moves[np.argsort(-widths[moves], kind="stable")]
    return [WidthChange(int(running.rows[alone[i]]), float(target[i])) for i in moves.tolist()]
