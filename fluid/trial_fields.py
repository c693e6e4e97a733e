"""Checks of a trial's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fluid.errors import InvalidFieldError, require_number, require_text

#: When an iteration counts as hung: seconds, ``"auto"`` for a limit measured on its like, or ``None`` for never.
IterationTimeout = float | Literal["auto"] | None
#: Mappings within mappings whose names are checked.
_DEEPEST = 20


def require_config(config: object) -> None:
    """Refuses a config that is no mapping, or with a name in it that no file can hold."""
    if not isinstance(config, Mapping):
        raise InvalidFieldError("config", config, "must be a mapping of hyperparameters")
    _require_names(config, 0)


def _require_names(config: Mapping[Any, Any], depth: int) -> None:
    for name, value in config.items():
        if isinstance(name, str) and not name.isascii():
            require_text("config", name, empty=True)
        if isinstance(value, Mapping) and depth < _DEEPEST:
            _require_names(value, depth + 1)


def require_timeout(name: str, value: object) -> IterationTimeout:
    """Returns a limit of an iteration.

    Raises:
        InvalidFieldError: it is not ``"auto"``, ``None`` or a finite number above 0.
    """
    if value is None or value == "auto":
        return None if value is None else "auto"
    try:
        seconds = require_number(name, value, at_least=0.0)
    except InvalidFieldError as error:
        raise InvalidFieldError(name, value, "must be a number of seconds above 0, 'auto' or None") from error
    if seconds == 0.0:
        raise InvalidFieldError(name, value, "must be a number of seconds above 0, 'auto' or None")
    return seconds
