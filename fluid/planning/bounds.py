"""Lower bounds on the makespan (docs/theory.md, section 5).

``mLB`` bounds every schedule, including those that change widths while trials run; ``T*`` bounds only schedules with
fixed widths in which packed trials share their device from start to end.
"""

from __future__ import annotations

import numpy as np

from fluid.planning.fused_rates import FusedRates
from fluid.planning.instance import Instance
from fluid.planning.narrowest_widths import NarrowestWidths, distinct_kinds
from fluid.planning.runtime_model import FloatArray, stretch_of

#: Halvings of an interval no wider than its lower end: 60 reach double precision.
_BISECTIONS = 60


def malleable_lower_bound(instance: Instance) -> float:
    """mLB, seconds: the smallest T for which the trials' least areas fit, ``sum_i area_i(T) <= n T``.

    A trial that ends within T needs an average rate of ``h_i(1)/T``. The fewest devices for a rate lie on the lower
    convex envelope of width against rate, through (0, 0) since a trial may also wait. On devices of different
    speeds, the fastest one's speed bounds every trial and the sum of speeds bounds the area.
    """
    speeds = [device.speed for device in instance.cluster.devices]
    fastest = max(speeds)
    capacity = sum(speeds) / fastest
    # Rounding many kinds down keeps the bound valid, only a little looser.
    kinds = [
        (*envelope(kind.alpha, kind.beta, kind.c, kind.d, kind.fused), instance.heights[kind.rows] / fastest)
        for kind in distinct_kinds(instance.model, np.floor)
    ]
    # No trial beats its greatest rate, and the least area per work is the width per rate of the first corner.
    low = max(float(heights.max() / rates[-1]) for rates, _, heights in kinds)

    def devices_needed(within: float) -> float:
        return sum(float(np.interp(heights / within, rates, widths).sum()) for rates, widths, heights in kinds)

    if devices_needed(low) <= capacity:
        return low
    high = max(low, float(sum(heights.sum() for _, _, heights in kinds)) / capacity)
    while devices_needed(high) > capacity:
        high *= 2.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if devices_needed(middle) <= capacity:
            high = middle
        else:
            low = middle
    return high


def fixed_width_lower_bound(instance: Instance) -> float:
    """T*, seconds: bounds schedules in which every trial keeps one width w and takes ``h_i(w)``, at speed 1."""
    return NarrowestWidths(instance, np.floor).fixed_width_bound()


def envelope(
    alpha: float, beta: float, c: int, d: int, fused: FusedRates | None = None
) -> tuple[FloatArray, FloatArray]:
    """Corners (rate, width) of the lower convex envelope over ``{1/c..1/2, 1..d}`` and (0, 0)."""
    widths = [1.0 / p for p in range(c, 1, -1)] + [float(w) for w in range(1, d + 1)]
    points = sorted((1.0 / stretch_of(alpha, beta, width, fused), width) for width in widths)
    hull: list[tuple[float, float]] = [(0.0, 0.0)]
    for rate, width in points:
        if hull[-1][0] == rate:  # alpha = 1: the narrowest of the widths of one rate is listed first
            continue
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], (rate, width)):
            hull.pop()
        hull.append((rate, width))
    return np.array([rate for rate, _ in hull]), np.array([width for _, width in hull])


def _turns_down(a: tuple[float, float], b: tuple[float, float], p: tuple[float, float]) -> bool:
    """Whether b lies on or above the line from a to p."""
    return (b[1] - a[1]) * (p[0] - a[0]) >= (p[1] - a[1]) * (b[0] - a[0])
