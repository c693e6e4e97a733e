"""Fusing estimates: how many trials of a profile key one device trains in one step, and how far that was tried."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from fluid.engine import tuning
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import FusedRates, marginal_benefit, packing_limit_from_seconds


@dataclass(slots=True)
class FusingEstimate:
    """What is known of fusing the trials of a key on one device model.

    First, a trial runs alone. Then the rows double, 2, 4, 8 and so on, while the latest doubling was measured to pay
    (:meth:`fluid.measure.profile.Profile.fused_limit`), and the work left repays trying a further one. Once that has
    ended, further packs of so many rows run beside the first, in processes of their own, while each was measured to pay
    as a co-resident does (eq. 3.1).

    Attributes:
        most: rows that are never exceeded: 1 for trials that cannot be fused.
        most_packs: packs on a device that are never exceeded.
        insists: whether to fuse as many as that without measuring whether it pays.
        rows: trials to fuse in one process; 1 for none.
        packs: processes on a device, each with a pack of so many rows.
        is_over: whether it is known that none are to be fused, so that processes may be packed.
        rates: T(k)/T(1) of one pack, as measured; ``None`` until then.
        measured: the same of all trials on a device, in one pack or several.
        expected: the same, with what is expected of rows that are being tried.
        preparations: seconds that the latest first steps of a size took longer than later ones, as they compile. Those
            of the first pack are left out: it is checked and recorded, which serves all sizes.
        observed: (packs, rows) -> steps seen.
        busy: shares of the latest steps of one pack of ``rows`` in which it kept the device busy, where measured.
    """

    most: int = 1
    most_packs: int = 1
    insists: bool = False
    rows: int = 1
    packs: int = 1
    is_over: bool = True
    rates: FusedRates | None = None
    measured: FusedRates | None = None
    expected: FusedRates | None = None
    preparations: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    observed: dict[tuple[int, int], int] = field(default_factory=dict)
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))

    @property
    def gain(self) -> float:
        """Iterations per second of a device, relative to a trial alone, as far as measured; 1 until then."""
        if self.measured is None:
            return 1.0
        total = min(self.total, self.measured.rows[-1])
        return min(total, self.measured.gain(total))  # Above that, T(1) was measured while something else was loading.

    @property
    def total(self) -> int:
        """Trials on a device."""
        return self.rows * self.packs

    @property
    def is_settled(self) -> bool:
        """Whether no further doubling of the rows is tried."""
        return self.rates is not None and self.rows > 1 and self.rows <= self.rates.rows[-1]

    @property
    def worth_trying(self) -> float:
        """Seconds of work left per device that repay twice as many rows."""
        cost = median_low(self.preparations) if self.preparations else 0.0
        return max(tuning.WORTH_FUSING_S, tuning.WORTH_FUSING_PREPARATIONS * cost)

    def begin(self, most: int, most_packs: int, *, insists: bool) -> None:
        """Lets trials be fused, as the first one has come that can be."""
        self.most, self.insists, self.is_over = most, insists and most > 1, most <= 1
        self.most_packs = 1 if insists else most_packs
        self.rows = most if self.insists else 1

    def limit(self, rows: int) -> None:
        """Records that a lane can fuse no more than so many trials."""
        self.most = max(1, min(self.most, rows))
        self.rows = min(self.rows, self.most)
        self.is_over = self.is_over or self.most <= 1

    def worth_observing(self, packs: int, rows: int) -> bool:
        """Counts a step; returns whether the profile is to learn from it."""
        seen = self.observed.get((packs, rows), 0)
        self.observed[packs, rows] = seen + 1
        return seen < tuning.OBSERVE_ALL or seen % tuning.OBSERVE_EVERY == 0

    def prepared(self, seconds: float, rows: int, pace: float | None) -> None:
        """Records that the first step of so many rows took so many seconds, with trials of this pace alone."""
        if self.rates is None:
            return
        usual = 0.0 if pace is None else pace * self.rates.stretch(rows)
        self.preparations.append(max(0.0, seconds - usual))

    def update(self, profile: Profile, key: str, model: str | None, *, work: float, trying_packs_pays: bool) -> None:
        """Copies the figures from the profile, and decides on the rows and packs.

        Args:
            profile: what was measured.
            key, model: of which.
            work: seconds of work left per device, which may repay trying twice as many rows.
            trying_packs_pays: whether it repays trying one more pack, for which a lane is started.
        """
        if self.most <= 1:
            self.rows, self.packs, self.is_over = 1, 1, True
            return
        before = self.rows
        self.rates = profile.fused_rates(key, model)
        if self.insists:
            self.rows = self.most
        else:
            measured = profile.fused_measured(key, model)
            limit = profile.fused_limit(key, self.most, model)
            tries = work >= self.worth_trying or self.rows > measured  # a doubling that has begun is completed
            self.rows = max(1, min(limit, self.most, measured * (2 if tries else 1)))
            self.is_over = limit <= 1
        if self.rows != before:
            self.busy.clear()
        seconds = profile.fused_packs(key, self.rows, model) if self.is_settled else []
        self.packs = self._packs(seconds, profile.threshold, trying_packs_pays) if seconds else 1
        self.measured = self._measured(seconds)
        self.expected = _extended(self.measured, self.total)

    def _packs(self, seconds: list[float], threshold: float, trying_pays: bool) -> int:
        """The packs of ``rows`` to have on a device, by the measured seconds of an iteration with 1, 2, ... of them."""
        packs = packing_limit_from_seconds(seconds[: self.most_packs], threshold=threshold)
        if packs < len(seconds) or packs >= self.most_packs:
            return packs
        if self.packs > packs:
            return packs + 1  # a trial of one more that has begun is completed
        if not trying_pays or not self.busy:
            return packs
        # So many packs keep the device busy for at least so long.
        least = (packs + 1) * seconds[0] * median_low(self.busy)
        pays = marginal_benefit(packs + 1, max(seconds[-1], least), seconds[-1]) > threshold
        return packs + 1 if pays else packs

    def _measured(self, seconds: list[float]) -> FusedRates | None:
        if self.rates is None or not seconds:
            return self.rates
        alone = seconds[0] / self.rates.stretch(self.rows)
        known = zip(self.rates.rows, self.rates.stretches, strict=True)
        table = {rows: stretch for rows, stretch in known if rows <= self.rows}
        return FusedRates.of(table | {packs * self.rows: each / alone for packs, each in enumerate(seconds, 1)})


def _extended(rates: FusedRates | None, rows: int) -> FusedRates | None:
    """The rates with those of rows that were not measured, each doubling of which is expected to gain like the last."""
    if rates is None or rows <= rates.rows[-1]:
        return rates
    last = rates.rows[-1]
    growth = min(2.0, max(1.0, rates.stretch(last) / rates.stretch(max(1, last // 2))))
    stretch = rates.stretch(last) * growth ** math.log2(rows / last)
    return FusedRates((*rates.rows, rows), (*rates.stretches, stretch))
