"""Benchmarks: sources of replayed trials that know their search space, and what is good on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fluid.errors import InvalidFieldError
from fluid.rehearsal.replayable import ReplayedIteration
from fluid.rehearsal.spaces import active, configspace_of, suggested, tune_mutations_of, tune_space_of
from fluid.search.conditions import Condition, parents_first
from fluid.search.domains import Domain

#: Configs drawn to learn what is good and what is bad on a benchmark, and how many of the best are looked at closely.
_DRAWN, _CLOSELY = 2000, 50
_SEED = 0


class Curve(NamedTuple):
    """What is asked of a source: some iterations of one config."""

    config: Mapping[str, Any]
    iterations: range


class ValueRange(NamedTuple):
    """The values of the metric that a benchmark is known to give.

    Attributes:
        best: the best value at any iteration, of the configs that are known.
        worst: the worst value of a config that is run to its end.
    """

    best: float
    worst: float


class Benchmark:
    """A source of replayed trials with a search space. Subclasses say what a config does, by :meth:`replay_many`.

    Args:
        name: such as ``"lcbench:189866"``.
        space: the search space, for :func:`fluid.run`: domains of :mod:`fluid.search` by name.
        metric: what is to be optimized.
        mode: ``"min"`` or ``"max"``.
        max_iterations: most iterations of a trial.
        conditions: with which values of others a hyperparameter counts; where they do not hold it is left aside.

    Attributes:
        name: see above.
        space: see above.
        metric: see above.
        mode: see above.
        max_iterations: see above.
        conditions: see above.
    """

    def __init__(
        self,
        name: str,
        space: Mapping[str, Domain],
        metric: str,
        mode: str,
        max_iterations: int,
        conditions: Sequence[Condition] = (),
    ) -> None:
        self.name = name
        self.space = dict(space)
        self.metric = metric
        self.mode = mode
        self.max_iterations = max_iterations
        self.conditions = parents_first(conditions)

    def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        """What a trial of a config does: see :class:`fluid.rehearsal.Replayable`."""
        return self.replay_many([Curve(config, iterations)])[0]

    def replay_many(self, curves: Sequence[Curve]) -> list[Sequence[ReplayedIteration]]:
        """The same for several trials, in order; no more than :attr:`max_iterations` of each."""
        raise NotImplementedError

    def describe(self) -> list[str]:
        """What the benchmark is, in sentences for people."""
        return [f"The trials are those of the benchmark {self.name}: they are replayed, not run."]

    def active(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters of a config that count: those whose conditions hold.

        Raises:
            InvalidFieldError: one of them is missing.
        """
        return active(config, self.space, self.conditions)

    def suggest(self, trial: Any) -> dict[str, Any]:
        """The space as a function of an Optuna trial, which suggests the hyperparameters that count, and no others."""
        return suggested(trial, self.space, self.conditions)

    def configspace(self, seed: int | None = None) -> Any:
        """The space as a ``ConfigurationSpace``, conditions included, as HpBandSter takes it.

        Args:
            seed: what it samples with; ``None`` for chance.

        Raises:
            MissingDependencyError: ConfigSpace is not installed.
        """
        return configspace_of(self.space, self.conditions, seed)

    def tune_space(self) -> dict[str, Any]:
        """The space as Ray Tune's ``param_space``. It has no conditions: hyperparameters that do not count are sampled
        all the same, and left aside.

        Raises:
            MissingDependencyError: Ray Tune is not installed.
        """
        return tune_space_of(self.space)

    def tune_mutations(self) -> dict[str, Any]:
        """What PBT may change in configs of the space, as ``hyperparam_mutations`` of Ray Tune's.

        Raises:
            MissingDependencyError: Ray Tune is not installed.
        """
        return tune_mutations_of(self.space)

    def final_values(self, configs: Sequence[Mapping[str, Any]]) -> list[float]:
        """The metric at the last iteration of each of some configs; NaN where there is none."""
        last = range(self.max_iterations, self.max_iterations + 1)
        return [self._best_of(played) for played in self.replay_many([Curve(config, last) for config in configs])]

    @cached_property
    def known(self) -> ValueRange:
        """The best and the worst value of 2,000 configs drawn at random, with a fixed seed.

        The best is looked for in all iterations of the 50 configs that end best.
        """
        rng, space = np.random.default_rng(_SEED), self.space
        configs = [{name: domain.sample(rng) for name, domain in space.items()} for _ in range(_DRAWN)]
        ends = self.final_values(configs)
        sign = 1.0 if self.mode == "min" else -1.0
        order = [
            int(index) for index in np.argsort(sign * np.array(ends), kind="stable") if not math.isnan(ends[index])
        ]
        if not order:
            raise InvalidFieldError("benchmark", self.name, f"gives no value of {self.metric!r} at its last iteration")
        whole = range(1, self.max_iterations + 1)
        closely = self.replay_many([Curve(configs[index], whole) for index in order[:_CLOSELY]])
        return ValueRange(self._best_of(one for played in closely for one in played), ends[order[-1]])

    @property
    def best_known(self) -> float:
        """The best value known."""
        return self.known.best

    @property
    def worst_known(self) -> float:
        """The worst value known of a trial that is run to its end."""
        return self.known.worst

    def regret(self, value: float) -> float:
        """The normalised regret of a value: 0 for the best known one, 1 for the worst; below 0 for a better one.

        The range is that between the best and the worst value known, as in papers on YAHPO Gym: the best one is that of
        a random search, so that an algorithm which learns may well beat it.
        """
        known = self.known
        if known.best == known.worst:
            return 0.0
        return (known.best - value) / (known.best - known.worst)

    def value_at(self, regret: float) -> float:
        """The value of a normalised regret."""
        known = self.known
        return known.best - regret * (known.best - known.worst)

    def _best_of(self, played: Any) -> float:
        values = [float(one.metrics[self.metric]) for one in played if self.metric in one.metrics]
        sound = [value for value in values if math.isfinite(value)]
        if not sound:
            return math.nan
        return min(sound) if self.mode == "min" else max(sound)
