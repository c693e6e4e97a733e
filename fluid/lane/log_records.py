"""Log records that a lane makes and the driver handles, as the script's handlers are there.

They go through the lane's connection, in front of the reports that it sends next. What the driver does not take in
time is dropped, and counted.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fluid.lane.protocol import LaneLogged

#: Most records that wait in a lane, and bytes of them.
_MOST_RECORDS = 1 << 14
_MOST_BYTES = 1 << 23
#: Characters of a message, or of its traceback, that are sent.
_LONGEST = 1 << 18
_PLAIN = (str, int, float, bool, type(None))
_FORMAT = logging.Formatter(logging.BASIC_FORMAT)
#: Set in a record that was sent: another handler may get it, too.
_SENT = "_fluid_sent"


class RecordOutbox:
    """The records that a lane has not sent yet.

    Logging may happen anywhere, also while this process sends, in a finalizer: :meth:`put` takes no lock.

    Args:
        current: returns the id of the trial whose code runs; ``None`` if none does.
        write: appends a text to the trial's output.log.
        wake: called when a record has come.
    """

    def __init__(
        self, current: Callable[[], str | None], write: Callable[[str], None], wake: Callable[[], None]
    ) -> None:
        self._current = current
        self._write = write
        self._wake = wake
        self._pid = os.getpid()
        self._records: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0

    def __bool__(self) -> bool:
        return bool(self._records)

    def put(self, record: logging.LogRecord, text: str) -> None:
        """Takes a record, and its line for the trial's output.log."""
        if os.getpid() != self._pid:  # A process that the trial has forked: the lane reads what it prints.
            sys.stderr.write(text)
            return
        self._write(text)
        if len(self._records) >= _MOST_RECORDS or self._bytes > _MOST_BYTES:
            self._dropped += 1
            return
        data = _pickled(record, self._current())
        self._bytes += len(data)
        self._records.append(data)
        self._wake()

    def take(self) -> LaneLogged | None:
        """Takes what has come; ``None`` if nothing has. Called by one thread at a time."""
        if not self._records:
            return None
        dropped, self._dropped, self._bytes = self._dropped, 0, 0
        return LaneLogged(tuple(self._records.popleft() for _ in range(len(self._records))), dropped)


class DriversHandler(logging.Handler):
    """Stands, in a lane, for the handlers that the script has for a logger.

    Args:
        records: takes the records.
        level: the least level that one of those handlers takes.
    """

    def __init__(self, records: RecordOutbox, level: int) -> None:
        super().__init__(level)
        self._outbox = records

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a record, once."""
        if not hasattr(record, _SENT):
            setattr(record, _SENT, True)
            try:
                self._outbox.put(record, _FORMAT.format(record) + "\n")
            except Exception:
                self.handleError(record)


def _pickled(record: logging.LogRecord, trial_id: str | None) -> bytes:
    """Pickles a record: its message is made here, as its arguments may be anything."""
    facts = {name: value for name, value in vars(record).items() if name not in ("args", "exc_info", _SENT)}
    facts["msg"] = record.getMessage()[:_LONGEST]
    facts.pop("message", None)
    facts["args"] = facts["exc_info"] = None
    if record.exc_text:
        facts["exc_text"] = record.exc_text[-_LONGEST:]
    facts.setdefault("trial_id", trial_id)
    try:
        return pickle.dumps(facts)
    except Exception:
        return pickle.dumps({name: value if type(value) in _PLAIN else _text(value) for name, value in facts.items()})


def _text(value: Any) -> str:
    with suppress(Exception):
        return repr(value)[:_LONGEST]
    return object.__repr__(value)


def record_of(data: bytes) -> logging.LogRecord:
    """Makes a record of what was sent; unpickles objects of the user's.

    The name of its level is the driver's, which may have given it one.
    """
    facts = pickle.loads(data)
    record = logging.makeLogRecord(facts)
    if record.levelname == f"Level {record.levelno}":
        record.levelname = logging.getLevelName(record.levelno)
    return record
