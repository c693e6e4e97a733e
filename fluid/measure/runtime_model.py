"""The runtime model: how a trial's runtime depends on its width (docs/theory.md, section 2; paper eq. 3.1 and 3.2).

Widths are floats: ``1/p`` for one of ``p`` co-resident trials on a device, and whole numbers from 1 on. Heights
are predicted remaining runtimes in seconds.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.resources import TOLERANCE

# -- fused rates ---------------------------------------------------------------------------------
#
# How long an iteration of a fused pack takes, by its rows: tables of measurements (docs/theory.md, section 10).


#: Default bound on the rows of a pack. On an H200, packs of 128 ran 1.1 to 1.7 times as many samples per second as
#: packs of 64, of five models, and packs of 256 fewer, of two (benchmarks/results/gpu_2026-11-27.json). On a core of a
#: CPU, 128 ran 0.8 to 1.1 times as many. Fewer are fused where a doubling does not gain.
DEFAULT_MAX_FUSED = 128
#: If two rows take at most this many times as long as two trials one by one, four rows are tried before fusing is given
#: up. A batched step has a fixed cost, which the first doubling may not repay: MLPs and small CNNs ran at 0.5x to 0.9x
#: in a pack of one row, and at 1.1x to 1.8x in a pack of four (benchmarks/fusion.py).
LENIENT = 1.25
#: Absorbs rounding errors in comparisons with the threshold.
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class FusedRates:
    """T(k)/T(1): seconds of an iteration of k fused trials, relative to one of a trial alone.

    The overhead of processes grows by about the same factor per process, so one number, alpha, describes it. That of
    fused rows does not: the first rows fill a device that is mostly idle and cost next to nothing, and once the device
    is full, T grows in proportion to the rows. So the measured values are kept, and :meth:`stretch` joins them.

    Attributes:
        rows: k of each measurement, ascending; the first is 1.
        stretches: T(k)/T(1) of each, above 0; the first is 1.0.

    Raises:
        InvalidFieldError: the two do not match, or a value is none of these.

    Example:
        >>> from fluid.measure.runtime_model import FusedRates
        >>> rates = FusedRates((1, 2, 4), (1.0, 1.1, 1.375))
        >>> rates.stretch(2), round(rates.stretch(3), 3), rates.stretch(8)
        (1.1, 1.253, 2.75)
    """

    rows: tuple[int, ...]
    stretches: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or self.rows[0] != 1:
            raise InvalidFieldError("rows", self.rows, "must start with 1")
        for before, row in zip((0, *self.rows), self.rows, strict=False):
            require_integer("rows", row, at_least=1)
            if row <= before:
                raise InvalidFieldError("rows", self.rows, "must be ascending")
        if len(self.stretches) != len(self.rows):
            raise InvalidFieldError("stretches", self.stretches, f"must be {len(self.rows)} numbers, as rows are")
        for stretch in self.stretches:
            if require_number("stretches", stretch, at_least=0.0) == 0.0:
                raise InvalidFieldError("stretches", self.stretches, "must be above 0")
        if self.stretches[0] != 1.0:
            raise InvalidFieldError("stretches", self.stretches, "must start with 1.0, as that is T(1)/T(1)")

    @classmethod
    def of(cls, stretches: Mapping[int, float]) -> FusedRates:
        """Makes the rates from T(k)/T(1) by k; that of 1 may be left out."""
        table = {1: 1.0, **stretches}
        rows = sorted(table)
        return cls(tuple(rows), tuple(table[row] for row in rows))

    def gain(self, rows: int) -> float:
        """How many times the iterations per second of one trial alone that many fused trials do: rows / stretch."""
        return rows / self.stretch(rows)

    def stretch(self, rows: int) -> float:
        """T(rows)/T(1), for any number of rows from 1 on.

        * Where it was measured, the measured value.
        * Between two measurements, log T grows linearly in log rows.
        * Beyond the last measurement, T grows in proportion to the rows: no gain is assumed that was not measured.
        """
        at = bisect.bisect_left(self.rows, rows)
        if at == len(self.rows):
            return self.stretches[-1] * rows / self.rows[-1]
        if self.rows[at] == rows:
            return self.stretches[at]
        if at == 0:
            raise InvalidFieldError("rows", rows, "must be at least 1")
        low, high = self.rows[at - 1], self.rows[at]
        share = math.log(rows / low) / math.log(high / low)
        return float(self.stretches[at - 1] * (self.stretches[at] / self.stretches[at - 1]) ** share)

    def table(self, most: int) -> NDArray[np.float64]:
        """Returns T(k)/T(1) of 1, 2, ... rows up to at least ``most``."""
        return _table(self, 1 << (most - 1).bit_length())  # Bounds change often; powers of two are few.

    def limit(self, most: int, threshold: float) -> int:
        """The largest power of two of rows, up to ``most``, that pays (:func:`rows_worth_fusing`); else 1."""
        doubled = [2**step for step in range(most.bit_length())]
        return rows_worth_fusing({rows: self.stretch(rows) for rows in doubled}, most, threshold)


@dataclass(frozen=True, slots=True)
class FusedColumn:
    """The rates of some trials, one entry per trial: many trials share few tables.

    Attributes:
        rates: the distinct tables; ``None`` for trials whose co-residents are processes.
        kind: (k,) of each trial, its table's position in ``rates``.
    """

    rates: tuple[FusedRates | None, ...]
    kind: NDArray[np.int64]

    @classmethod
    def of(cls, values: Sequence[FusedRates | None]) -> FusedColumn | None:
        """Makes the column of one value per trial; ``None`` if no trial has rates."""
        # Hashing a table takes longer than all the rest, so it is done once per object.
        objects = {id(value): value for value in values}
        rates = tuple(dict.fromkeys(objects.values()))
        if rates in ((), (None,)):
            return None
        place = {value: position for position, value in enumerate(rates)}
        position = {number: place[value] for number, value in objects.items()}
        return cls(rates, np.array([position[number] for number in map(id, values)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, row: int) -> FusedRates | None:
        return self.rates[int(self.kind[row])]

    @property
    def fuses(self) -> NDArray[np.bool_]:
        """(k,) whether each trial has rates."""
        return np.array([rates is not None for rates in self.rates])[self.kind]

    def take(self, rows: NDArray[np.int64]) -> FusedColumn:
        """Returns the column of the trials ``rows``."""
        return FusedColumn(self.rates, self.kind[rows])

    def parts(self) -> list[tuple[FusedRates, NDArray[np.int64]]]:
        """Returns the tables that trials have, each with the rows of these trials."""
        found = [(rates, np.flatnonzero(self.kind == kind)) for kind, rates in enumerate(self.rates) if rates]
        return [(rates, rows) for rates, rows in found if len(rows)]

    def stretches(self, alpha: NDArray[np.float64], others: float | NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """(k,) h(1/p)/h(1) with ``others`` = p - 1 trials beside each, one number or (k,); by alpha without rates."""
        beside = np.broadcast_to(np.rint(others), len(self)).astype(np.int64)
        fuses = self.fuses
        found: NDArray[np.float64] = np.where(fuses, 1.0, alpha) ** np.where(fuses, 0, beside)
        for rates, rows in self.parts():
            found[rows] = rates.table(int(beside[rows].max()) + 1)[beside[rows]]
        return found


@functools.lru_cache(maxsize=256)
def _table(rates: FusedRates, most: int) -> NDArray[np.float64]:
    return np.array([rates.stretch(rows) for rows in range(1, most + 1)])


def rows_worth_fusing(seconds: Mapping[int, float], most: int, threshold: float) -> int:
    """The largest power of two up to ``most`` whose doublings from 1 on all gain more than ``threshold``.

    The gain of doubling k rows is 1 - T(2k) / (2 T(k)). Doublings that were not measured count as worth trying. If the
    first does not gain enough, but T(2) / (2 T(1)) is at most ``LENIENT``, the first two are judged together, by
    1 - T(4) / (4 T(1)).

    Args:
        seconds: T by rows, where measured; any unit.
        most: bound on the rows.
        threshold: O_th.
    """

    def pays(rows: int, more: int) -> bool:
        if rows not in seconds or more not in seconds:
            return True
        return 1.0 - rows * seconds[more] / (more * seconds[rows]) > threshold + _TOLERANCE

    rows = 1
    if most >= 4 and not pays(1, 2) and seconds[2] <= LENIENT * 2.0 * seconds[1] and pays(1, 4):
        rows = 4
    while 2 * rows <= most and pays(rows, 2 * rows):
        rows *= 2
    return rows


# -- runtime model -------------------------------------------------------------------------------


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Default bound on c. Each p up to c costs iterations to measure; the measured overhead lowers it further.
DEFAULT_MAX_PACKING = 4
#: Default bound on d: the GPUs of a common server.
DEFAULT_MAX_WIDTH = 8
#: O_th: one more co-resident must cut the device time per iteration by more than this (docs/theory.md, section 2).
DEFAULT_BENEFIT_THRESHOLD = 0.05


def marginal_benefit(residents: int, seconds: float, seconds_one_fewer: float) -> float:
    """O^p, what the p-th co-resident of a device gains (eq. 3.1).

    Args:
        residents: p, at least 2.
        seconds: mean seconds per iteration with p trials on the device.
        seconds_one_fewer: the same with p - 1 trials.

    Returns:
        The relative cut in device time per iteration; negative if packing one more costs throughput.
    """
    p = require_integer("residents", residents, at_least=2)
    if not (seconds > 0.0 and seconds_one_fewer > 0.0):
        raise InvalidFieldError("seconds", (seconds, seconds_one_fewer), "must both be above 0")
    return 1.0 - (p - 1) / p * seconds / seconds_one_fewer


def packing_limit_from_seconds(seconds: Sequence[float], *, threshold: float = DEFAULT_BENEFIT_THRESHOLD) -> int:
    """c, the most trials worth packing on a device, from measured seconds per iteration.

    Args:
        seconds: mean seconds per iteration with 1, 2, ... co-resident trials; c is at most its length.
        threshold: O_th.

    Returns:
        ``max{p : O^q > O_th for all 2 <= q <= p}``, else 1. (The paper's argmax, taken literally, is always 2.)
    """
    c = 1
    for p in range(2, len(seconds) + 1):
        if marginal_benefit(p, seconds[p - 1], seconds[p - 2]) <= threshold + TOLERANCE:
            break
        c = p
    return c


def packing_limit(alpha: float, *, c_max: int, threshold: float = DEFAULT_BENEFIT_THRESHOLD) -> int:
    """c for a constant packing overhead ``alpha``, for which ``O^p = 1 - alpha (p-1)/p``."""
    alpha = require_number("alpha", alpha, at_least=1.0)
    c, c_max = 1, require_integer("c", c_max, at_least=1)
    while c < c_max and marginal_benefit(c + 1, alpha, 1.0) > threshold + TOLERANCE:
        c += 1
    return c


def width_limit(beta: float, *, n: int, d_max: int) -> int:
    """d_i, the most devices a trial may span: each further device must shorten it.

    Returns:
        ``min(d_max, n, max{w : beta < w/(w-1)})``.
    """
    beta = require_number("beta", beta, at_least=1.0)
    bound = min(require_integer("d", d_max, at_least=1), require_integer("devices", n, at_least=1))
    if beta > 1.0:
        # beta < w/(w-1) is w < beta/(beta-1); the largest such whole number, with strictness up to rounding.
        bound = min(bound, max(1, math.ceil(beta / (beta - 1.0) - TOLERANCE) - 1))
    return bound


def residents_at(width: float) -> int:
    """p for the width 1/p; 1 for widths of at least 1."""
    return max(1, round(1.0 / width))


@dataclass(frozen=True, slots=True)
class RuntimeModel:
    """Overheads and limits of k trials, one entry per trial.

    Attributes:
        alpha: (k,) packing overhead per extra co-resident, at least 1.
        beta: (k,) scaling overhead per extra device, at least 1.
        c: (k,) most co-resident trials on a device, at least 1.
        d: (k,) most devices the trial may span, at least 1.
        fused: (k,) rates of the trials whose co-residents are the rows of one fused pack; they stand in for alpha.
            ``None`` if no trial is fused.

    Raises:
        InvalidFieldError: from :meth:`build`, for a value below 1 or NaN.
    """

    alpha: FloatArray
    beta: FloatArray
    c: IntArray
    d: IntArray
    fused: FusedColumn | None = None

    @classmethod
    def build(
        cls,
        k: int,
        *,
        n: int,
        alpha: ArrayLike = 1.0,
        beta: ArrayLike = 1.0,
        c: ArrayLike = DEFAULT_MAX_PACKING,
        d: ArrayLike = DEFAULT_MAX_WIDTH,
        fused: Sequence[FusedRates | None] | None = None,
        threshold: float = DEFAULT_BENEFIT_THRESHOLD,
    ) -> RuntimeModel:
        """Makes the model of ``k`` trials on ``n`` devices; every argument is one number or one per trial.

        ``c`` and ``d`` are upper bounds. They are lowered to what ``alpha`` and ``beta`` allow
        (:func:`packing_limit`, :func:`width_limit`), which keeps alpha in [1, c/(c-1)) and beta in [1, d/(d-1)). The c
        of a trial with rates in ``fused``, which has an entry per trial, stays: it is the rows that were found to pay.
        """
        if fused is not None and len(fused) != k:
            raise InvalidFieldError("fused", fused, f"must be one for each of the {k} trials")
        column = None if fused is None else FusedColumn.of(fused)
        alphas, betas = _column("alpha", alpha, k), _column("beta", beta, k)
        c_max, d_max = _column("c", c, k), _column("d", d, k)
        packs = np.ones(k, dtype=bool) if column is None else ~column.fuses
        pairs = {
            (a, m): packing_limit(a, c_max=m, threshold=threshold) for a, m in _distinct(alphas[packs], c_max[packs])
        }
        limits = {(b, m): width_limit(b, n=n, d_max=m) for b, m in _distinct(betas, d_max)}
        c_found = c_max.astype(np.int64)
        c_found[packs] = [pairs[a, m] for a, m in zip(alphas[packs].tolist(), c_max[packs].tolist(), strict=True)]
        d_found = np.array([limits[b, m] for b, m in zip(betas.tolist(), d_max.tolist(), strict=True)], dtype=np.int64)
        return cls(alphas, betas, c_found, d_found, column)

    def __len__(self) -> int:
        return len(self.alpha)

    def take(self, rows: ArrayLike) -> RuntimeModel:
        """Returns the model of the trials ``rows``."""
        index = np.asarray(rows, dtype=np.int64)
        fused = None if self.fused is None else self.fused.take(index)
        return RuntimeModel(self.alpha[index], self.beta[index], self.c[index], self.d[index], fused)

    def stretch(self, widths: ArrayLike) -> FloatArray:
        """h(w)/h(1) for one width per trial, (k,) (eq. 3.2, or the rates of fused packs)."""
        w = np.asarray(widths, dtype=np.float64)
        packed = w < 1.0
        return np.where(
            packed,
            packed_stretch(self.alpha, np.where(packed, 1.0 / w - 1.0, 0.0), self.fused),
            self.beta ** np.where(packed, 0.0, w - 1.0) / np.maximum(w, 1.0),
        )

    def heights(self, heights_at_1: ArrayLike, widths: ArrayLike) -> FloatArray:
        """h(w) in seconds, (k,), from h(1) in seconds and one width per trial."""
        return np.asarray(heights_at_1, dtype=np.float64) * self.stretch(widths)


def packed_stretch(
    alpha: FloatArray, others: float | NDArray[np.floating[Any]], fused: FusedColumn | None = None
) -> FloatArray:
    """(k,) h(1/p)/h(1).

    Args:
        alpha: (k,) packing overheads.
        others: p - 1, the trials beside each, one number or (k,).
        fused: (k,) rates of fused trials, in place of alpha.
    """
    if fused is not None:
        return fused.stretches(alpha, others)
    stretches: FloatArray = alpha**others
    return stretches


def stretch_of(alpha: float, beta: float, width: float, fused: FusedRates | None = None) -> float:
    """h(w)/h(1) of one trial, by the same equation as :meth:`RuntimeModel.stretch`."""
    if width < 1.0:
        if fused is not None:
            return fused.stretch(residents_at(width))
        return float(alpha ** (1.0 / width - 1.0))
    return float(beta ** (width - 1.0) / width)


def _distinct(values: FloatArray, bounds: FloatArray) -> set[tuple[float, int]]:
    return set(zip(values.tolist(), bounds.tolist(), strict=True))


def _column(field: str, values: ArrayLike, k: int) -> FloatArray:
    """One float per trial, each at least 1; the error names the first value that is not."""
    try:
        column: FloatArray = np.array(np.broadcast_to(np.asarray(values, dtype=np.float64), (k,)))
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(field, values, f"must be one number or {k} of them") from error
    wrong = ~(np.isfinite(column) & (column >= 1.0))
    if wrong.any():
        raise InvalidFieldError(field, float(column[wrong][0]), "must be a finite number of at least 1")
    return column
