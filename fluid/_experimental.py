"""A decorator for API that may change without a deprecation period."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=Callable[..., Any])


class ExperimentalWarning(UserWarning):
    """Warns that the API in use may change in any release."""


def experimental(version: str) -> Callable[[T], T]:
    """Marks a function or class as experimental.

    Its docstring says so, and its first call (for a class: its first instance) warns once per process.

    Args:
        version: the release that introduced it, such as ``"0.2"``.

    Returns:
        A decorator. It returns a wrapped function, or the same class with a wrapped ``__init__``.
    """

    def decorate(target: T) -> T:
        if isinstance(target, type):
            # The class itself is kept, so that isinstance, subclassing and pickling still work.
            init = target.__init__  # type: ignore[misc]
            target.__init__ = _warning_once(init, target.__qualname__, version)  # type: ignore[misc]
            target.__doc__ = _document(target.__doc__, version)
            return target
        wrapped = _warning_once(target, target.__qualname__, version)
        wrapped.__doc__ = _document(target.__doc__, version)
        return cast(T, wrapped)

    return decorate


def _warning_once(function: Callable[..., Any], name: str, version: str) -> Callable[..., Any]:
    warned = False

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        if not warned:
            message = f"{name} is experimental since {version}: it may change in any release"
            warnings.warn(message, ExperimentalWarning, stacklevel=2)
            # Only now: where warnings are errors, every call fails, not just the first.
            warned = True
        return function(*args, **kwargs)

    return wrapper


def _document(doc: str | None, version: str) -> str:
    note = f"Note:\n    Experimental since {version}: it may change in any release."
    return f"{inspect.cleandoc(doc)}\n\n{note}" if doc else note
