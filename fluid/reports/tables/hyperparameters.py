"""The hyperparameters of trials, as reports show them; :func:`fluid.results.iterations.flat` names nested ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def differing(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The hyperparameters in which flat configs differ, in order of first use; one that some lack differs too."""
    seen: dict[str, set[str]] = {}
    having: dict[str, int] = {}
    total = 0
    for config in configs:
        total += 1
        for name, value in config.items():
            seen.setdefault(name, set()).add(repr(value))
            having[name] = having.get(name, 0) + 1
    return [name for name, values in seen.items() if len(values) > 1 or having[name] < total]


def value_text(value: object, digits: int = 6) -> str:
    """A hyperparameter's value as text: floats to so many digits, others as JSON, texts as they are."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
