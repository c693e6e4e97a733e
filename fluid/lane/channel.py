"""A lane's end of its connection to the driver: sends in batches, and ends the lane with the driver."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from msgspec import structs

from fluid._clock import Clock
from fluid.engine.events import IterationDone
from fluid.lane.errors import print_exception
from fluid.lane.log_records import RecordOutbox
from fluid.lane.protocol import ToLane
from fluid.resources import MemoryNeed
from fluid.trainables.encoded_metrics import IterationRun
from fluid.waiting.waits import BackgroundThread
from fluid.wire import decoder, encode

_decode = decoder(ToLane)
#: Longest that a message waits for others to share its batch, seconds.
_OLDEST_S = 0.005
#: Most messages, or short iterations, of a batch: a driver that lags behind must not get larger ones.
_LARGEST_BATCH = 64
#: After this many checks without a pending message, the watcher sleeps until it is woken.
_IDLE_CHECKS = 20
#: Poll event for the other end having closed; a broken connection is reported in any case.
_HANGUP = getattr(select, "POLLRDHUP", 0)


class Connection(Protocol):
    """What a lane needs of :class:`fluid.processes.frames.FramedConnection`."""

    def send_bytes(self, buf: bytes, /) -> None:
        """Sends a whole message; blocks until the system has taken it."""
        ...

    def recv_bytes(self) -> bytes | bytearray:
        """Receives a whole message; raises ``EOFError`` at the end."""
        ...

    def fileno(self) -> int:
        """The file descriptor, to wait on."""
        ...

    def close(self) -> None:
        """Closes this end."""
        ...


class _PendingRun:
    """Short iterations of one trial, which wait to be told together: one message costs the driver the least."""

    __slots__ = ("_columns", "_done", "trial_id")

    def __init__(self, done: IterationDone) -> None:
        self.trial_id = done.trial_id
        self._done = done
        self._columns: tuple[list[Any], list[Any], list[Any]] = ([done.at], [done.seconds], [done.metrics])

    def add(self, done: IterationDone) -> None:
        """Adds the iteration that follows."""
        at, seconds, metrics = self._columns
        at.append(done.at)
        seconds.append(done.seconds)
        metrics.append(done.metrics)
        memory, busy = self._done.memory, self._done.busy
        if memory is not None and memory != done.memory:
            done = structs.replace(done, memory=MemoryNeed.most(*filter(None, (memory, done.memory))))
        self._done = done if busy is None or done.busy is not None else structs.replace(done, busy=busy)

    def message(self) -> IterationDone:
        """Returns what the driver is told."""
        if len(self._columns[0]) == 1:
            return self._done
        return structs.replace(self._done, run=IterationRun(*map(tuple, self._columns)))


class Channel:
    """Sends and receives messages in batches.

    A second thread, the watcher, sends pending messages while the main thread is busy in a trial, and calls
    ``on_hangup`` when the driver is gone.

    Args:
        connection: to the driver.
        clock: measures how long a message has been pending.
        on_hangup: called in the watcher's thread when the driver is gone; must end the process.

    Attributes:
        records: log records, which are sent in front of what is pending; ``None`` for none.
    """

    def __init__(self, connection: Connection, clock: Clock, on_hangup: Callable[[], None]) -> None:
        self._connection = connection
        self._clock = clock
        self._on_hangup = on_hangup
        self._readable = select.poll()
        self._readable.register(connection.fileno(), select.POLLIN)
        self._lock = threading.Lock()
        self._pending: list[Any] = []
        self.records: RecordOutbox | None = None
        #: The last of them, if it is a run of short iterations; how many iterations and other messages wait.
        self._run: _PendingRun | None = None
        self._waiting = 0
        #: When the oldest pending message came.
        self._since = 0.0
        self._wake_reader, self._wake_writer = os.pipe()
        #: Whether the watcher waits for a byte in the pipe, and not for a timeout.
        self._asleep = False
        #: Called with each message that the watcher reads; ``None`` while the main thread reads.
        self._preview: Callable[[Any], None] | None = None
        #: Messages that the watcher has read.
        self._ahead: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        # A sub-process of a trial must not keep the connection open after this process has died.
        os.register_at_fork(after_in_child=self._close_in_child)
        BackgroundThread("fluid-lane-watcher", self._watch, lambda error: on_hangup()).start()

    def send(self, message: Any, *, at_once: bool = True) -> None:
        """Sends a message; unless ``at_once``, it may wait a few milliseconds for others to share its batch."""
        with self._lock:
            self._run = None
            self._pending.append(message)
            self._send_if_due_locked(at_once=at_once)
        self.wake()

    def send_short(self, done: IterationDone) -> None:
        """Sends a short iteration, together with those of its trial that follow within a few milliseconds."""
        with self._lock:
            if self._run is not None and self._run.trial_id == done.trial_id:
                self._run.add(done)
            else:
                self._run = _PendingRun(done)
                self._pending.append(self._run)
            self._send_if_due_locked()
        self.wake()

    def _send_if_due_locked(self, *, at_once: bool = False) -> None:
        """Counts what was added to what is pending, and sends all if that is due."""
        if not self._waiting:
            self._since = self._clock.now()
        self._waiting += 1
        if at_once or self._waiting >= _LARGEST_BATCH or self._clock.now() - self._since > _OLDEST_S:
            self._flush_locked()

    def wake(self) -> None:
        """Wakes the watcher, which sends what stays pending for too long."""
        if self._asleep and self._has_pending:
            self._asleep = False
            os.write(self._wake_writer, b"x")

    @property
    def _has_pending(self) -> bool:
        return bool(self._pending or self.records)

    def flush(self) -> None:
        """Sends all pending messages."""
        if self._has_pending:
            with self._lock:
                self._flush_locked()

    def receive(self, *, timeout: float | None) -> list[Any]:
        """Returns the messages that have arrived as one batch; an empty list if none comes in time.

        Args:
            timeout: seconds to wait for a message; ``None`` for no end.

        Raises:
            EOFError, OSError: the driver is gone.
        """
        if timeout != 0.0:
            self.flush()
        if self._preview is not None:
            return self._read_so_far(timeout)
        if timeout is not None and not self._readable.poll(timeout * 1000.0):
            return []
        return _decode(self._connection.recv_bytes())

    def read_ahead(self, preview: Callable[[Any], None]) -> None:
        """Makes the watcher read messages from now on, so that they are seen while the main thread is busy.

        Args:
            preview: called with each message, in the watcher's thread, before :meth:`receive` returns it.
        """
        if self._preview is None:
            self._preview = preview
            os.write(self._wake_writer, b"x")

    def _read_so_far(self, timeout: float | None) -> list[Any]:
        messages: list[Any] = []
        with suppress(queue.Empty):
            if timeout != 0.0:
                messages += self._ahead.get(timeout=timeout)
            while True:
                messages += self._ahead.get_nowait()
        return messages

    def _read(self) -> None:
        assert self._preview is not None
        messages = _decode(self._connection.recv_bytes())
        for message in messages:
            self._preview(message)
        self._ahead.put(messages)

    def _flush_locked(self) -> None:
        logged = None if self.records is None else self.records.take()
        if self._pending or logged is not None:
            batch, self._pending, self._run, self._waiting = self._pending, [], None, 0
            batch = [each.message() if type(each) is _PendingRun else each for each in batch]
            self._connection.send_bytes(encode(batch if logged is None else [logged, *batch]))

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._connection.fileno(), _HANGUP)
        poller.register(self._wake_reader, select.POLLIN)
        idle = 0
        while True:
            idle = 0 if self._has_pending else idle + 1
            if idle > _IDLE_CHECKS:
                # Set before the second check: a message that comes in between is either seen here or wakes.
                self._asleep = True
                self._asleep = not self._has_pending
            if self._preview is not None:
                poller.modify(self._connection.fileno(), _HANGUP | select.POLLIN)
            for descriptor, happened in poller.poll(None if self._asleep else _OLDEST_S * 1000):
                if descriptor == self._wake_reader:
                    os.read(self._wake_reader, 4096)
                elif happened != select.POLLIN or not self._try_to_read():
                    self._on_hangup()
                    return
                idle = 0
            self._flush_if_old()

    def _try_to_read(self) -> bool:
        try:
            self._read()
        except (EOFError, OSError):
            return False
        except Exception:  # Else the main thread would wait for messages for ever, and outlive the driver.
            print_exception()
            return False
        return True

    def _flush_if_old(self) -> None:
        # If the lock is taken, the main thread is sending.
        if self._has_pending and self._lock.acquire(blocking=False):
            try:
                if self.records or (self._pending and self._clock.now() - self._since >= _OLDEST_S):
                    self._flush_locked()
            except OSError:
                self._on_hangup()
            finally:
                self._lock.release()

    def _close_in_child(self) -> None:
        with suppress(OSError):
            self._connection.close()
        for descriptor in (self._wake_reader, self._wake_writer):
            with suppress(OSError):
                os.close(descriptor)
