"""Figures of rehearsed sweeps: medians and ranges over seeds, times to targets, and the knee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fluid.rehearsal.outcome import SweepOutcome
from fluid.reports.knee import Knee
from fluid.results.metrics import Goal

#: Times are given until the best so far is within these shares of the target.
SHARES = (0.05, 0.01)


@dataclass(frozen=True)
class ValueScale:
    """What values of the metric are worth.

    Attributes:
        goal: the metric.
        best: the best value that is known, or was found.
        worst: the worst that is known; ``None`` if unknown: distances are relative to the best value then, and not to
            the range of values.
    """

    goal: Goal
    best: float
    worst: float | None = None

    @classmethod
    def found_in(cls, outcomes: Mapping[str, Sequence[SweepOutcome]]) -> ValueScale | None:
        """The scale of the best value that any of some sweeps found; ``None`` if none found one."""
        every = [outcome for of_name in outcomes.values() for outcome in of_name]
        goal = next((outcome.goal for outcome in every if outcome.goal is not None), None)
        found = [outcome.best for outcome in every if outcome.best is not None]
        if goal is None or not found:
            return None
        return cls(goal, min(found) if goal.less else max(found))

    def within(self, share: float) -> float:
        """The value that is so far from the best: of the range of values, if that is known, else of the best."""
        span = abs(self.best) if self.worst is None else abs(self.worst - self.best)
        return self.best + share * span if self.goal.less else self.best - share * span

    def regret(self, value: float) -> float:
        """How far a value is from the best: 0 at the best, and 1 at the worst if that is known."""
        distance = value - self.best if self.goal.less else self.best - value
        return distance if self.worst is None else distance / (abs(self.worst - self.best) or 1.0)

    @property
    def is_regret(self) -> bool:
        """Whether the best and the worst are known, and not only what was found."""
        return self.worst is not None


@dataclass(frozen=True)
class Spread:
    """A figure over seeds; infinite where a target was never reached.

    Attributes:
        median: of all.
        low, high: the least and the most.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """That of some values, ``None`` of which are infinite; ``None`` if there are none."""
        known = [math.inf if value is None else value for value in values]
        return cls(median(known), min(known), max(known)) if known else None

    def as_json(self, scale: float = 1.0) -> dict[str, float | None]:
        """The spread in JSON, times ``scale``: ``null`` for what was never reached."""
        every = {"median": self.median, "low": self.low, "high": self.high}
        return {name: value * scale if math.isfinite(value) else None for name, value in every.items()}


@dataclass(frozen=True)
class RehearsedFigures:
    """One way to run a sweep, over some seeds.

    Attributes:
        name: of the way, such as a number of devices or an algorithm.
        outcomes: one for each seed.
        scale: what values are worth; ``None`` if no value is known.
        price: US dollars for a device-hour; ``None`` if unknown.
        of_seeds: the scale of each seed, where the best value is that which any way found with the same seed; empty
            where all seeds have one.
    """

    name: str
    outcomes: tuple[SweepOutcome, ...]
    scale: ValueScale | None
    price: float | None = None
    of_seeds: tuple[ValueScale | None, ...] = ()

    @property
    def devices(self) -> int:
        """The most devices of any of them."""
        return max(outcome.devices for outcome in self.outcomes)

    @property
    def makespan_s(self) -> Spread:
        """Seconds to the end."""
        return self._spread([outcome.makespan_s for outcome in self.outcomes])

    @property
    def device_hours(self) -> Spread:
        """Device-hours held."""
        return self._spread([outcome.device_hours for outcome in self.outcomes])

    @property
    def busy_share(self) -> Spread:
        """The share of these in which iterations ran."""
        return self._spread([outcome.busy_share for outcome in self.outcomes])

    @property
    def usd(self) -> Spread | None:
        """US dollars; ``None`` if the price is unknown."""
        price = self.price
        return None if price is None else self._spread([outcome.cost(price) for outcome in self.outcomes])

    @property
    def best(self) -> Spread | None:
        """The best value; ``None`` if there is none."""
        return Spread.of([value for value in (outcome.best for outcome in self.outcomes) if value is not None])

    @property
    def regret(self) -> Spread | None:
        """The regret at the end; ``None`` unless the best and the worst are known."""
        scale = self.scale
        if scale is None or not scale.is_regret:
            return None
        return Spread.of([None if each.best is None else scale.regret(each.best) for each in self.outcomes])

    def seconds_within(self, share: float) -> Spread | None:
        """Seconds until the best so far was so near to the target; ``None`` if no value is known."""
        if self.scale is None:
            return None
        scales = self.of_seeds or [self.scale] * len(self.outcomes)
        return self._spread(
            [
                None if scale is None else outcome.seconds_to(scale.within(share))
                for outcome, scale in zip(self.outcomes, scales, strict=True)
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """The figures in JSON, with those of each seed."""
        within = {f"seconds_within_{share:g}": self.seconds_within(share) for share in SHARES}
        spreads = {
            "makespan_s": self.makespan_s,
            "best": self.best,
            "regret": self.regret,
            **within,
            "busy_share": self.busy_share,
            "device_hours": self.device_hours,
            "cost_usd": self.usd,
        }
        return {
            "name": self.name,
            "devices": self.devices,
            **{name: None if spread is None else spread.as_json() for name, spread in spreads.items()},
            "seeds": [
                {
                    "makespan_s": each.makespan_s,
                    "best": each.best,
                    "busy_share": each.busy_share,
                    "device_hours": each.device_hours,
                    "trials": each.trials,
                    "results": each.results,
                    "trace": [list(point) for point in each.trace],
                }
                for each in self.outcomes
            ],
        }

    @staticmethod
    def _spread(values: Sequence[float | None]) -> Spread:
        spread = Spread.of(values)
        assert spread is not None
        return spread


def figures_of(
    outcomes: Mapping[str, Sequence[SweepOutcome]], *, scale: ValueScale | None = None, price: float | None = None
) -> list[RehearsedFigures]:
    """Figures of several ways to run a sweep.

    Args:
        outcomes: those of each way, one for each seed, by name; a way without outcomes is left out.
        scale: the best and worst values that are known; ``None`` for the best that any of them found. If each way has
            the same number of seeds, times are then to the best that was found with the same seed: other seeds have
            other configs, of which the best may be far better.
        price: US dollars for a device-hour; ``None`` if unknown.
    """
    known = ValueScale.found_in(outcomes) if scale is None else scale
    numbers = {len(each) for each in outcomes.values() if each}
    of_seeds: tuple[ValueScale | None, ...] = ()
    if scale is None and len(numbers) == 1 and numbers != {1}:
        of_seeds = tuple(
            ValueScale.found_in({name: [each[seed]] for name, each in outcomes.items() if each})
            for seed in range(*numbers)
        )
    return [RehearsedFigures(name, tuple(each), known, price, of_seeds) for name, each in outcomes.items() if each]


def knee_of(figures: Sequence[RehearsedFigures]) -> Knee | None:
    """The knee of the median makespans; ``None`` unless each way has another number of devices."""
    by_devices = {each.devices: each.makespan_s.median for each in figures}
    return Knee.of(sorted(by_devices.items())) if len(by_devices) == len(figures) > 0 else None
