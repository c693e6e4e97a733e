"""Work of several threads, done one piece after another by whichever of them is free."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class SerialWork:
    """Does pieces of work in the order in which they came, never two at a time, and never waits for a lock.

    Nothing is done before :meth:`start`.

    A thread that comes while another one works leaves its work to that one. So a thread may call the session while it
    works, although the session's thread brings work too.

    Example:
        >>> from fluid.sweeping.serial import SerialWork
        >>> work = SerialWork()
        >>> work.add(lambda: print("second"))
        >>> work.do()
        >>> work.start(lambda: print("first"))
        first
        second
    """

    def __init__(self) -> None:
        self._pieces: deque[Callable[[], None]] = deque()
        self._busy = threading.Lock()
        self._busy.acquire()

    def start(self, piece: Callable[[], None]) -> None:
        """Does the first piece of work, before those that were added already; then these."""
        try:
            piece()
        finally:
            self._busy.release()
        self.do()

    def add(self, piece: Callable[[], None]) -> None:
        """Adds a piece of work."""
        self._pieces.append(piece)

    def do(self) -> None:
        """Does all work there is, unless another thread is at it."""
        # Checked again after the release: work that came just before it was left to this thread.
        while self._pieces and self._busy.acquire(blocking=False):
            try:
                while self._pieces:
                    self._pieces.popleft()()
            finally:
                self._busy.release()
