"""Samplers: they suggest the configs of a sweep, one after another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fluid.directions import mode_word
from fluid.errors import InvalidFieldError, require_integer, require_one_of
from fluid.search.domains import Choice
from fluid.search.space import ConditionalSpace, Space, field_of
from fluid.search.suggestion import OpenSuggestions, Suggestion

#: Names of the samplers.
SAMPLERS = ("grid", "random", "tpe")


class Sampler(Protocol):
    """Suggests configs, and is told what came of them. It is used by one thread at a time.

    Example:
        >>> from fluid.search import Sampler, make_sampler, make_space, uniform
        >>> sampler: Sampler = make_sampler("random", make_space({"x": uniform(-1, 1)}), seed=3)
        >>> suggestion = sampler.ask()
        >>> sampler.tell(suggestion.token, suggestion.config["x"] ** 2)
    """

    @property
    def size(self) -> int | None:
        """How many suggestions there are in all; None if they never end."""
        ...

    def ask(self) -> Suggestion | None:
        """The next config to try; None if there is none left. Any number may be open at a time.

        Raises:
            InvalidFieldError: the user's function of an Optuna trial did not suggest a name that a point has, or a
                function of Ray Tune's ``sample_from`` raised an error.
        """
        ...

    def tell(self, token: int, values: float | Sequence[float] | None, *, failed: bool = False) -> None:
        """Tells what came of a suggestion, once.

        Args:
            token: that of the suggestion.
            values: the value of the metric, or one for each of several metrics. None, and NaN, if there is none.
            failed: whether the trial failed; ``values`` are then left aside.

        Raises:
            InvalidFieldError: the token is of no open suggestion, or there is not one value for each metric.
        """
        ...


@runtime_checkable
class LearningSampler(Protocol):
    """What a sampler has besides, whose suggestions depend on what it was told."""

    def share(self) -> None:
        """Suggests other configs than a sampler of the same seed and points."""
        ...

    def hear(
        self, token: int, config: Mapping[str, Any], values: Sequence[float] | None, state: str, iteration: int
    ) -> None:
        """Takes what came of a suggestion, also of another sampler's; if it is ``"PAUSED"``, how it stands at a rung.

        Args:
            token, config, values, state, iteration: as of a :class:`~fluid.search.searchers.SearchOutcome`.
        """
        ...


def make_sampler(
    algorithm: str,
    space: Space | ConditionalSpace,
    *,
    modes: Sequence[str] = ("min",),
    seed: int | None = 0,
    points: Sequence[Mapping[str, Any]] = (),
) -> Sampler:
    """Makes a sampler.

    What ``random`` and ``grid`` suggest depends on the space, the seed and the points alone, and not on what they are
    told. The values of ``tpe`` follow from what it was told before each suggestion; concurrent suggestions differ,
    because those that have no result yet count as bad (Optuna's constant liar).

    Args:
        algorithm: ``"random"``; ``"grid"``, every combination of values once, the last name of the space changing
            first; or ``"tpe"``, Optuna's tree-structured Parzen estimator.
        space: what :func:`~fluid.search.space.make_space` returned.
        modes: ``"min"`` or ``"max"`` for each metric.
        seed: seed of the random numbers; None for other ones every time.
        points: configs, or parts of configs, to try first; what a point does not give is sampled.

    Raises:
        InvalidFieldError: the algorithm is not known or does not fit the space, or a point has a name that is not in
            the space or a value that is not allowed.
        MissingDependencyError: ``tpe`` or a function of an Optuna trial needs Optuna, which is not installed.

    Example:
        >>> from fluid.search import make_sampler, make_space
        >>> space = make_space({"lr": [0.1, 0.2], "layers": [1, 2]})
        >>> grid = make_sampler("grid", space, points=[{"lr": 0.2, "layers": 1}])
        >>> [grid.ask().config for _ in range(grid.size)]
        [{'lr': 0.2, 'layers': 1}, {'lr': 0.1, 'layers': 1}, {'lr': 0.1, 'layers': 2}, {'lr': 0.2, 'layers': 2}]
    """
    require_one_of("algorithm", algorithm, SAMPLERS)
    if isinstance(modes, str) or not modes:
        raise InvalidFieldError("modes", modes, "must be a list of at least one mode")
    modes = [mode_word("mode", mode) for mode in modes]
    seed = checked_seed(seed)
    if isinstance(space, ConditionalSpace) and algorithm == "grid":
        raise InvalidFieldError("algorithm", algorithm, "cannot enumerate a function of an Optuna trial")
    checked = checked_points(space, points)
    if isinstance(space, ConditionalSpace) or algorithm == "tpe":
        # Loads Optuna, which takes as long as loading all of Fluid.
        from fluid.search.study_sampler import StudySampler

        return StudySampler(space, algorithm, modes=modes, seed=seed, points=checked)
    kind = GridSampler if algorithm == "grid" else RandomSampler
    return kind(space, objectives=len(modes), seed=seed, points=checked)


class RandomSampler:
    """Samples every config by itself: the n-th suggestion depends on the space, the seed and n alone.

    Args:
        space: the search space.
        objectives: number of metrics.
        seed: seed of the random numbers; None for other ones every time.
        points: values by name, of the first suggestions.
    """

    size: int | None = None

    def __init__(self, space: Space, *, objectives: int, seed: int | None, points: Sequence[Mapping[str, Any]]) -> None:
        self._space = space
        self._entropy = entropy_of(seed)
        self._points = points
        self._open = OpenSuggestions(objectives)

    def ask(self) -> Suggestion:
        index = self._open.count
        fixed = self._points[index] if index < len(self._points) else {}
        return self._open.add(self._space.sample(np.random.default_rng([self._entropy, index]), fixed))

    def tell(self, token: int, values: float | Sequence[float] | None, *, failed: bool = False) -> None:
        self._open.close(token, values, failed=failed)


class GridSampler:
    """Every combination of the values of a finite space, once; points come first, then the last name changes first.

    Of hyperparameters under a condition, only combinations that have them count.

    Args:
        space: the search space.
        objectives: number of metrics.
        seed: seed of the random numbers that complete points; None for other ones every time.
        points: values by name, of the combinations that come first.

    Raises:
        InvalidFieldError: a hyperparameter is continuous.
    """

    def __init__(self, space: Space, *, objectives: int, seed: int | None, points: Sequence[Mapping[str, Any]]) -> None:
        self._space = space
        self._names = space.parents_first
        self._sizes: dict[str, int] = {}
        for name, domain in space.domains.items():
            if domain.size is None:
                reason = "is continuous; a grid needs a list of values, a step or whole numbers"
                raise InvalidFieldError(field_of(space.paths[name]), domain, reason)
            self._sizes[name] = domain.size
        self.size: int | None = self._count()
        self._open = OpenSuggestions(objectives)
        self._configs = self._enumerate(entropy_of(seed), points)

    def ask(self) -> Suggestion | None:
        config = next(self._configs, None)
        return None if config is None else self._open.add(config)

    def tell(self, token: int, values: float | Sequence[float] | None, *, failed: bool = False) -> None:
        self._open.close(token, values, failed=failed)

    def _enumerate(self, entropy: int, points: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        domains = self._space.domains
        tried: set[tuple[tuple[str, int], ...]] = set()
        for number, point in enumerate(points):
            rng = np.random.default_rng([entropy, number])
            drawn = {
                name: domains[name].index(point[name]) if name in point else int(rng.integers(size))
                for name, size in self._sizes.items()
            }
            indices = next(self._combinations(self._names, {name: (index,) for name, index in drawn.items()}))
            if _key(indices) not in tried:
                tried.add(_key(indices))
                yield self._space.config({**point, **self._values(indices)})
        for indices in self._combinations(self._names, {name: range(size) for name, size in self._sizes.items()}):
            if not tried or _key(indices) not in tried:
                yield self._space.config(self._values(indices))

    def _combinations(
        self, names: Sequence[str], choices: Mapping[str, Sequence[int]], above: Mapping[str, int] | None = None
    ) -> Iterator[dict[str, int]]:
        """The combinations of the indices of values by name, without names that a combination does not have.

        Args:
            names: those that are left, behind what they depend on.
            choices: the indices to choose from.
            above: what was chosen so far.
        """
        chosen = dict(above or {})
        for place, name in enumerate(names):
            if self._space.conditions and self._space.is_idle(name, self._values(chosen)):
                continue
            if not choices[name][1:2]:
                chosen[name] = choices[name][0]
                continue
            for index in choices[name]:
                yield from self._combinations(names[place + 1 :], choices, {**chosen, name: index})
            return
        yield chosen

    def _count(self) -> int:
        """The number of combinations: a product for each way in which conditions may turn out."""
        deciding = [name for name in self._names if any(name == one.parent for one in self._space.conditions)]
        # Values on which nothing depends are as good as one of them, so many times.
        weights = {name: self._told_apart(name) for name in deciding}
        found = 0
        for chosen in self._combinations(deciding, {name: list(weights[name]) for name in deciding}):
            values = self._values(chosen)
            free = [name for name in self._names if name not in deciding and not self._space.is_idle(name, values)]
            ways = [weights[name][index] for name, index in chosen.items()]
            found += math.prod((*ways, *(self._sizes[name] for name in free)))
        return found

    def _told_apart(self, name: str) -> dict[int, int]:
        """The indices of values that conditions tell apart, and how many values each stands for."""
        domain, size = self._space.domains[name], self._sizes[name]
        if isinstance(domain, Choice):
            return dict.fromkeys(range(size), 1)
        told = {domain.index(value) for one in self._space.conditions if one.parent == name for value in one.values}
        other = next(index for index in range(size + 1) if index not in told)
        return dict.fromkeys(sorted(told), 1) | ({other: size - len(told)} if other < size else {})

    def _values(self, indices: Mapping[str, int]) -> dict[str, Any]:
        return {name: self._space.domains[name].at(index) for name, index in indices.items()}


def _key(indices: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(indices.items()))


def checked_seed(seed: int | None) -> int | None:
    """Returns the seed of a search, or raises :class:`~fluid.errors.InvalidFieldError`."""
    return None if seed is None else require_integer("seed", seed, at_least=0, at_most=2**32 - 1)


def checked_points(space: Space | ConditionalSpace, points: object) -> list[dict[str, Any]]:
    """Returns the values by name of the configs to try first, or raises :class:`~fluid.errors.InvalidFieldError`."""
    if isinstance(points, Mapping | str) or not isinstance(points, Sequence):
        raise InvalidFieldError("points", points, "must be a list of dicts")
    return [space.check_point(f"points[{index}]", point) for index, point in enumerate(points)]


def entropy_of(seed: int | None) -> int:
    """The seed itself; a drawn number in place of ``None``."""
    if seed is not None:
        return seed
    entropy = np.random.SeedSequence().entropy
    assert isinstance(entropy, int)
    return entropy
