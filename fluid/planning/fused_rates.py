"""How long an iteration of a fused pack takes, by its rows: tables of measurements (docs/theory.md, section 10)."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fluid.errors import InvalidFieldError, require_integer, require_number

#: Default bound on the rows of a pack.
DEFAULT_MAX_FUSED = 64
#: If two rows take at most this many times as long as two trials one by one, four rows are tried before fusing is given
#: up. A batched step has a fixed cost, which the first doubling may not repay: MLPs and small CNNs ran at 0.5x to 0.9x
#: in a pack of one row, and at 1.1x to 1.8x in a pack of four (docs/fused.md).
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
        >>> from fluid.planning.fused_rates import FusedRates
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
