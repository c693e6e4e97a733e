"""BOHB's searcher: it suggests configs by a model of the results at each rung (:mod:`fluid.search.density`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fluid.errors import InvalidFieldError
from fluid.search.conversion import TuneRange
from fluid.search.density import BOHB, DensityModels
from fluid.search.domains import Choice, Domain, FloatRange, IntRange, between
from fluid.search.samplers import checked_points, checked_seed, entropy_of
from fluid.search.searchers import SearchOutcome
from fluid.search.space import ConditionalSpace, Space, field_of
from fluid.search.suggestion import ELSEWHERE, Suggestion
from fluid.user_values import text_of


class BohbSearcher:
    """Suggests configs as BOHB does: by a model of what trials came to at the rungs, and some at random.

    A trial that failed, or came to no number, counts as bad at the rung to which it was on its way. One that ended by
    itself counts there with what it had come to. Each suggestion has random numbers of its own, which follow from the
    seed and its place, so that a sweep that goes on suggests what it would have.

    Args:
        space: the search space.
        options: of the search.
        mode: ``"min"`` or ``"max"``.
        seed: seed of the random numbers; ``None`` for other ones every time.
        points: configs, or parts of configs, that are suggested first; the rest of each is drawn at random.

    Raises:
        InvalidFieldError: the space cannot be searched so, or does not fit the options, or a point does not fit it.
    """

    size: int | None = None

    def __init__(
        self,
        space: Space | ConditionalSpace,
        options: BOHB,
        *,
        mode: str,
        seed: int | None,
        points: Sequence[Mapping[str, Any]],
    ) -> None:
        if not isinstance(space, Space):
            reason = (
                "models no function of an Optuna trial; give a dict, with fluid.search.when for what depends on others"
            )
            raise InvalidFieldError("algorithm", "bohb", reason)
        self._space = space
        self._axes = {
            name: axis
            for name in space.parents_first
            if (axis := _Axis(field_of(space.paths[name]), space.domains[name])).size != 1
        }
        self._models = DensityModels([axis.choices for axis in self._axes.values()], options)
        self._sign = 1.0 if mode == "min" else -1.0
        self._entropy = entropy_of(checked_seed(seed))
        self._points = checked_points(space, points)
        #: How many suggestions were made, and results taken.
        self._asked = self._heard = 0
        #: By suggestion, or by its text if another searcher has made it: the rungs that it has come to.
        self._at_rungs: dict[int | str, set[int]] = {}

    def begin(self, metrics: Sequence[str], modes: Sequence[str]) -> None:
        pass

    def ask(self) -> Suggestion:
        index, rng = self._asked, self._random(self._asked)
        self._asked += 1
        fixed = self._points[index] if index < len(self._points) else None
        vector = self._models.suggest(rng) if fixed is None else None
        if vector is None:
            return Suggestion(index, self._space.sample(rng, fixed))
        values = {name: axis.value(place) for (name, axis), place in zip(self._axes.items(), vector, strict=True)}
        single = {name: domain.at(0) for name, domain in self._space.domains.items() if name not in values}
        return Suggestion(index, self._space.config({**single, **values}))

    def observe(self, outcome: SearchOutcome) -> None:
        """Takes how a suggestion stands at a rung."""
        key = text_of(outcome.config) if outcome.token == ELSEWHERE else outcome.token
        self._at_rungs.setdefault(key, set()).add(outcome.budget)
        value = None if outcome.state in ("FAILED", "INFEASIBLE") or outcome.values is None else outcome.values[0]
        values, vector = self._space.values_in(outcome.config), []
        for name, axis in self._axes.items():
            vector.append(axis.place(values[name]) if name in values else math.nan)
        self._heard += 1
        # The 1 tells these numbers from those of a suggestion.
        rng = self._random(self._heard, 1)
        self._models.add(outcome.budget, vector, math.inf if value is None else self._sign * value, rng)

    def tell(self, outcome: SearchOutcome) -> None:
        key = text_of(outcome.config) if outcome.token == ELSEWHERE else outcome.token
        never_ran = outcome.state == "STOPPED" and not outcome.iteration
        if not never_ran and outcome.budget not in self._at_rungs.get(key, ()):
            self.observe(outcome)

    def share(self) -> None:
        """Suggests other configs than the searcher of the same seed that has begun the sweep."""
        self._points, self._entropy = [], entropy_of(None)

    def _random(self, *which: int) -> np.random.Generator:
        return np.random.default_rng([self._entropy, *which])


class _Axis:
    """The place of a hyperparameter's values in the unit interval; of choices, their indices.

    As in ConfigSpace, which HpBandSter uses, the first of several numbers is at 0, and the last one at 1.

    Args:
        field: names the hyperparameter in an error.
        domain: its values.

    Attributes:
        size: how many values there are; ``None`` if they are continuous.
        choices: the same of choices; 0 for numbers.
    """

    def __init__(self, field: str, domain: Domain) -> None:
        values, log = (domain.values, domain.log) if isinstance(domain, TuneRange) else (domain, False)
        if values is None:
            raise InvalidFieldError(field, domain, "is a normal distribution, which bohb cannot search; give it bounds")
        assert isinstance(values, Choice | FloatRange | IntRange)
        self._values: Any = values
        self.size = values.size
        self.choices = values.size if isinstance(values, Choice) else 0
        self._log = log or (not isinstance(values, Choice) and values.log)
        self._by_index = self.size is not None and not self._log

    def place(self, value: Any) -> float:
        """Where a value is."""
        values = self._values
        if isinstance(values, Choice):
            return values.index(value)
        if self._by_index:
            return float(values.index(value) / (values.size - 1))
        low, high, place = (self._scaled(number) / 2 for number in (values.low, values.high, value))
        return (place - low) / (high - low)  # Of halves, as the difference of two large numbers may be infinite.

    def value(self, place: float) -> Any:
        """The value that is there."""
        values = self._values
        if isinstance(values, Choice):
            return values.at(int(place))
        if self._by_index:
            return values.at(round(place * (values.size - 1)))
        number = between(self._scaled(values.low), self._scaled(values.high), place)
        number = float(min(max(math.exp(number) if self._log else number, values.low), values.high))
        if values.size is not None:
            return values.at(values.index(number))
        return min(number, values.greatest)

    def _scaled(self, number: float) -> float:
        return math.log(number) if self._log else number
