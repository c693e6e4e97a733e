"""The account of exploratory quanta: how many seconds of devices they took within the last hour, and how many they may.

A quantum cannot be interrupted, and how long it takes is not known before it has ended: it may begin while the account
is below what is allowed. One that takes more is paid back, as none begins until so much of it is an hour ago.
"""

from __future__ import annotations

import math
from collections import deque

#: The seconds over which quanta are counted: long enough for one of minutes, short enough for a person who waits.
WINDOW_S = 3600.0
#: Most of the devices' seconds within the window that quanta may have taken when another one begins: what they cost the
#: others is bounded by it, and on one device it is six minutes, a minute each for six checks in an hour.
MOST_SHARE = 0.1


class QuantumAccount:
    """The seconds that quanta took, and those that are under way take."""

    def __init__(self) -> None:
        #: When quanta ended, and how many seconds they took, by ascending end.
        self._ended: deque[tuple[float, float]] = deque()
        #: When those under way began, by their row.
        self._begun: dict[int, float] = {}

    def begin(self, row: int, now: float) -> None:
        """A trial has taken a device for its quantum."""
        self._begun[row] = now

    def end(self, row: int, now: float) -> None:
        """Its quantum is over."""
        self._ended.append((now, now - self._begun.pop(row)))

    def seconds(self, now: float) -> float:
        """Seconds of devices that quanta took within the window."""
        since = now - WINDOW_S
        while self._ended and self._ended[0][0] <= since:
            self._ended.popleft()
        ended = sum(min(seconds, at - since) for at, seconds in self._ended)
        return ended + sum(min(now - begun, WINDOW_S) for begun in self._begun.values())

    def free_at(self, now: float, devices: int) -> float:
        """From when on another quantum may begin, seconds; infinite while those under way alone take too much.

        Args:
            now: the time, seconds.
            devices: how many there are.
        """
        excess = self.seconds(now) - MOST_SHARE * WINDOW_S * devices
        if excess < 0.0:
            return now
        for end, seconds in self._ended:  # The oldest leave the window first, each from its begin on.
            counted = min(seconds, end - (now - WINDOW_S))
            if counted > excess:
                return end - counted + excess + WINDOW_S
            excess -= counted
        return math.inf
