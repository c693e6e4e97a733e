"""Conversion of the distributions of Optuna and Ray Tune to domains.

Neither package is imported: an object is recognised by the module of its class. Ray Tune's ranges sample their values
themselves, so that a value is drawn as Ray Tune draws it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluid.errors import InvalidFieldError, require_number
from fluid.search.domains import Choice, Domain, FloatRange, IntRange

_OPTUNA = "optuna.distributions"
_TUNE = "ray.tune.search.sample"
#: Types that might mean choices, a range or one value.
_AMBIGUOUS = (tuple, set, frozenset, range, np.ndarray)
#: Packages whose distributions are not taken, and would else be constants.
_OTHER_PACKAGES = ("ConfigSpace", "hyperopt", "nevergrad", "scipy", "skopt")


@dataclass(frozen=True)
class TuneRange:
    """A range of Ray Tune, which samples itself.

    Attributes:
        source: Ray Tune's domain.
        values: the values that it samples; None for a normal distribution, which has no bounds.
        log: whether the logarithm of a value is uniform; ``values`` may have a step all the same.
    """

    source: Any
    values: FloatRange | IntRange | None
    log: bool = False

    @property
    def size(self) -> int | None:
        return None if self.values is None else self.values.size

    def at(self, index: int) -> float | int:
        assert self.values is not None  # Its size is None then.
        return self.values.at(index)

    def index(self, value: Any) -> int:
        assert self.values is not None
        return self.values.index(value)

    def sample(self, rng: np.random.Generator) -> float | int:
        value: float | int = self.source.sample(random_state=rng)
        return value

    def check(self, field: str, value: object) -> float | int:
        if self.values is None:
            return require_number(field, value, at_least=-math.inf)
        return self.values.check(field, value)


@dataclass(frozen=True)
class TuneFunction:
    """Ray Tune's ``sample_from``: a value computed from the rest of the config.

    Attributes:
        source: Ray Tune's object.
    """

    source: Any

    def call(self, config: Mapping[str, Any]) -> Any:
        """The value that goes with the values of ``config``; raises what the user's function raises."""
        return self.source.sample(config=config)


def convert(value: object) -> Domain | TuneFunction | None:
    """The domain that an object of Optuna or Ray Tune stands for; None for any other object.

    Raises:
        InvalidFieldError: a bound is NaN, the range is empty, or this kind of distribution is not known.
    """
    for module, converters in ((_OPTUNA, _OPTUNA_CONVERTERS), (_TUNE, _TUNE_CONVERTERS)):
        names = [cls.__name__ for cls in type(value).__mro__ if cls.__module__ == module]
        if names:
            known = next((converters[name] for name in names if name in converters), None)
            if known is None:
                raise InvalidFieldError("distribution", names[0], "is of a kind that Fluid does not know")
            return known(value)
    if isinstance(value, Mapping) and list(value) == ["grid_search"]:
        return _grid_search(value["grid_search"])
    return None


def require_constant(field: str, value: object) -> object:
    """Returns a value that is the same in every config.

    Raises:
        InvalidFieldError: it may mean several things, or is what no config can hold.
    """
    kind = type(value).__name__
    if isinstance(value, _AMBIGUOUS) and not (isinstance(value, np.ndarray) and value.ndim == 0):
        reason = (
            f"{'an array' if kind == 'ndarray' else f'a {kind}'} may mean choices, a range or one value; "
            "write [a, b] for choices, uniform(low, high) for a range, and a list of this one value for a constant"
        )
        raise InvalidFieldError(field, value, reason)
    if inspect.isroutine(value):
        reason = (
            "a function is not a value; use a function of an Optuna trial for the whole space, Ray Tune's "
            "sample_from, or a list of this one function for a constant"
        )
        raise InvalidFieldError(field, value, reason)
    if hasattr(value, "__next__"):
        raise InvalidFieldError(field, value, "an iterator is not a value; write a list for choices")
    if type(value).__module__.split(".")[0] in _OTHER_PACKAGES:
        reason = f"a {kind} is not a distribution that Fluid knows; use Optuna's, Ray Tune's or those of fluid.search"
        raise InvalidFieldError(field, value, reason)
    return value


def _optuna_float(source: Any) -> FloatRange:
    return FloatRange(source.low, source.high, log=source.log, step=source.step)


def _optuna_int(source: Any) -> IntRange:
    return IntRange(source.low, source.high, log=source.log, step=source.step)


def _optuna_choice(source: Any) -> Choice:
    return Choice(tuple(source.choices))


_OPTUNA_CONVERTERS: Mapping[str, Callable[[Any], Domain | TuneFunction]] = {
    "CategoricalDistribution": _optuna_choice,
    "FloatDistribution": _optuna_float,
    "IntDistribution": _optuna_int,
}


def _tune_float(source: Any) -> TuneRange:
    sampler, quantum = _tune_sampler(source)
    if _is_a(sampler, "Normal"):
        return TuneRange(source, None)
    log = _is_a(sampler, "LogUniform")
    if quantum is None:
        return TuneRange(source, FloatRange(source.lower, source.upper, log=log, includes_high=False), log)
    FloatRange(source.lower, source.upper, log=log)  # Checks the bounds before they are rounded.
    first, last = _multiples(source, quantum)
    return TuneRange(source, FloatRange(first * quantum, last * quantum, step=quantum), log)


def _tune_integer(source: Any) -> TuneRange:
    sampler, quantum = _tune_sampler(source)
    log = _is_a(sampler, "LogUniform")
    # Without a quantum, and with 1, the upper bound is exclusive; any other quantum includes it.
    if quantum in (None, 1):
        values = IntRange(source.lower, source.upper - 1, log=log)
    else:
        IntRange(source.lower, source.upper, log=log)
        first, last = _multiples(source, quantum)
        values = IntRange(first * quantum, last * quantum, step=quantum)
    return TuneRange(source, values, log)


def _tune_categorical(source: Any) -> Choice:
    return Choice(tuple(source.categories))


_TUNE_CONVERTERS: Mapping[str, Callable[[Any], Domain | TuneFunction]] = {
    "Categorical": _tune_categorical,
    "Float": _tune_float,
    "Function": TuneFunction,
    "Integer": _tune_integer,
}


def _tune_sampler(source: Any) -> tuple[Any, Any]:
    """Ray Tune's sampler and the quantum of its values, None if they are not quantised."""
    sampler = source.get_sampler()
    return (sampler.sampler, sampler.q) if _is_a(sampler, "Quantized") else (sampler, None)


def _is_a(sampler: Any, name: str) -> bool:
    return any(cls.__name__ == name and cls.__module__ == _TUNE for cls in type(sampler).__mro__)


def _multiples(source: Any, quantum: Any) -> tuple[int, int]:
    """The first and the last multiple of the quantum in Ray Tune's range, in quanta."""
    low, high = source.lower / quantum, source.upper / quantum
    first = round(low) if math.isclose(low, round(low)) else math.ceil(low)
    last = round(high) if math.isclose(high, round(high)) else math.floor(high)
    return first, last


def _grid_search(values: Any) -> Choice:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise InvalidFieldError("grid_search", values, "must be a list of values")
    return Choice(tuple(values))
