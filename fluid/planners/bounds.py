"""gamma(T), the narrowest width at which each trial ends within T, and target times T for a plan.

See docs/theory.md, section 6.

Trials with the same overheads and limits are sorted by height once. For a time T the trials of one width are
then a contiguous run, so each query about T costs a few binary searches and no pass over the trials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fluid.measure.runtime_model import FloatArray, FusedRates, IntArray, RuntimeModel, stretch_of
from fluid.planners.instance import Instance
from fluid.resources import TOLERANCE

#: Halvings of an interval no wider than its lower end: 40 reach 1e-12 of the time, finer than TOLERANCE.
_BISECTIONS = 40
#: With more kinds of trial than this, alpha and beta are rounded to a grid: a query costs one search per kind, and a
#: plan of rounded overheads, which is compared by rollout, is only slightly worse.
_MAX_KINDS = 64
#: Finer than overheads are measured.
_GRID = 0.01
#: Packs of up to so many rows are planned in all sizes.
_SMALL_PACK = 8


@dataclass(frozen=True)
class _Kind:
    """Trials of one alpha, beta, c, d and table of fused rates."""

    rows: IntArray  # by ascending height
    heights: FloatArray  # ascending
    work: FloatArray  # work[j] = sum of the first j heights
    widths: FloatArray  # ascending
    stretch: FloatArray  # h(w)/h(1) at those widths, descending
    residents: IntArray  # p for a width 1/p, 1 for others

    def bounds(self, within: float) -> IntArray:
        """Where the run of each width ends: trial j has width i for bounds[i] <= j < bounds[i + 1]."""
        ends = np.searchsorted(self.heights, within * (1.0 + TOLERANCE) / self.stretch, side="right")
        return np.concatenate([[0], np.maximum.accumulate(ends)])


class NarrowestWidths:
    """Queries about gamma(T) for one instance, over the widths ``{1/c..1/2, 1..d}``.

    Args:
        instance: the trials and the number of devices.
        rounding: how to round overheads if there are many kinds: up for a plan, down for a bound.
    """

    def __init__(self, instance: Instance, rounding: Callable[[FloatArray], FloatArray] = np.ceil) -> None:
        self._n = instance.n
        self._k = len(instance)
        self._kinds = [_make_kind(kind, instance.heights) for kind in distinct_kinds(instance.model, rounding)]
        #: Seconds of the longest trial at its fastest width.
        self.shortest = max(float(kind.heights[-1] * kind.stretch[-1]) for kind in self._kinds)

    def widths(self, within: float) -> FloatArray:
        """(k,) the narrowest width at which each trial ends within ``within`` seconds, else its widest."""
        chosen = np.empty(self._k)
        for kind in self._kinds:
            bounds = kind.bounds(within)
            bounds[-1] = len(kind.rows)
            chosen[kind.rows] = np.repeat(kind.widths, np.diff(bounds))
        return chosen

    def fixed_width_bound(self) -> float:
        """T*, seconds: the smallest T with ``sum_i gamma_i(T) h_i(gamma_i(T)) <= n T``.

        It bounds schedules in which each trial keeps one width and takes ``h_i(w)``. It does not bound packed trials
        whose neighbours end early: they take less than ``h_i(w)``.
        """
        return self._smallest(self._fits_by_area, self.shortest)

    def packable(self, at_least: float) -> float:
        """T1 in ``[T*, 2T*]``, seconds: the smallest T whose widths also fit on whole devices.

        Wide trials, and each packing class but the narrowest, take whole devices from the start; the narrowest class
        must fit into the remaining area.
        """
        return self._smallest(self._fits_on_devices, at_least, at_most=2.0 * at_least)

    def _fits_by_area(self, within: float) -> bool:
        area = 0.0
        for kind in self._kinds:
            bounds = kind.bounds(within)
            if bounds[-1] < len(kind.rows):
                return False
            area += float((np.diff(kind.work[bounds]) * kind.stretch * kind.widths).sum())
        return area <= self._n * within * (1.0 + TOLERANCE)

    def _fits_on_devices(self, within: float) -> bool:
        whole, narrowest_area = 0.0, 0.0
        sharing: dict[int, int] = {}
        for kind in self._kinds:
            bounds = kind.bounds(within)
            if bounds[-1] < len(kind.rows):
                return False
            counts = np.diff(bounds)
            area = np.diff(kind.work[bounds]) * kind.stretch * kind.widths
            narrowest_area += float(area[0])
            wide = kind.widths >= 1.0
            wide[0] = False
            whole += float((counts * kind.widths)[wide].sum())
            for p, count in zip(kind.residents[1:].tolist(), counts[1:].tolist(), strict=True):
                if p > 1:
                    sharing[p] = sharing.get(p, 0) + count
        whole += sum(-(-count // p) for p, count in sharing.items())
        return whole <= self._n and narrowest_area <= (self._n - whole) * within * (1.0 + TOLERANCE)

    @staticmethod
    def _smallest(fits: Callable[[float], bool], low: float, at_most: float | None = None) -> float:
        """The smallest time of at least ``low`` that fits, by bisection; ``at_most`` is taken to fit."""
        if fits(low):
            return low
        high = at_most if at_most is not None else 2.0 * low
        while at_most is None and not fits(high):
            low, high = high, 2.0 * high
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            if fits(middle):
                high = middle
            else:
                low = middle
        return high


class OverheadKind(NamedTuple):
    """Trials of equal overheads and limits.

    Attributes:
        alpha, beta, c, d: theirs.
        fused: their rates as rows of a fused pack, in place of alpha; ``None`` for others.
        rows: their rows in the model.
    """

    alpha: float
    beta: float
    c: int
    d: int
    fused: FusedRates | None
    rows: IntArray

    def stretch(self, width: float) -> float:
        """h(w)/h(1)."""
        return stretch_of(self.alpha, self.beta, width, self.fused)


def distinct_kinds(model: RuntimeModel, rounding: Callable[[FloatArray], FloatArray]) -> list[OverheadKind]:
    """The distinct overheads and limits of a model, each with its rows.

    If there are more than _MAX_KINDS, ``rounding`` first brings alpha and beta to a grid.
    """
    tables = (None,) if model.fused is None else model.fused.rates
    table = np.zeros(len(model), dtype=np.int64) if model.fused is None else model.fused.kind
    columns = np.column_stack([model.alpha, model.beta, model.c, model.d, table])
    if (columns == columns[0]).all():
        a, b, c, d, t = columns[0].tolist()
        return [OverheadKind(a, b, int(c), int(d), tables[int(t)], np.arange(len(model)))]
    distinct, kind = np.unique(columns, axis=0, return_inverse=True)
    if len(distinct) > _MAX_KINDS:
        columns[:, :2] = np.maximum(1.0, rounding(columns[:, :2] / _GRID) * _GRID)
        distinct, kind = np.unique(columns, axis=0, return_inverse=True)
    by_kind = np.argsort(kind.ravel(), kind="stable")
    parts = np.split(by_kind, np.cumsum(np.bincount(kind.ravel()))[:-1])
    return [
        OverheadKind(a, b, int(c), int(d), tables[int(t)], rows)
        for (a, b, c, d, t), rows in zip(distinct.tolist(), parts, strict=True)
    ]


def _make_kind(kind: OverheadKind, heights: FloatArray) -> _Kind:
    packed = range(kind.c, 1, -1) if kind.fused is None else _packs(kind.c)
    residents = [*packed, *([1] * kind.d)]
    widths = [1.0 / p for p in packed] + [float(w) for w in range(1, kind.d + 1)]
    ascending = kind.rows[np.argsort(heights[kind.rows], kind="stable")]
    # Rounding beta up may make the widest widths useless; heights must not rise again with the width.
    stretch = np.minimum.accumulate([kind.stretch(width) for width in widths])
    return _Kind(
        rows=ascending,
        heights=heights[ascending],
        work=np.concatenate([[0.0], np.cumsum(heights[ascending])]),
        widths=np.array(widths),
        stretch=stretch,
        residents=np.array(residents, dtype=np.int64),
    )


def _packs(c: int) -> list[int]:
    """Sizes of packs to plan with, descending: all small ones, and of the others c and the powers of two below it.

    Planning with hundreds would take long and gain little: 33 rows take about as long as 32.
    """
    return sorted({*range(2, min(c, _SMALL_PACK) + 1), *(2**step for step in range(1, c.bit_length())), c} - {1})[::-1]


# -- bounds --------------------------------------------------------------------------------------
#
# Lower bounds on the makespan (docs/theory.md, section 5).
#
# ``mLB`` bounds every schedule, including those that change widths while trials run; ``T*`` bounds only schedules with
# fixed widths in which packed trials share their device from start to end.


#: Halvings of an interval no wider than its lower end: 60 reach double precision.
_BOUND_BISECTIONS = 60


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
    for _ in range(_BOUND_BISECTIONS):
        middle = 0.5 * (low + high)
        if devices_needed(middle) <= capacity:
            high = middle
        else:
            low = middle
    return high


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
