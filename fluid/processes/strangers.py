"""Processes that connect and have not shown that they may: they hold nothing that those need which may.

Any process that reaches a port can connect to it, and say nothing. So connections without a proof are few and short:
where there are too many the oldest one is closed, not the next one refused.
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from fluid._clock import MonotonicClock
from fluid._logs import logger_of

_log = logger_of(__name__)

#: Most at a time by default: hosts open the connections of their lanes all at once.
MOST_CONNECTIONS = 1024
#: Most as a share of the descriptors that this process may have open: one in so many.
_SHARE = 4
T = TypeVar("T")


class Strangers(Generic[T]):
    """The connections to a service that have not shown yet that they may use it; for any thread.

    Args:
        service: what they have connected to, for the log: ``"the port for lanes"``.
        turn_away: closes one.
        seconds: that each has.
        most: how many there may be; fewer where this process may have few descriptors.
    """

    def __init__(
        self, service: str, turn_away: Callable[[T], None], seconds: float, most: int = MOST_CONNECTIONS
    ) -> None:
        self._service = service
        self._most = most
        self._turn_away = turn_away
        self._seconds = seconds
        self._clock = MonotonicClock()
        self._lock = threading.Lock()
        #: Until when each has time; the oldest comes first.
        self._deadlines: dict[T, float] = {}
        self._is_told = False

    def __contains__(self, stranger: object) -> bool:
        return stranger in self._deadlines

    def __iter__(self) -> Iterator[T]:
        """Iterates over those that there are."""
        return iter(list(self._deadlines))

    def add(self, stranger: T) -> None:
        """Adds a new one; closes the oldest if there are too many."""
        with self._lock:
            self._deadlines[stranger] = self._clock.now() + self._seconds
            excess = len(self._deadlines) - min(self._most, max(1, _descriptor_limit() // _SHARE))
        for _ in range(excess):
            self.turn_oldest_away()

    def remove(self, stranger: T) -> bool:
        """Takes one out that has shown that it may, or has gone; returns whether it was there."""
        with self._lock:
            return self._deadlines.pop(stranger, None) is not None

    def turn_late_away(self) -> None:
        """Closes those whose time is over."""
        now = self._clock.now()
        while (deadline := next(iter(self._deadlines.values()), None)) is not None and deadline < now:
            self.turn_oldest_away()

    def turn_oldest_away(self) -> bool:
        """Closes the oldest; returns whether there was one."""
        with self._lock:
            oldest = next(iter(self._deadlines), None)
        return oldest is not None and self.refuse(oldest)

    def refuse(self, stranger: T) -> bool:
        """Closes one; tells of the first of them. Returns whether it was there."""
        if not self.remove(stranger):
            return False
        self._turn_away(stranger)
        if not self._is_told:
            self._is_told = True
            text = "closed a connection to %s that did not show that it may use it; further ones are not logged"
            _log.warning(text, self._service)
        return True


def _descriptor_limit() -> int:
    """Returns how many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
