"""Arguments that integrations hand on to a function of Fluid."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fluid.errors import InvalidFieldError


def require_options(
    taker: Callable[..., Any],
    options: Mapping[str, Any],
    others: Mapping[str, str] = MappingProxyType({}),
    *,
    more: Iterable[str] = (),
) -> None:
    """Refuses what a function of fluid does not take, before anything is made for it.

    Args:
        taker: the public function, or class, of ``fluid`` that is to get them.
        options: by name, as the user has given them.
        others: names that cannot be given here, and why.
        more: names that it takes besides those of its signature.

    Raises:
        InvalidFieldError: one cannot be handed on.
    """
    known = {*inspect.signature(taker).parameters, *more}
    for name, value in options.items():
        reason = others.get(
            name, None if name in known else f"is no argument of this function, nor of fluid.{taker.__name__}"
        )
        if reason is not None:
            raise InvalidFieldError(name, value, reason)
