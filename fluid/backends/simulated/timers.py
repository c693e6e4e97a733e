"""What happens some virtual seconds after a command, beside the steps of trials."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timers:
    """Calls that are made at a virtual time, those of one instant in the order in which they were asked for."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    @property
    def next_at(self) -> float:
        """When the next call is due, seconds; infinite where none is."""
        return self._calls[0][0] if self._calls else float("inf")

    def at(self, instant: float, call: Callable[[], None]) -> None:
        """Has a call made at an instant, seconds."""
        heapq.heappush(self._calls, (instant, next(self._sequence), call))

    def fire(self, now: float) -> None:
        """Makes the calls that are due."""
        while self.next_at <= now:
            heapq.heappop(self._calls)[2]()
