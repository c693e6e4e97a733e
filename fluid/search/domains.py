"""Domains: the values that one hyperparameter may take, and how they are sampled.

:func:`uniform`, :func:`loguniform`, :func:`randint`, :func:`lograndint` and :func:`choice` make domains without any
other package. Their bounds are those of Ray Tune's functions of the same names: an upper bound is exclusive.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.user_calls import user_call
from fluid.user_values import is_equal_value, is_same_value


class Domain(Protocol):
    """The values that one hyperparameter may take."""

    @property
    def size(self) -> int | None:
        """How many values there are; None if the domain is continuous."""
        ...

    def at(self, index: int) -> Any:
        """The value of that index; the domain must be finite, and the index in ``range(size)``."""
        ...

    def index(self, value: Any) -> int:
        """The opposite of :meth:`at`: the index of a value that :meth:`check` returned."""
        ...

    def sample(self, rng: np.random.Generator) -> Any:
        """A value, drawn with ``rng`` alone."""
        ...

    def check(self, field: str, value: object) -> Any:
        """The value as the domain would have sampled it.

        Raises:
            InvalidFieldError: the value is not in the domain; ``field`` is named.
        """
        ...


@dataclass(frozen=True)
class FloatRange:
    """Numbers from ``low`` to ``high``.

    Attributes:
        low: the least value.
        high: the greatest one.
        log: whether the logarithm of the value is uniform, and not the value.
        step: the values are ``low``, ``low + step`` and so on up to ``high``; None for all numbers of the range.
        includes_high: whether ``high`` itself is a value; without ``step`` only.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    includes_high: bool = True

    def __post_init__(self) -> None:
        require_number("low", self.low, at_least=-math.inf)
        require_number("high", self.high, at_least=-math.inf)
        if self.step is not None and require_number("step", self.step, at_least=0) == 0:
            raise InvalidFieldError("step", self.step, "must be greater than 0")
        if self.low > self.high or (self.low == self.high and not self.includes_high):
            raise InvalidFieldError("low", self.low, f"must be less than high={self.high!r}")
        if self.log and self.low <= 0:
            raise InvalidFieldError("low", self.low, "must be greater than 0 on a logarithmic scale")
        if self.log and self.step is not None:
            raise InvalidFieldError("step", self.step, "cannot be used on a logarithmic scale")

    @property
    def size(self) -> int | None:
        if self.low == self.high:
            return 1
        # The small addend keeps 0.3 in steps of 0.1 at four values, whatever the floats' last digits are.
        return None if self.step is None else math.floor((self.high - self.low) / self.step + 1e-9) + 1

    def at(self, index: int) -> float:
        return float(min(self.low + index * (self.step or 0.0), self.high))

    def index(self, value: float) -> int:
        return 0 if self.step is None else round((value - self.low) / self.step)

    @property
    def greatest(self) -> float:
        """The greatest value."""
        return float(self.high if self.includes_high else np.nextafter(self.high, self.low))

    def sample(self, rng: np.random.Generator) -> float:
        if self.size is not None:
            return self.at(int(rng.integers(self.size)))
        share = rng.random()
        if self.log:
            value = math.exp(between(math.log(self.low), math.log(self.high), share))
        else:
            value = between(self.low, self.high, share)
        return min(max(value, float(self.low)), self.greatest)

    def check(self, field: str, value: object) -> float:
        # An exclusive upper bound is allowed too, as in Ray Tune: the user may well try the end of the range.
        number = require_number(field, value, at_least=-math.inf)
        if not self.low <= number <= self.high:
            raise InvalidFieldError(field, value, f"is not between {self.low!r} and {self.high!r}")
        if self.step is not None:
            steps = (number - self.low) / self.step
            if abs(steps - round(steps)) > 1e-8:
                raise InvalidFieldError(field, value, f"is not {self.low!r} plus a multiple of the step {self.step!r}")
        return number


@dataclass(frozen=True)
class IntRange:
    """Whole numbers from ``low`` to ``high``, both included.

    Attributes:
        low: the least value.
        high: the greatest one.
        log: whether small numbers are as much more frequent as on a logarithmic scale.
        step: the values are ``low``, ``low + step`` and so on up to ``high``.
    """

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        for field, value in (("low", self.low), ("high", self.high)):
            if abs(_whole(field, value)) >= 2**62:
                raise InvalidFieldError(field, value, "is too large")
        require_integer("step", self.step, at_least=1)
        if self.low > self.high:
            raise InvalidFieldError("low", self.low, f"must not be greater than the last value, {self.high!r}")
        if self.log and self.low < 1:
            raise InvalidFieldError("low", self.low, "must be at least 1 on a logarithmic scale")
        if self.log and self.step != 1:
            raise InvalidFieldError("step", self.step, "cannot be used on a logarithmic scale")

    @property
    def size(self) -> int:
        return int((self.high - self.low) // self.step + 1)

    def at(self, index: int) -> int:
        return int(self.low + index * self.step)

    def index(self, value: int) -> int:
        return round((value - self.low) / self.step)

    def sample(self, rng: np.random.Generator) -> int:
        if not self.log:
            return self.at(int(rng.integers(self.size)))
        # Every number stands for the interval around it, as in Optuna, so that the ends are as likely as they should.
        exponent = between(math.log(self.low - 0.5), math.log(self.high + 0.5), rng.random())
        return min(max(round(math.exp(exponent)), int(self.low)), int(self.high))

    def check(self, field: str, value: object) -> int:
        number = _whole(field, value)
        if not self.low <= number <= self.high:
            raise InvalidFieldError(field, value, f"is not between {self.low} and {self.high}")
        if (number - self.low) % self.step:
            raise InvalidFieldError(field, value, f"is not {self.low} plus a multiple of the step {self.step}")
        return number


@dataclass(frozen=True)
class Choice:
    """One of some values, each as likely as the others.

    Attributes:
        choices: the values; at least one.
    """

    choices: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise InvalidFieldError("choices", list(self.choices), "must have at least one value")

    @property
    def size(self) -> int:
        return len(self.choices)

    def at(self, index: int) -> Any:
        return self.choices[index]

    def sample(self, rng: np.random.Generator) -> Any:
        return self.choices[int(rng.integers(len(self.choices)))]

    def index(self, value: Any) -> int:
        found = self.find(value)
        assert found is not None
        return found

    def check(self, field: str, value: object) -> Any:
        found = self.find(value)
        if found is None:
            raise InvalidFieldError(field, value, f"is not one of {list(self.choices)!r}")
        return self.choices[found]

    def find(self, value: object) -> int | None:
        """The index of a value; ``None`` if it is not one of the choices."""
        for same in (is_same_value, is_equal_value):  # True and 1 are equal: the one of the same type comes first.
            for index, known in enumerate(self.choices):
                if same(known, value):
                    return index
        return None


@user_call
def uniform(low: float, high: float, *, step: float | None = None) -> FloatRange:
    """Numbers from ``low`` up to, but not including, ``high``.

    Args:
        low: the least value.
        high: values are less than this.
        step: the values are ``low``, ``low + step`` and so on; ``high`` is then included if it is one of them.

    Raises:
        InvalidFieldError: a bound is NaN or infinite, or ``low`` is not less than ``high``.

    Example:
        >>> from fluid.search import make_sampler, make_space, uniform
        >>> space = make_space({"momentum": uniform(0.5, 1.0), "dropout": uniform(0, 0.5, step=0.25)})
        >>> config = make_sampler("random", space, seed=1).ask().config
        >>> 0.5 <= config["momentum"] < 1.0, config["dropout"] in (0.0, 0.25, 0.5)
        (True, True)
    """
    return FloatRange(low, high, step=step, includes_high=step is not None)


@user_call
def loguniform(low: float, high: float) -> FloatRange:
    """Numbers from ``low`` up to, but not including, ``high``; every order of magnitude is as likely as any other.

    Args:
        low: the least value, greater than 0.
        high: values are less than this.

    Raises:
        InvalidFieldError: a bound is NaN, infinite or not positive, or ``low`` is not less than ``high``.

    Example:
        >>> from fluid.search import loguniform, make_sampler, make_space
        >>> space = make_space({"lr": loguniform(1e-5, 1e-1)})
        >>> 1e-5 <= make_sampler("random", space, seed=1).ask().config["lr"] < 1e-1
        True
    """
    return FloatRange(low, high, log=True, includes_high=False)


@user_call
def randint(low: int, high: int, step: int = 1) -> IntRange:
    """The whole numbers of ``range(low, high, step)``: ``high`` is not one of them.

    Args:
        low: the least value.
        high: values are less than this.
        step: the difference between two values.

    Raises:
        InvalidFieldError: an argument is not a whole number, or ``low`` is not less than ``high``.

    Example:
        >>> from fluid.search import make_sampler, make_space, randint
        >>> grid = make_sampler("grid", make_space({"layers": randint(1, 8, 3)}))
        >>> [grid.ask().config["layers"] for _ in range(grid.size)]
        [1, 4, 7]
    """
    return _int_range(low, high, step=step)


@user_call
def lograndint(low: int, high: int) -> IntRange:
    """Whole numbers from ``low`` up to, but not including, ``high``; every order of magnitude is as likely as another.

    Args:
        low: the least value, at least 1.
        high: values are less than this.

    Raises:
        InvalidFieldError: a bound is not a whole number, or ``low`` is not less than ``high``.

    Example:
        >>> from fluid.search import lograndint, make_sampler, make_space
        >>> space = make_space({"units": lograndint(16, 1025)})
        >>> 16 <= make_sampler("random", space, seed=1).ask().config["units"] <= 1024
        True
    """
    return _int_range(low, high, log=True)


@user_call
def choice(values: Iterable[Any]) -> Choice:
    """One of some values, which may be of any type. A plain list in a space means the same.

    Args:
        values: the values; at least one.

    Raises:
        InvalidFieldError: there is no value, or ``values`` is one string.

    Example:
        >>> from fluid.search import choice, make_sampler, make_space
        >>> grid = make_sampler("grid", make_space({"optimizer": choice(["sgd", "adam"])}))
        >>> [grid.ask().config["optimizer"] for _ in range(grid.size)]
        ['sgd', 'adam']
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidFieldError("values", values, "must be a list of values")
    return Choice(tuple(values))


def _int_range(low: int, high: int, *, log: bool = False, step: int = 1) -> IntRange:
    if _whole("low", low) >= _whole("high", high):
        raise InvalidFieldError("low", low, f"must be less than high={high!r}")
    return IntRange(low, high - 1, log=log, step=step)


def _whole(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidFieldError(field, value, "must be a whole number")
    return int(value)


def between(low: float, high: float, share: float) -> float:
    """The number that lies so far between two others."""
    # Not low + share * (high - low): the difference of two large floats may be infinite.
    return low * (1.0 - share) + high * share
