"""Benchmarks: sources of replayed trials that know their search space, and what is good on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from fluid.rehearsal.replayable import ReplayedIteration
from fluid.search.domains import Domain

#: Configs drawn to learn what is good and what is bad on a benchmark, and how many of the best are looked at closely.
_DRAWN, _CLOSELY = 2000, 50
_SEED = 0


class Curve(NamedTuple):
    """What is asked of a source: some iterations of one config."""

    config: Mapping[str, Any]
    iterations: range


class BatchReplayable(Protocol):
    """A source that is faster when it is asked for several trials at once."""

    def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        """See :class:`fluid.rehearsal.Replayable`."""
        ...

    def replay_many(self, curves: Sequence[Curve]) -> list[Sequence[ReplayedIteration]]:
        """The same for several trials, in order."""
        ...


class ValueRange(NamedTuple):
    """The values of the metric that a benchmark is known to give.

    Attributes:
        best, worst: of configs drawn at random, of each the best value in all of its iterations.
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

    Attributes:
        name: see above.
        space: see above.
        metric: see above.
        mode: see above.
        max_iterations: see above.
    """

    def __init__(self, name: str, space: Mapping[str, Domain], metric: str, mode: str, max_iterations: int) -> None:
        self.name, self.space, self.metric, self.mode = name, dict(space), metric, mode
        self.max_iterations = max_iterations

    def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        """What a trial of a config does: see :class:`fluid.rehearsal.Replayable`."""
        return self.replay_many([Curve(config, iterations)])[0]

    def replay_many(self, curves: Sequence[Curve]) -> list[Sequence[ReplayedIteration]]:
        """The same for several trials, in order; no more than :attr:`max_iterations` of each."""
        raise NotImplementedError

    def describe(self) -> list[str]:
        """What the benchmark is, in sentences for people."""
        return [f"The trials are those of the benchmark {self.name}: they are replayed, not run."]

    @cached_property
    def known(self) -> ValueRange:
        """The best and the worst value of 2,000 configs drawn at random, with a fixed seed."""
        rng, space = np.random.default_rng(_SEED), self.space
        configs = [{name: domain.sample(rng) for name, domain in space.items()} for _ in range(_DRAWN)]
        last = range(self.max_iterations, self.max_iterations + 1)
        ends = [self._best_of(played) for played in self.replay_many([Curve(config, last) for config in configs])]
        order = np.argsort(ends) if self.mode == "min" else np.argsort(ends)[::-1]
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
        """The normalised regret of a value: 0 for the best known one, 1 for the worst; below 0 for a better one."""
        known = self.known
        return (known.best - value) / (known.best - known.worst)

    def value_at(self, regret: float) -> float:
        """The value of a normalised regret."""
        known = self.known
        return known.best - regret * (known.best - known.worst)

    def _best_of(self, played: Any) -> float:
        values = [float(one.metrics[self.metric]) for one in played]
        return min(values) if self.mode == "min" else max(values)
