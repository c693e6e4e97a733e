"""Parameters as text: ``log:1e-5:1e-1``, ``0:1``, ``int:1:8``, ``1,2,4``; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fluid.errors import InvalidFieldError
from fluid.scripts.command import value_of
from fluid.search.domains import lograndint, loguniform, randint, uniform

#: What a parameter may be, for people.
FORMS = (
    "log:1e-5:1e-1 (log-uniform), 0:1 (uniform), 0:1:0.25 (in steps), int:1:8 and logint:1:1024 (whole numbers, both"
    " ends included), int:0:100:10 (in steps), 1,2,4 or sgd,adam (choices), choice:a:b,c:d (choices that hold colons),"
    " or one value, a constant"
)

#: Else its commas would part choices.
_SCHEDULE = re.compile(r"\s*schedule\s*[:(]")
#: A name made of digits, such as that of a fold: no number has zeros before it.
_HAS_ZEROS = re.compile(r"[+-]?0\d+")


def parse_parameter(text: str, field: str = "space") -> Any:
    """Reads one parameter of a space.

    Example:
        >>> from fluid.scripts.space_text import parse_parameter
        >>> parse_parameter("1,2,adam"), parse_parameter("0.5"), parse_parameter("int:1:8:7")
        ([1, 2, 'adam'], 0.5, IntRange(low=1, high=8, log=False, step=7))

    Raises:
        InvalidFieldError: it has none of the forms, which the error names.
    """
    if _SCHEDULE.match(text):
        reason = "is a schedule, and a script gets its values once, as it starts: give the schedule's numbers names of"
        raise InvalidFieldError(
            field, text, f"{reason} their own, such as lr_at_20=0.1,0.01, and follow it in the script"
        )
    kind, colon, rest = text.partition(":")
    if kind == "choice" and colon:
        return [_choice(part) for part in _choices(field, text, rest)]
    if ":" in text and "," not in text:
        return _range(field, text)
    if "," in text:
        return [_choice(part) for part in _choices(field, text, text)]
    if not text.strip():
        raise InvalidFieldError(field, text, f"has no value: it may be {FORMS}")
    return _choice(text)


def parse_space(entries: list[str]) -> dict[str, Any]:
    """Reads ``NAME=FORM`` entries; a name with dots is of a nested space.

    Raises:
        InvalidFieldError: an entry has no name, has one twice, or none of the forms.
    """
    space: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals or not name or not all(name.split(".")):
            raise InvalidFieldError("space", entry, f"must be NAME=VALUES, such as lr=log:1e-5:1e-1; VALUES: {FORMS}")
        place, *rest = name.split(".")
        inner = space
        for key in rest:
            inner = inner.setdefault(place, {})
            if not isinstance(inner, dict):
                raise InvalidFieldError("space", entry, f"{place!r} is a parameter itself")
            place = key
        if place in inner:
            raise InvalidFieldError("space", entry, f"{name!r} is given twice")
        inner[place] = parse_parameter(text, f"space[{name!r}]")
    return space


def _choice(text: str) -> Any:
    """A value of the type that its text has; what the script would get in another form is text: none, 007."""
    plain = text.strip()
    return plain if plain.lower() == "none" or _HAS_ZEROS.fullmatch(plain) else value_of(plain)


def _choices(field: str, text: str, listed: str) -> list[str]:
    parts = listed.split(",")
    if not all(part.strip() for part in parts):
        raise InvalidFieldError(field, text, "has an empty choice")
    return parts


_KINDS: Mapping[str, Callable[..., Any]] = {
    "log": loguniform,
    "uniform": uniform,
    "int": lambda low, high, step=1: randint(low, high + 1, step),
    "logint": lambda low, high: lograndint(low, high + 1),
}


def _range(field: str, text: str) -> Any:
    parts = text.split(":")
    kind = parts.pop(0) if parts[0] in _KINDS else "uniform"
    most = 2 if kind in ("log", "logint") else 3
    numbers = [value_of(part) for part in parts]
    whole = kind in ("int", "logint")
    allowed: Any = int if whole else (int, float)
    is_right = all(isinstance(number, allowed) and not isinstance(number, bool) for number in numbers)
    if not (is_right and 2 <= len(numbers) <= most):
        raise InvalidFieldError(field, text, f"is no range: it may be {FORMS}")
    try:
        if kind == "uniform" and len(numbers) == 3:
            return uniform(numbers[0], numbers[1], step=numbers[2])
        return _KINDS[kind](*numbers)
    except InvalidFieldError as error:
        raise InvalidFieldError(field, text, str(error)) from error
