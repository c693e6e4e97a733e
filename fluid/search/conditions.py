"""Conditions: hyperparameters that a config has only with some values of another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fluid.errors import InvalidFieldError
from fluid.user_calls import user_call
from fluid.user_values import is_equal_value

#: Types that hold several values of the other hyperparameter.
_SEVERAL = (list, tuple, set, frozenset, range)
#: Of a hyperparameter that has no value: no condition holds.
_ABSENT = object()


@dataclass(frozen=True)
class When:
    """What :func:`when` returns.

    Attributes:
        parent: name of the other hyperparameter.
        values: its values with which the config has this one.
        then: the values of this one.
    """

    parent: str
    values: tuple[Any, ...]
    then: Any

    def __repr__(self) -> str:
        values = self.values[0] if len(self.values) == 1 and not isinstance(self.values[0], _SEVERAL) else self.values
        return f"when({self.parent!r}, {values!r}, {self.then!r})"


@user_call
def when(parent: str, values: Any, then: Any) -> When:
    """Makes part of a search space depend on another hyperparameter: a config has it only with some values of that one.

    Example:
        >>> from fluid.search import make_sampler, make_space, uniform, when
        >>> space = {"optimizer": ["adam", "sgd"], "momentum": when("optimizer", "sgd", uniform(0, 0.99))}
        >>> sampler = make_sampler("random", make_space(space), seed=0)
        >>> configs = [sampler.ask().config for _ in range(10)]
        >>> all(("momentum" in config) == (config["optimizer"] == "sgd") for config in configs)
        True

    Args:
        parent: name of the other hyperparameter: one of the same dict or of a dict around it, the nearest first; a
            nested one by its keys, joined by ``/``. It is one of choices or whole numbers, or a constant, and may
            depend on others itself.
        values: one of its values, or a list or range of several: with any of them the config has this part.
        then: what stands in a space: a distribution, a list of choices, a constant, a dict of these, or ``when`` again,
            so that both conditions must hold.

    Raises:
        InvalidFieldError: the name is no text, or there is no value.
    """
    if not isinstance(parent, str) or not parent:
        raise InvalidFieldError("parent", parent, "must be the name of another hyperparameter")
    several = tuple(values) if isinstance(values, _SEVERAL) else (values,)
    if not several:
        raise InvalidFieldError("values", values, "must have at least one value")
    return When(parent, several, then)


class Condition(NamedTuple):
    """A hyperparameter that counts only with some values of another one.

    Attributes:
        child: the hyperparameter.
        parent: the other one, which must count itself.
        values: its values with which the child counts.
    """

    child: str
    parent: str
    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        """Whether the child counts with a value of the parent."""
        return any(_is_equal(one, value) for one in self.values)

    @property
    def text(self) -> str:
        """With what the child counts, for people."""
        return f"{self.parent} is {' or '.join(map(repr, self.values))}"


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values are the same; the third step of 0.1 is 0.30000000000000004, which people write as 0.3."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-15)
    return is_equal_value(one, other) and _is_bool(one) == _is_bool(other)


def _is_bool(value: Any) -> bool:
    """Whether a value is a truth value, also NumPy's: choices may hold both 1 and ``True``."""
    return type(value).__name__ in ("bool", "bool_")


def parents_first(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """The conditions in the order in which they can be looked at: those of parents before those of their children.

    Raises:
        InvalidFieldError: they depend on each other.
    """
    left, ordered = list(conditions), list[Condition]()
    while left:
        children = {condition.child for condition in left}
        ready = [condition for condition in left if condition.parent not in children]
        if not ready:
            raise InvalidFieldError("conditions", sorted(children), "depend on each other")
        ordered += ready
        left = [condition for condition in left if condition.parent in children]
    return tuple(ordered)


def in_order(names: Sequence[str], conditions: Sequence[Condition]) -> list[str]:
    """The names of a space, parents before the hyperparameters that depend on them."""
    depth = dict.fromkeys(names, 0)
    for condition in conditions:
        depth[condition.child] = max(depth.get(condition.child, 0), depth.get(condition.parent, 0) + 1)
    return sorted(names, key=lambda name: depth[name])


def idle_names(values: Mapping[str, Any], conditions: Sequence[Condition]) -> set[str]:
    """The names that do not count.

    Args:
        values: of those that others depend on, by name; with a name that is missing no condition holds.
        conditions: parents before children.
    """
    idle: set[str] = set()
    for condition in conditions:
        if condition.parent in idle or not condition.holds(values.get(condition.parent, _ABSENT)):
            idle.add(condition.child)
    return idle
