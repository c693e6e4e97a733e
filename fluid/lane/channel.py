"""A lane's end of its connection to the driver: batched sending, and dying with the driver."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from fluid._clock import Clock
from fluid.lane.messages import decode, encode

#: A message waits no longer than this for others to be sent with.
_OLDEST_S = 0.005
#: Nor does it wait for more than this many: a driver that is behind must not fall further behind.
_LARGEST_BATCH = 64
#: After this many looks that found nothing to send, the watcher sleeps until it is woken.
_IDLE_LOOKS = 20
#: Poll for the other end having closed; that the whole connection broke is told in any case.
_HANGUP = getattr(select, "POLLRDHUP", 0)


class Connection(Protocol):
    """What a lane needs of ``multiprocessing.connection.Connection``; a socket or pipe lies below."""

    def send_bytes(self, buf: bytes, /) -> None:
        """Sends a whole message; blocks until the system has taken it."""
        ...

    def recv_bytes(self) -> bytes:
        """Receives a whole message; raises ``EOFError`` at the end."""
        ...

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        ...

    def close(self) -> None:
        """Closes this end."""
        ...


class Channel:
    """Sends in batches and receives.

    A thread watches the connection. It sends what has waited too long, while the main thread is busy in a
    trial, and calls ``on_hangup`` when the driver is gone, which the main thread may be too busy to notice.

    Args:
        connection: to the driver.
        clock: tells how long a message has waited.
        on_hangup: called in the watcher's thread; must end the process.
    """

    def __init__(self, connection: Connection, clock: Clock, on_hangup: Callable[[], None]) -> None:
        self._connection = connection
        self._clock = clock
        self._on_hangup = on_hangup
        self._readable = select.poll()
        self._readable.register(connection.fileno(), select.POLLIN)
        self._lock = threading.Lock()
        self._pending: list[Any] = []
        #: When the oldest pending message was put there.
        self._since = 0.0
        self._wake_reader, self._wake_writer = os.pipe()
        #: Whether the watcher waits for a byte in the pipe, and not for time to pass.
        self._asleep = False
        #: Told of each message that the watcher reads, where it does.
        self._overhear: Callable[[Any], None] | None = None
        #: What it has read.
        self._ahead: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        # A sub-process of a trial must not keep the connection open after this process has died.
        os.register_at_fork(after_in_child=self._close_in_child)
        threading.Thread(target=self._watch, name="fluid-lane-watcher", daemon=True).start()

    def send(self, message: Any, *, at_once: bool = True) -> None:
        """Sends a message, or, unless ``at_once``, keeps it a few milliseconds for others to join it."""
        with self._lock:
            if not self._pending:
                self._since = self._clock.now()
            self._pending.append(message)
            if at_once or len(self._pending) >= _LARGEST_BATCH or self._clock.now() - self._since > _OLDEST_S:
                self._flush_locked()
                return
        if self._asleep:
            self._asleep = False
            os.write(self._wake_writer, b"x")

    def flush(self) -> None:
        """Sends whatever is kept."""
        if self._pending:
            with self._lock:
                self._flush_locked()

    def receive(self, *, block: bool) -> list[Any]:
        """Returns the messages that arrived as one batch; an empty list if none did and ``block`` is not set.

        Raises:
            EOFError, OSError: the driver is gone.
        """
        if block:
            self.flush()
        if self._overhear is not None:
            return self._read_so_far(block)
        if not block and not self._readable.poll(0):
            return []
        return decode(self._connection.recv_bytes())

    def read_ahead(self, preview: Callable[[Any], None]) -> None:
        """Has the watcher read messages from now on, also while the main thread is busy.

        Args:
            overhear: called with each, in the watcher's thread, before :meth:`receive` returns it.
        """
        if self._overhear is None:
            self._overhear = preview
            os.write(self._wake_writer, b"x")

    def _read_so_far(self, block: bool) -> list[Any]:
        messages = self._ahead.get() if block else []
        with suppress(queue.Empty):
            while True:
                messages += self._ahead.get_nowait()
        return messages

    def _read(self) -> None:
        assert self._overhear is not None
        messages = decode(self._connection.recv_bytes())
        for message in messages:
            self._overhear(message)
        self._ahead.put(messages)

    def _flush_locked(self) -> None:
        if self._pending:
            batch, self._pending = self._pending, []
            self._connection.send_bytes(encode(batch))

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._connection.fileno(), _HANGUP)
        poller.register(self._wake_reader, select.POLLIN)
        idle = 0
        while True:
            idle = 0 if self._pending else idle + 1
            if idle > _IDLE_LOOKS:
                # Set before looking again: a message that comes in between is either seen here or wakes.
                self._asleep = True
                self._asleep = not self._pending
            if self._overhear is not None:
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
        return True

    def _flush_if_old(self) -> None:
        # If the lock is taken, the main thread is sending: nothing to do.
        if self._pending and self._lock.acquire(blocking=False):
            try:
                if self._pending and self._clock.now() - self._since >= _OLDEST_S:
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
