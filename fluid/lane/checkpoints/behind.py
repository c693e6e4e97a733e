"""A thread of a lane that writes checkpoints while the trials go on, one after another."""

from __future__ import annotations

import queue
from collections.abc import Callable

from fluid.waiting.waits import BackgroundThread


class WritesBehind:
    """The thread, which begins with the first checkpoint, and what it has to write."""

    def __init__(self) -> None:
        self._writes: queue.Queue[Callable[[], None]] = queue.Queue()
        self._thread: BackgroundThread | None = None

    def add(self, write: Callable[[], None]) -> None:
        """Has the thread make a call after those that were added before."""
        self._writes.put(write)
        if self._thread is None:
            self._thread = BackgroundThread("fluid-lane-writer", self._work)
            self._thread.start()

    def wait(self) -> None:
        """Waits until all calls have returned."""
        self._writes.join()

    def _work(self) -> None:
        while True:
            write = self._writes.get()
            try:
                write()
            finally:
                del write  # It holds what it has written.
                self._writes.task_done()
