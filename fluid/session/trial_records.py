"""Handles the log records of trials by the handlers of the script, in a thread of its own.

Handlers are the user's: they may wait, raise anything, and call Fluid. So the session's thread only puts records into a
queue. What the handlers do not take in time is dropped, and counted.
"""

from __future__ import annotations

import logging
import queue
import threading

from fluid._logs import logger_of
from fluid.lane.log_records import record_of
from fluid.lane.protocol import LaneLogged
from fluid.waiting.waits import BackgroundThread

_log = logger_of("fluid.session")
#: Most records that wait, and bytes of them.
_MOST_RECORDS = 20_000
_MOST_BYTES = 1 << 25
#: Seconds that :meth:`TrialRecords.close` waits for the handlers.
_PATIENCE_S = 5.0


class TrialRecords:
    """The log records of a session's trials, which are handled as if the script had made them."""

    def __init__(self) -> None:
        #: ``None`` ends the thread.
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._bytes = 0
        #: How many were dropped, counted by the session's thread; and of how many the log has told.
        self._dropped = self._told = 0
        self._thread: BackgroundThread | None = None

    def take(self, logged: LaneLogged) -> None:
        """Takes records in, in the session's thread; never waits."""
        self._dropped += logged.dropped
        for data in logged.records:
            if self._queue.qsize() >= _MOST_RECORDS or self._bytes > _MOST_BYTES:
                self._dropped += 1
                continue
            self._bytes += len(data)
            self._queue.put(data)
        if self._thread is None:
            self._thread = BackgroundThread("fluid-trial-logs", self._run)
            self._thread.start()

    def close(self) -> None:
        """Waits a few seconds until all records were handled; a handler that calls it does not wait for itself."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join(_PATIENCE_S)

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            self._bytes -= len(data)
            try:
                record = record_of(data)
                logging.getLogger(record.name).handle(record)
            except BaseException:  # A handler, or what was sent beside the record.
                _log.exception("a log record of a trial could not be handled")
            if self._queue.empty():
                self._tell_dropped()
        self._tell_dropped()

    def _tell_dropped(self) -> None:
        dropped = self._dropped - self._told
        self._told += dropped
        if not dropped:
            return
        _log.warning(
            "%d log records of trials were dropped: they came faster than they could be handled; "
            "the trials' output.log has all",
            dropped,
        )
