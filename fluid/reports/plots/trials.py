"""What the plots of a sweep show: its trials with their best values, and the axes of metric and hyperparameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fluid.errors import FluidError, InvalidFieldError
from fluid.reports.analysis.importance import Importances, JudgedTrial, importances_of
from fluid.reports.tables.hyperparameters import differing, value_text
from fluid.results.best import best_result, eligible
from fluid.results.iterations import flat
from fluid.results.metrics import Goal, is_number
from fluid.results.records import TrialResult

#: What stands on an axis of categories for a trial that has no such hyperparameter.
NONE = "none"
#: Most trials that a plot draws: of more, no eye tells one from the others.
MOST_DRAWN = 1000
#: Values that span this factor may be on a logarithmic axis; so may a few that span the other one.
_LOG_SPAN, _FEW_SPAN, _FEW = 100.0, 8.0, 10


@dataclass(frozen=True)
class PlottedTrial:
    """A trial that a plot shows.

    Attributes:
        trial_id: its id.
        number: its place in the order of submission, from 0.
        config: its hyperparameters, nested names joined by ``/``.
        value: its best value of the metric.
        quality: 1 for the best trial, 0 for the worst; equal values have the same.
    """

    trial_id: str
    number: int
    config: Mapping[str, Any]
    value: float
    quality: float


@dataclass(frozen=True)
class PlotAxis:
    """The axis of a hyperparameter.

    Attributes:
        name: the hyperparameter.
        categories: what stands on it, in order; empty if it is one of numbers.
        log: whether it is better seen on a logarithmic scale.
        low, high: the least and the greatest value of an axis of numbers.
        few: the only values on it, if they are few; then it names them.
    """

    name: str
    categories: tuple[str, ...] = ()
    log: bool = False
    low: float = 0.0
    high: float = 0.0
    few: tuple[float, ...] = ()

    @property
    def is_numeric(self) -> bool:
        """Whether it is one of numbers."""
        return not self.categories

    def place(self, trial: PlottedTrial) -> float:
        """Where a trial is: its number, or the position of its category; NaN if it has no number there."""
        value = trial.config.get(self.name)
        if self.categories:
            return float(self.categories.index(category(value)))
        return float(value) if is_number(value) else math.nan

    def share(self, trial: PlottedTrial) -> float:
        """The same in shares of the axis, from 0 to 1; a category has an equal part of it, with its trials amid."""
        place = self.place(trial)
        if self.categories:
            return (place + 0.5) / len(self.categories)
        low, high = self._span
        return ((math.log10(place) if self.log else place) - low) / (high - low)

    def at(self, share: float) -> float:
        """The number at a share of an axis of numbers; of one of categories, the position."""
        if self.categories:
            return share * len(self.categories) - 0.5
        low, high = self._span
        value = low + share * (high - low)
        return 10.0**value if self.log else value

    @property
    def _span(self) -> tuple[float, float]:
        """Both ends of an axis of numbers, logarithms where it is logarithmic; a single value has some room."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        room = 0.0 if high > low else 0.05 * abs(low) or 1.0
        return low - room, high + room


@dataclass(frozen=True)
class PlotData:
    """What the plots of a sweep have in common.

    Attributes:
        goal: the metric and its direction.
        trials: the trials with a value, in order of submission; failed ones only if all have failed.
        judged: all trials, for importances.
    """

    goal: Goal
    trials: tuple[PlottedTrial, ...]
    judged: tuple[JudgedTrial, ...]

    @classmethod
    def of(cls, trials: Sequence[TrialResult], goal: Goal) -> PlotData:
        """For the trials of a sweep."""
        best = [best_result(trial, goal) for trial in trials]
        values = [None if found is None else found[0] for found in best]
        kept = eligible(
            [place for place in range(len(trials)) if values[place] is not None], lambda place: trials[place].state
        )
        ranked = sorted((value for place in kept if (value := values[place]) is not None), reverse=not goal.less)
        quality: dict[float, float] = {}
        for place, value in enumerate(ranked):
            quality.setdefault(value, 1.0 - place / (len(ranked) - 1) if len(ranked) > 1 else 1.0)
        shown = tuple(
            PlottedTrial(trials[place].trial_id, place, flat(trials[place].config), value, quality[value])
            for place in kept
            if (value := values[place]) is not None
        )
        judged = (JudgedTrial(t.state, t.iteration, t.config, value) for t, value in zip(trials, values, strict=True))
        return cls(goal, shown, tuple(judged))

    @property
    def values(self) -> list[float]:
        """The trials' best values."""
        return [trial.value for trial in self.trials]

    @cached_property
    def log(self) -> bool:
        """Whether the metric is better seen on a logarithmic scale."""
        return is_logarithmic(self.values)

    @cached_property
    def limits(self) -> tuple[float, float, int]:
        """The values at the ends of the metric's axis, and how many trials are beyond.

        A few that diverged would flatten all others: if nine tenths of the values span less than a quarter of the axis,
        it ends with the last value within half as much again.
        """
        ordered = sorted(self.values, reverse=not self.goal.less)
        best, worst, most = ordered[0], ordered[-1], ordered[math.ceil(0.9 * len(ordered)) - 1]
        if not self.log and abs(most - best) * 4 < abs(worst - best) and most != best:
            most += 0.5 * (most - best)
            worst = next(value for value in reversed(ordered) if not self.goal.is_better(most, value))
        room = 0.04 * (abs(worst - best) or abs(best) or 1.0)
        low, high = min(best, worst), max(best, worst)
        beyond = sum(not low <= value <= high for value in ordered)
        return (low, high, 0) if self.log else (low - room, high + room, beyond)

    def value_at(self, quality: float) -> float:
        """The value of the trial of a quality, from 0 for the worst to 1 for the best."""
        ordered = sorted(self.values, reverse=self.goal.less)
        return ordered[round(quality * (len(ordered) - 1))]

    @cached_property
    def drawn(self) -> list[PlottedTrial]:
        """The trials to draw, the worst first: all, or as many as can be told apart, evenly chosen by their ranks."""
        ranked = sorted(self.trials, key=lambda trial: trial.quality)
        if len(ranked) <= MOST_DRAWN:
            return ranked
        return [ranked[round(k * (len(ranked) - 1) / (MOST_DRAWN - 1))] for k in range(MOST_DRAWN)]

    @cached_property
    def importances(self) -> Importances:
        """How much each hyperparameter matters for the metric."""
        return importances_of(self.judged, self.goal.metric)

    @cached_property
    def axes(self) -> dict[str, PlotAxis]:
        """The hyperparameters in which the trials differ, by name."""
        configs = [trial.config for trial in self.trials]
        return {name: axis_of(name, configs) for name in differing(configs)}

    @property
    def best_so_far(self) -> tuple[list[int], list[float]]:
        """The steps of the best value over the trials in order of submission: their numbers, and the values."""
        numbers: list[int] = []
        values: list[float] = []
        for trial in self.trials:
            if not values or self.goal.is_better(trial.value, values[-1]):
                numbers.append(trial.number)
                values.append(trial.value)
        return numbers, values

    def chosen(self, parameters: Sequence[str] | None, *, count: int | None = None) -> list[PlotAxis]:
        """The axes of some hyperparameters.

        Args:
            parameters: their names; ``None`` for all that differ, or for the most important ``count``.
            count: how many there must be; ``None`` for any number but none.

        Raises:
            InvalidFieldError: a name is not that of a hyperparameter in which trials differ, or there are too many or
                too few.
            FluidError: the trials do not differ in so many hyperparameters.
        """
        known = self.axes
        if parameters is None:
            if len(known) < (count or 1):
                text = f"the trials with a {self.goal.metric} differ in {len(known)} hyperparameters: "
                raise FluidError(f"{text}there is nothing to plot {self.goal.metric} against")
            if count is None or len(known) == count:
                return list(known.values())
            ordered = dict.fromkeys([*(name for name in self.importances.shares if name in known), *known])
            return [known[name] for name in list(ordered)[:count]]
        names = [parameters] if isinstance(parameters, str) else list(parameters)
        for name in names:
            if name not in known:
                there = ", ".join(known) or "none"
                raise InvalidFieldError("parameters", name, f"is no hyperparameter in which trials differ: {there}")
        if not names or (count is not None and (len(names) != count or len(set(names)) != count)):
            what = "at least one hyperparameter" if count is None else f"{count} different hyperparameters"
            raise InvalidFieldError("parameters", parameters, f"must name {what}")
        return [known[name] for name in names]


def axis_of(name: str, configs: Sequence[Mapping[str, Any]]) -> PlotAxis:
    """The axis of a hyperparameter: one of numbers if all its values are, else one of categories."""
    known = [config[name] for config in configs if config.get(name) is not None]
    if known and all(map(is_number, known)):
        few = sorted(set(known))
        repeated = all(isinstance(value, int) for value in few) or 2 * len(few) <= len(known)
        shown = tuple(map(float, few)) if len(few) <= _FEW and repeated else ()
        return PlotAxis(name, (), is_logarithmic(known), float(few[0]), float(few[-1]), shown)
    return PlotAxis(name, tuple(sorted({category(config.get(name)) for config in configs}, key=_natural)))


def spread(number: int) -> float:
    """Spreads trials of one category a little, the same way each time: from -0.5 to 0.5."""
    return (number * 0.6180339887) % 1.0 - 0.5


def category(value: object) -> str:
    """What stands on an axis of categories for a value."""
    return NONE if value is None else value_text(value)


def _natural(text: str) -> list[tuple[int, float, str]]:
    """A key that sorts ``"8"`` before ``"16"``."""
    parts = re.split(r"(\d+)", text)
    return [(0, float(part), "") if part.isdecimal() else (1, 0.0, part) for part in parts if part]


def is_logarithmic(values: Sequence[float]) -> bool:
    """Whether numbers are better seen on a logarithmic scale: the rule of the page (``page.draw.js``).

    They span two decades, as do learning rates, or are a few such as 16, 32, 64 and 128; and their median is about the
    middle there.
    """
    ordered = sorted(values)
    if not ordered or ordered[0] <= 0 or ordered[-1] / ordered[0] < _FEW_SPAN:
        return False
    low, high, median = ordered[0], ordered[-1], ordered[len(ordered) // 2]
    if high / low >= _LOG_SPAN:
        return 0.15 < math.log(median / low) / math.log(high / low) < 0.85
    return len(set(ordered)) <= _FEW and (median - low) / (high - low) < 0.4
