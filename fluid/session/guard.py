"""The one door through which the session's thread calls code of users: listeners, callbacks, groups of their class.

Such code may raise anything, also what ends a program (``SystemExit``, ``KeyboardInterrupt``). The session's thread
goes on in any case: an error that left it would end the trials of all groups.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CoroutineType
from typing import Any, TypeVar

from fluid._logs import logger_of

T = TypeVar("T")
_log = logger_of("fluid.session")


def guarded(whose: str, call: Callable[..., T], *facts: Any) -> T | None:
    """Calls a user's code; what it raises is logged, and ends nothing.

    Args:
        whose: names the code in the log.
        call: the code.
        facts: its arguments.

    Returns:
        What it returns; ``None`` where it raised, or returned a coroutine, which the session does not run.
    """
    try:
        found = call(*facts)
        if not isinstance(found, CoroutineType):
            return found
        found.close()
    except BaseException:
        _log.exception("%s raised", whose)
    return None
