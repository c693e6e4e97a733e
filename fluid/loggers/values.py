"""Metrics and configs in the forms that loggers take: flat, with names of nested entries joined by ``/``."""

from __future__ import annotations

import json
import math
from typing import Any

from fluid.results.iterations import flat


def scalars(metrics: object) -> dict[str, float]:
    """The metrics that are numbers, NaN and infinity included; a bool is 1 or 0."""
    found = {}
    for name, value in flat(metrics).items():
        if isinstance(value, (int, float)):
            try:
                found[name] = float(value)
            except OverflowError:  # An integer that no float holds.
                continue
    return found


def texts(metrics: object) -> dict[str, str]:
    """The metrics that are no numbers, as text."""
    return {
        name: text_of(value)
        for name, value in flat(metrics).items()
        if value is not None and not isinstance(value, (int, float))
    }


def text_of(value: Any) -> str:
    """A value as text: JSON, unless it is a text."""
    return value if isinstance(value, str) else json.dumps(value)


def hyperparameters(config: object) -> dict[str, bool | float | str]:
    """A config with values that every client takes: what is no finite number, bool or text becomes text."""
    found: dict[str, bool | float | str] = {}
    for name, value in flat(config).items():
        is_number = isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))
        found[name] = value if is_number else text_of(value)
    return found
