"""Fusing estimates: how many trials of a profile key one device trains in one step, and how far that was tried."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from fluid.engine import tuning
from fluid.planning.fused_rates import FusedRates
from fluid.planning.profile import Profile


@dataclass(slots=True)
class FusingEstimate:
    """What is known of fusing the trials of a key on one device model.

    First, a trial runs alone. Then the rows double, 2, 4, 8 and so on, while the latest doubling was measured to pay
    (:meth:`fluid.planning.profile.Profile.fused_limit`), and the work left repays trying a further one.

    Attributes:
        most: rows that are never exceeded: 1 for trials that cannot be fused.
        insists: whether to fuse as many as that without measuring whether it pays.
        rows: trials to fuse on a device; 1 for none.
        is_over: whether it is known that none are to be fused, so that processes may be packed.
        rates: T(k)/T(1) as measured; ``None`` until then.
        expected: the same, with what is expected of rows that are being tried.
        preparations: seconds that the latest first steps took longer than later ones: they trace or compile.
        observed: rows -> steps seen.
    """

    most: int = 1
    insists: bool = False
    rows: int = 1
    is_over: bool = True
    rates: FusedRates | None = None
    expected: FusedRates | None = None
    preparations: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    observed: dict[int, int] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Iterations per second of so many rows, relative to a trial alone; 1 until measured."""
        return 1.0 if self.rates is None else self.rows / self.rates.stretch(self.rows)

    @property
    def worth_trying(self) -> float:
        """Seconds of work left per device that repay twice as many rows."""
        cost = median_low(self.preparations) if self.preparations else 0.0
        return max(tuning.WORTH_FUSING_S, tuning.WORTH_FUSING_PREPARATIONS * cost)

    def begin(self, most: int, *, insists: bool) -> None:
        """Lets trials be fused, as the first one has come that can be."""
        self.most, self.insists, self.is_over = most, insists and most > 1, most <= 1
        self.rows = most if self.insists else 1

    def limit(self, rows: int) -> None:
        """Records that a lane can fuse no more than so many trials."""
        self.most = max(1, min(self.most, rows))
        self.rows = min(self.rows, self.most)
        self.is_over = self.is_over or self.most <= 1

    def worth_observing(self, rows: int) -> bool:
        """Counts a step; returns whether the profile is to learn from it."""
        seen = self.observed.get(rows, 0)
        self.observed[rows] = seen + 1
        return seen < tuning.OBSERVE_ALL or seen % tuning.OBSERVE_EVERY == 0

    def prepared(self, seconds: float, rows: int, pace: float | None) -> None:
        """Records that the first step of so many rows took so many seconds, with trials of this pace alone."""
        usual = 0.0 if pace is None else pace * (rows if self.rates is None else self.rates.stretch(rows))
        self.preparations.append(max(0.0, seconds - usual))

    def update(self, profile: Profile, key: str, model: str | None, *, trying_pays: bool) -> None:
        """Copies the figures from the profile, and decides on the rows."""
        if self.most <= 1:
            self.rows, self.is_over = 1, True
            return
        self.rates = profile.fused_rates(key, model)
        if self.insists:
            self.rows = self.most
        else:
            measured = profile.fused_measured(key, model)
            limit = profile.fused_limit(key, self.most, model)
            tries = trying_pays or self.rows > measured  # a doubling that has begun is completed
            self.rows = max(1, min(limit, self.most, measured * (2 if tries else 1)))
            self.is_over = limit <= 1
        self.expected = _extended(self.rates, self.rows)


def _extended(rates: FusedRates | None, rows: int) -> FusedRates | None:
    """The rates with those of rows that were not measured, each doubling of which is expected to gain like the last."""
    if rates is None or rows <= rates.rows[-1]:
        return rates
    last = rates.rows[-1]
    growth = min(2.0, max(1.0, rates.stretch(last) / rates.stretch(max(1, last // 2))))
    stretch = rates.stretch(last) * growth ** math.log2(rows / last)
    return FusedRates((*rates.rows, rows), (*rates.stretches, stretch))
