"""A search space from the configs of a recorded run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fluid.results.metrics import is_number
from fluid.search import choice, lograndint, loguniform, randint, uniform
from fluid.trainables.json_form import json_form

#: A positive hyperparameter whose values span this factor is drawn on a logarithmic scale.
_LOG_SPAN = 100.0
#: Numbers that take so few values, each this often on average, are choices.
_MOST_CHOICES, _REPEATED = 12, 2.0


def space_of(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the ranges and the choices that configs span, nested as these are.

    Args:
        configs: of trials, as JSON has them. What some of them lack is drawn for all.
    """
    space: dict[str, Any] = {}
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config[name] for config in configs if name in config]
        nested = [value for value in values if isinstance(value, Mapping) and value]
        space[name] = space_of(nested) if len(nested) == len(values) else _domain(values)
    return space


def _domain(values: Sequence[Any]) -> Any:
    distinct = {json.dumps(json_form(value), sort_keys=True): value for value in values}
    found = list(distinct.values())
    if len(found) == 1:
        # A plain list would mean choices.
        return choice(found) if isinstance(found[0], (list, tuple)) else found[0]
    if not all(is_number(value) for value in found):
        return choice(found)
    found.sort()
    if len(found) == 2 or (len(found) <= _MOST_CHOICES and len(values) >= _REPEATED * len(found)):
        return choice(found)
    low, high = found[0], found[-1]
    is_log = low > 0 and high / low >= _LOG_SPAN
    if all(isinstance(value, int) for value in found):
        return lograndint(low, high + 1) if is_log else randint(low, high + 1)
    return loguniform(float(low), float(high)) if is_log else uniform(float(low), float(high))
