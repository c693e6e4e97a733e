"""What loggers take: text that every file and server can hold, and metrics and configs flat, joined by ``/``."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

from fluid.engine.events import Failure
from fluid.measure.json_input import without_surrogates
from fluid.results.iterations import flat


def writable(value: Any) -> Any:
    """What JSON holds, with escapes for the characters that not all sinks can hold: lone surrogates and NUL.

    Example:
        >>> from fluid.loggers.values import writable
        >>> writable({"path": "\\udce9.csv", "seen": ["a\\0b", 1]})
        {'path': '\\\\udce9.csv', 'seen': ['a\\\\x00b', 1]}
    """
    return _without_nul(without_surrogates(value))


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\\x00")
    if isinstance(value, list):
        return [_without_nul(inner) for inner in value]
    if isinstance(value, dict):
        return {_without_nul(name): _without_nul(inner) for name, inner in value.items()}
    return value


def cut(name: str, most: int) -> str:
    """A name, or the begin of one that has more than ``most`` characters, with a digest of it all."""
    return name if len(name) <= most else f"{name[: most - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def writable_failure(failure: Failure | None) -> Failure | None:
    """A failure with texts that every sink can hold."""
    if failure is None:
        return None
    return replace(failure, message=writable(failure.message), traceback=writable(failure.traceback))


def scalars(metrics: object) -> dict[str, float]:
    """The metrics that are numbers, NaN and infinity included; a bool is 1 or 0."""
    found = {}
    for name, value in flat(metrics).items():
        if isinstance(value, (int, float)) and is_float(value):
            found[name] = float(value)
    return found


def is_float(number: float) -> bool:
    """Whether a float holds a number; none holds an integer such as ``10**400``."""
    try:
        float(number)
    except OverflowError:
        return False
    return True


def texts(metrics: object) -> dict[str, str]:
    """The metrics that are no numbers that a float holds, as text."""
    return {
        name: text_of(value)
        for name, value in flat(metrics).items()
        if value is not None and not (isinstance(value, (int, float)) and is_float(value))
    }


def text_of(value: Any) -> str:
    """A value as text: JSON, unless it is a text."""
    return value if isinstance(value, str) else json.dumps(value)


def hyperparameters(config: object) -> dict[str, bool | float | str]:
    """A config with values that every client takes: what is no finite number, bool or text becomes text."""
    found: dict[str, bool | float | str] = {}
    for name, value in flat(config).items():
        is_number = isinstance(value, (int, float)) and is_float(value) and math.isfinite(value)
        found[name] = value if is_number else text_of(value)
    return found
