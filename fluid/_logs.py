"""The log of Fluid's own threads: its handlers and filters are the user's, and may raise anything.

Also what may be written of an address or an error: both can hold passwords, and an error can hold all of a table.
"""

from __future__ import annotations

import logging
import re
import threading
import traceback
from contextlib import suppress

#: Most characters of an error's text.
_LONGEST = 300
#: A URI, as far as its query.
_URI = re.compile(r"\b([A-Za-z][\w+.-]*://)([^\s'\"<>?#]*)(\?[^\s'\"<>#]*)?")
#: Its user and password, which may hold ``/`` and ``@`` that were not escaped.
_USERINFO = re.compile(r"^(?:[^/@]*:[^@]*@|[^/]*@)(?:[^/@]*@)*")
#: A named secret outside a URI, as in ``host=db password=x`` or ``{'token': 'x'}``.
_NAMED = re.compile(
    r"""(?ix)((?:pass(?:word|wd|phrase)?|pwd|(?:\w*[_-])?token|\w*secret\w*|api[_-]?key|access[_-]?key|account[_-]?key
    |credentials?|signature)['"]?\s*[=:]\s*)('[^']*'|"[^"]*"|[^\s,;&'"()]+)"""
)


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


def without_secrets(text: str) -> str:
    """Takes out of a text what gives access: of URIs the user, the password and the values in the query.

    Example:
        >>> from fluid._logs import without_secrets
        >>> without_secrets("postgresql://me:hunter2@db:5432/runs?sslmode=require&password=hunter2")
        'postgresql://db:5432/runs?sslmode=***&password=***'
        >>> without_secrets("host=db user=me password=hunter2")
        'host=db user=me password=***'
    """
    return _NAMED.sub(r"\1***", _URI.sub(_bare, text))


def _bare(uri: re.Match[str]) -> str:
    query = re.sub(r"=[^&;]*", "=***", uri[3] or "")
    return f"{uri[1]}{_USERINFO.sub('', uri[2])}{query}"


def brief(error: BaseException) -> str:
    """An error on one line: its class and the begin of its text, without secrets.

    Example:
        >>> from fluid._logs import brief
        >>> brief(ConnectionError("no answer from http://me:hunter2@host:5000"))
        'ConnectionError: no answer from http://host:5000'
    """
    try:
        # A UnicodeError's text can hold the whole object.
        text = error.reason if isinstance(error, (UnicodeEncodeError, UnicodeDecodeError)) else str(error)
    except Exception:
        text = "its text cannot be made"
    text = " ".join(without_secrets(text[: 10 * _LONGEST]).split())
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}".removesuffix(": ")


def brief_traceback(error: BaseException) -> str:
    """Where an error was raised, and the error as :func:`brief` has it; its causes' texts are left out."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"Traceback (most recent call last):\n{without_secrets(frames)}{brief(error)}"
