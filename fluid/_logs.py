"""The log of Fluid's own threads: its handlers and filters are the user's, and may raise anything."""

from __future__ import annotations

import logging
import threading
import traceback
from contextlib import suppress


class _GuardedLogger(logging.Logger):
    """A logger whose handlers end nothing: what they raise in a thread of Fluid's is printed."""

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except BaseException:
            if threading.current_thread() is threading.main_thread():  # The user's own call, or Ctrl-C in it.
                raise
            with suppress(BaseException):
                traceback.print_exc()


def logger_of(name: str) -> logging.Logger:
    """Returns the logger of this name, with a guard for Fluid's own threads: an error in one would end a session."""
    logger = logging.getLogger(name)
    if not isinstance(logger, _GuardedLogger):  # Its class may be the user's: logging.setLoggerClass().
        logger.__class__ = type("GuardedLogger", (_GuardedLogger, type(logger)), {})
    return logger
