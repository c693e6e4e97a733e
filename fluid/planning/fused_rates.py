"""How long an iteration of a fused pack takes, by its rows: a table of measurements (docs/theory.md, section 10)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

from fluid.errors import InvalidFieldError, require_integer, require_number


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
