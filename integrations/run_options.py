"""Arguments that the sweeps of integrations hand on to :func:`fluid.run`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fluid.errors import InvalidFieldError
from fluid.sweep import run

_KNOWN = frozenset(
    name for name, parameter in inspect.signature(run).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
)


def require_run_options(options: Mapping[str, Any], others: Mapping[str, str]) -> None:
    """Refuses what :func:`fluid.run` does not take, before anything is made for it.

    Args:
        options: by name, as the user has given them.
        others: names that cannot be given here, and why.

    Raises:
        InvalidFieldError: one cannot be handed on.
    """
    for name, value in options.items():
        reason = others.get(
            name, None if name in _KNOWN else "is an argument neither of this function nor of fluid.run"
        )
        if reason is not None:
            raise InvalidFieldError(name, value, reason)
