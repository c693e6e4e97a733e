"""When a group is to have ended, as a user says it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Literal, TypeAlias, cast

from fluid.engine.events import GroupDeadline
from fluid.errors import InvalidFieldError, parse_duration, require_number, require_one_of

#: When a group is to have ended, as a user says it: seconds, text such as ``"2h"``, or steps: pairs of such a time and
#: what an end after it costs.
GivenDeadline: TypeAlias = "float | str | timedelta | Sequence[tuple[float | str | timedelta, float]] | None"
#: What becomes of a group that misses its deadline; the first is the default.
ON_MISS: tuple[str, ...] = ("late", "stop")
#: Seconds, costs and weights at most: squares and products of larger ones are no floats any more.
MOST = 1e12
_STEPS = 'must be seconds, text such as "2h", or steps: pairs of a time and a cost, as [("1h", 1), ("2h", 3)]'


def deadline_of(deadline: GivenDeadline, on_miss: str = ON_MISS[0]) -> GroupDeadline | None:
    """The deadline that a user sets; ``None`` for none.

    Raises:
        InvalidFieldError: it is neither a time nor steps, or ``on_miss`` is unknown, or to stop without a deadline.
    """
    how = cast(Literal["late", "stop"], require_one_of("on_miss", on_miss, ON_MISS))
    if deadline is None:
        if how != ON_MISS[0]:
            raise InvalidFieldError("on_miss", on_miss, "needs a deadline: give deadline=, or leave on_miss out")
        return None
    if isinstance(deadline, (str, timedelta)) or not isinstance(deadline, Iterable):
        return GroupDeadline(((seconds_until("deadline", deadline), 1.0),), how)
    given = list(deadline)
    if not given:
        raise InvalidFieldError("deadline", deadline, _STEPS)
    steps: list[tuple[float, float]] = []
    for place, step in enumerate(given):
        name = f"deadline[{place}]"
        if isinstance(step, str) or not isinstance(step, Sequence) or len(step) != 2:
            raise InvalidFieldError(name, step, _STEPS)
        at, cost = seconds_until(name, step[0]), _at_most(name, step[1], require_number(name, step[1], at_least=0.0))
        last_at, last_cost = steps[-1] if steps else (0.0, 0.0)
        if cost <= last_cost:
            above = f"must be above {last_cost:g}, that of the step before" if steps else "must be above 0"
            raise InvalidFieldError(name, step, f"its cost {above}")
        if at <= last_at:
            raise InvalidFieldError(name, step, "its time must be after that of the step before")
        steps.append((at, cost))
    return GroupDeadline(tuple(steps), how)


def seconds_until(field: str, value: object) -> float:
    """Seconds until a deadline, as :func:`fluid.errors.parse_duration` takes them.

    Raises:
        InvalidFieldError: they are not above 0, or above :data:`MOST`.
    """
    return _at_most(field, value, parse_duration(field, value))


def weight_of(weight: object) -> float:
    """The weight that a user gives a group.

    Raises:
        InvalidFieldError: it is not above 0, or above :data:`MOST`.
    """
    if (counts := require_number("weight", weight, at_least=0.0)) == 0.0:
        raise InvalidFieldError("weight", weight, "must be above 0")
    return _at_most("weight", weight, counts)


def _at_most(field: str, value: object, number: float) -> float:
    if number > MOST:
        raise InvalidFieldError(field, value, f"must be at most {MOST:g}")
    return number
