"""Deadlines: the times at which parts of the engine want to be woken by an Alarm. Without a clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable

#: Removed deadlines stay in the heap until their time, or until there are as many of them as others, and so many more.
_SLACK = 64


class Deadlines:
    """One deadline per key, of whatever part of the engine; the type of the key says whose it is."""

    def __init__(self) -> None:
        self._at: dict[Hashable, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._numbers = itertools.count()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._at

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: Hashable, at: float) -> None:
        """Sets the deadline of a key, in place of an earlier one; ``at`` in seconds on the clock of the events."""
        number = next(self._numbers)
        self._at[key] = at, number
        heapq.heappush(self._heap, (at, number, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(at, number, key) for key, (at, number) in self._at.items()]
            heapq.heapify(self._heap)

    def clear(self, key: Hashable) -> None:
        """Removes the deadline of a key, if it has one."""
        self._at.pop(key, None)

    @property
    def earliest(self) -> float | None:
        """The earliest deadline, seconds; ``None`` if there is none."""
        heap = self._heap
        while heap:
            at, number, key = heap[0]
            if self._at.get(key) == (at, number):
                return at
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> list[Hashable]:
        """Removes and returns the keys whose deadline has come, the earliest first."""
        due: list[Hashable] = []
        while (at := self.earliest) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            due.append(key)
        return due
