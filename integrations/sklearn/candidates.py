"""Candidates: the parameters that a search tries, from a space of scikit-learn, Fluid, Optuna or Ray Tune."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.model_selection import ParameterGrid, ParameterSampler
from sklearn.utils import check_random_state

from fluid.errors import InvalidFieldError
from fluid.integrations.sklearn.evaluation import FOLD, ROW
from fluid.search import Sampler, Suggestion, loguniform, make_sampler, make_space, randint, uniform
from fluid.search.conditions import When
from fluid.search.conversion import TuneFunction, convert
from fluid.search.domains import Choice, Domain, FloatRange, IntRange
from fluid.search.suggestion import OpenSuggestions

#: Distributions of SciPy that TPE knows; the last two are the same.
_SCIPY = ("randint", "uniform", "loguniform", "reciprocal")


class ListedCandidates:
    """Suggests listed candidates, each one as a whole or fold by fold.

    Args:
        candidates: their parameters.
        folds: number of folds of each, if every one of them is a trial of its own; ``None`` if a trial has them all.
    """

    def __init__(self, candidates: Sequence[Mapping[str, Any]], folds: int | None = None) -> None:
        self.size: int | None = len(candidates) * (folds or 1)
        self._configs = _configs(candidates, folds)
        self._open = OpenSuggestions(1)

    def ask(self) -> Suggestion | None:
        config = next(self._configs, None)
        return None if config is None else self._open.add(config)

    def tell(self, token: int, values: float | Sequence[float] | None, *, failed: bool = False) -> None:
        self._open.close(token, values, failed=failed)


class SampledCandidates:
    """Suggests what a sampler does, numbered; candidates are whole.

    Args:
        sampler: the sampler.
        size: number of candidates.
    """

    def __init__(self, sampler: Sampler, size: int) -> None:
        self._sampler = sampler
        self.size: int | None = size

    def ask(self) -> Suggestion | None:
        suggestion = self._sampler.ask()
        if suggestion is None:
            return None
        return Suggestion(suggestion.token, {**suggestion.config, ROW: suggestion.token})

    def tell(self, token: int, values: float | Sequence[float] | None, *, failed: bool = False) -> None:
        self._sampler.tell(token, values, failed=failed)


def _configs(candidates: Sequence[Mapping[str, Any]], folds: int | None) -> Iterator[dict[str, Any]]:
    for row, params in enumerate(candidates):
        if folds is None:
            yield {**params, ROW: row}
        else:
            yield from ({**params, ROW: row, FOLD: fold} for fold in range(folds))


def grid_of(space: Any) -> list[dict[str, Any]]:
    """Returns every combination of a space, in the order of ``GridSearchCV``.

    Raises:
        InvalidFieldError: the space is not finite.
    """
    grids = [{name: _all_values(name, value) for name, value in part.items()} for part in _dicts(space)]
    return list(ParameterGrid(grids))


def sample_of(space: Any, samples: int | None, default: int, random_state: Any) -> list[dict[str, Any]]:
    """Returns random candidates: of a space of scikit-learn those of ``RandomizedSearchCV``.

    Args:
        space: the space.
        samples: their number, as the user gave it.
        default: their number where the user gave none; fewer if the space does not have as many.
        random_state: of scikit-learn.
    """
    if callable(space):
        sampler = make_sampler("random", make_space(space), seed=seed_of(random_state))
        return [suggestion.config for _ in range(samples or default) if (suggestion := sampler.ask()) is not None]
    parts = [{name: _sampled(name, value) for name, value in part.items()} for part in _dicts(space)]
    number = samples or len(ParameterSampler(parts, default))
    return list(ParameterSampler(parts, number, random_state=random_state))


def tpe_sampler(space: Any, random_state: Any, points: Sequence[Mapping[str, Any]] = ()) -> Sampler:
    """Returns the sampler of ``algorithm="tpe"``; distributions of SciPy become those of Fluid.

    Args:
        space: the space.
        random_state: of scikit-learn.
        points: candidates that it suggests first.
    """
    if callable(space) and points:
        raise InvalidFieldError("resume", True, "cannot be with TPE on a function of an Optuna trial")
    if not callable(space):
        parts = _dicts(space)
        if len(parts) > 1:
            raise InvalidFieldError("space", space, "is a list of dicts; TPE needs one dict, or a function of a trial")
        space = {name: _domain(name, value) for name, value in parts[0].items()}
    return make_sampler("tpe", make_space(space), modes=("max",), seed=seed_of(random_state), points=points)


def seed_of(random_state: Any) -> int:
    """Returns a seed that a random state of scikit-learn stands for."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def _dicts(space: Any) -> list[Mapping[str, Any]]:
    parts = [space] if isinstance(space, Mapping) else space
    if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
        raise InvalidFieldError("space", space, "must be a dict of parameters and values, or a list of such dicts")
    for part in parts:
        if not isinstance(part, Mapping):
            raise InvalidFieldError("space", part, "must be a dict of parameters and values")
    return list(parts)


class _Variable:
    """A domain in the form of a distribution of SciPy."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def rvs(self, random_state: Any = None) -> Any:
        """Draws a value."""
        return self._domain.sample(np.random.default_rng(seed_of(random_state)))


def _sampled(name: str, value: Any) -> Any:
    """Returns a value of a space in the form that ``ParameterSampler`` takes."""
    if hasattr(value, "rvs"):
        return value
    domain = _converted(name, value)
    if isinstance(domain, Choice):
        return list(domain.choices)
    return _listed(value) if domain is None else _Variable(domain)


def _all_values(name: str, value: Any) -> Any:
    domain = None if hasattr(value, "rvs") else _converted(name, value)
    if hasattr(value, "rvs") or (domain is not None and domain.size is None):
        raise InvalidFieldError(f"space[{name!r}]", value, "is continuous; a grid needs a list of values")
    if domain is None:
        return _listed(value)
    assert domain.size is not None
    return [domain.at(index) for index in range(domain.size)]


def _listed(value: Any) -> Any:
    """Returns a list of values as it is, and a constant as a list of one."""
    is_constant = value is None or isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__")
    return [value] if is_constant else value


def _converted(name: str, value: Any) -> Domain | None:
    if isinstance(value, When):
        reason = "depends on another parameter; give a list of dicts, as for scikit-learn, or a function of a trial"
        raise InvalidFieldError(f"space[{name!r}]", value, reason)
    if isinstance(value, (FloatRange, IntRange, Choice)):
        return value
    domain = convert(value)
    if isinstance(domain, TuneFunction):
        raise InvalidFieldError(f"space[{name!r}]", value, "depends on other parameters; use a function of a trial")
    return domain


def _domain(name: str, value: Any) -> Any:
    """Returns a value of a space in a form that :func:`fluid.search.make_space` takes."""
    if not hasattr(value, "rvs"):
        converted = _converted(name, value)
        listed = _listed(value)
        return list(listed) if converted is None else converted
    kind = getattr(getattr(value, "dist", None), "name", type(value).__name__)
    if kind not in _SCIPY:
        reason = f"is a distribution ({kind}) that TPE does not know: {', '.join(_SCIPY)} are"
        raise InvalidFieldError(f"space[{name!r}]", value, reason)
    low, high = value.support()
    if kind == "randint":
        return randint(int(low), int(high) + 1)
    return uniform(float(low), float(high)) if kind == "uniform" else loguniform(float(low), float(high))
