"""Arguments that integrations hand on to a function of Fluid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fluid.errors import InvalidFieldError
from fluid.user_calls import hint, names_of


def require_options(
    taker: Callable[..., Any],
    options: Mapping[str, Any],
    others: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuses what a function of fluid does not take, before anything is made for it.

    Args:
        taker: the public function, or class, of ``fluid`` that is to get them.
        options: by name, as the user has given them.
        others: names that cannot be given here, and why.

    Raises:
        InvalidFieldError: one cannot be handed on.
    """
    known = {*names_of(taker)}
    for name, value in options.items():
        reason = others.get(name)
        if reason is None and name not in known:
            meant = hint(name, known)
            reason = f"is no argument of this function, nor of fluid.{taker.__name__}" + (meant and f": {meant}")
        if reason is not None:
            raise InvalidFieldError(name, value, reason)
