"""What a logger left out as it could not hold it: told once, then counted."""

from __future__ import annotations

import logging

from fluid._logs import brief, logger_of

_log = logger_of("fluid.loggers")


class LeftOut:
    """Tells what one logger left out.

    Args:
        key: names the logger in the log.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._number = 0

    def add(self, what: str, error: BaseException) -> None:
        """Tells what could not be logged, and why, the first time."""
        self._number += 1
        text = "logger %s left out %.200s, as that raised %s; it goes on, and counts what else it leaves out"
        level = logging.WARNING if self._number == 1 else logging.DEBUG
        _log.log(level, text, self._key, what, brief(error))

    def close(self) -> None:
        """Tells how often that was, if more than once."""
        if self._number > 1:
            _log.warning("logger %s left out %d things in all", self._key, self._number)
