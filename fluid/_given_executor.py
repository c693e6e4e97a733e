"""Calls that close the executor they are given at their end do so, too, when they raise before they use it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def closes_executor(call: Callable[P, T]) -> Callable[P, T]:
    """Has a call that raises close the ``executor=`` that it was given, unless that is in force or a sweep uses it.

    So a call that refuses its arguments leaves nothing open, and holds no devices.
    """

    @functools.wraps(call)
    def closing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except BaseException:
            given = kwargs.get("executor")
            close = None if isinstance(given, type) else getattr(given, "close_if_unused", None)
            if close is not None:
                close()
            raise

    return closing
