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
#: A URI; its user and password, which may hold ``/``, ``?`` and ``@`` that were not escaped; a value in its query.
_URI = re.compile(r"\b([A-Za-z][\w+.-]*://)([^\s'\"<>]*)")
_USERINFO = re.compile(r"^(?:[^/@]*:.*@|[^/]*@)")
_VALUE = re.compile(r"=[^&;#]*?(?=[&;#]|[)\]},.]*$)")
#: A named secret outside a URI, as in ``host=db password=x`` or ``{'token': 'x'}``.
_NAMED = re.compile(
    r"""(?ix)((?:pass(?:word|wd|phrase)?|pwd|(?:\w*[_-])?token|\w*secret\w*|api[_-]?key|access[_-]?key|account[_-]?key
    |credentials?|signature)['"]?\s*[=:]\s*)('[^']*'|"[^"]*"|[^\s,;&#'"()]+)"""
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
    place, question, query = _USERINFO.sub("", uri[2]).partition("?")
    return f"{uri[1]}{place}{question}{_VALUE.sub('=***', query)}"


def brief(error: BaseException) -> str:
    """The begin of an error's ``repr``, without secrets.

    Example:
        >>> from fluid._logs import brief
        >>> brief(ConnectionError("no answer from http://me:hunter2@host:5000"))
        "ConnectionError('no answer from http://host:5000')"
    """
    try:
        # These hold the whole of what was to be encoded.
        if isinstance(error, (UnicodeEncodeError, UnicodeDecodeError)):
            text = f"{type(error).__name__}({error.reason!r})"
        else:
            text = repr(error)
    except Exception:
        text = f"{type(error).__name__}(...)"
    text = without_secrets(text[: 10 * _LONGEST])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def brief_traceback(error: BaseException) -> str:
    """Where an error was raised, and the error as :func:`brief` has it; its causes' texts are left out."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"Traceback (most recent call last):\n{without_secrets(frames)}{brief(error)}"
