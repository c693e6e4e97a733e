"""Waits of any number of threads for changes of something that a lock guards."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fluid._clock_hold import NO_HOLD, ClockHold, Place, VirtualClockHold
from fluid._waiting import wait_until


class ChangeWaits:
    """Threads that wait for a change. All methods are for a thread that holds the lock.

    Args:
        lock: guards what changes.
        hold: of the session's clock.
    """

    __slots__ = ("_changed", "_hold", "_lock", "_place", "_waiting")

    def __init__(self, lock: threading.Lock, hold: ClockHold = NO_HOLD) -> None:
        self._lock, self._hold, self._waiting = lock, hold, 0
        #: Only while threads wait: a session may have thousands of groups.
        self._changed: threading.Condition | None = None
        self._place = Place() if hold.is_virtual else None

    def wait_until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until a condition holds, for at most ``timeout`` seconds of the session's clock."""
        if self._changed is None:
            self._changed = threading.Condition(self._lock)
        self._waiting += 1
        try:
            if isinstance(self._hold, VirtualClockHold) and self._place is not None:
                return self._hold.wait_until(condition, self._place, timeout, unlocked=self._changed)
            return wait_until(condition, self._changed, timeout)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._changed = None

    def notify(self) -> None:
        """Wakes all threads that wait."""
        if self._place is not None:
            self._hold.wake(self._place)
        elif self._changed is not None:
            self._changed.notify_all()
