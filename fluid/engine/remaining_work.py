"""The work that is left in all, kept up to date so that an arrival does not have to sum over every trial."""

from __future__ import annotations

import heapq
from collections.abc import Collection

#: Paths that are gone stay in the heap until there are as many of them as others, and so many more.
_SLACK = 64


class RemainingWork:
    """Seconds of work left of each trial that runs or waits, at width 1 and speed 1, as last predicted."""

    def __init__(self) -> None:
        self.by_row: dict[int, float] = {}
        self._total = 0.0
        #: row -> seconds to the end of the critical path that begins with it, of trials with follow-up iterations.
        self._paths: dict[int, float] = {}
        #: Heap of (-seconds, row): all of those, and some that were removed or changed since.
        self._longest: list[tuple[float, int]] = []

    @property
    def total(self) -> float:
        """Seconds of all trials together."""
        return max(0.0, self._total)

    @property
    def longest_path(self) -> float:
        """Seconds to the end of the longest critical path; 0 if no trial has follow-up iterations."""
        heap, paths = self._longest, self._paths
        while heap and paths.get(heap[0][1]) != -heap[0][0]:
            heapq.heappop(heap)
        return -heap[0][0] if heap else 0.0

    def set(self, row: int, seconds: float) -> None:
        """Sets the work that a trial has left."""
        self._total += seconds - self.by_row.get(row, 0.0)
        self.by_row[row] = seconds

    def set_all(self, rows: Collection[int], seconds: float) -> None:
        """Sets the work that each of these trials has left, which was the same for all."""
        before = self.by_row[next(iter(rows))]
        self._total += (seconds - before) * len(rows)
        self.by_row.update(dict.fromkeys(rows, seconds))

    def set_path(self, row: int, seconds: float) -> None:
        """Sets the length of the critical path that begins with a trial."""
        self._paths[row] = seconds
        heapq.heappush(self._longest, (-seconds, row))
        if len(self._longest) > 2 * len(self._paths) + _SLACK:
            self._longest = [(-each, key) for key, each in self._paths.items()]
            heapq.heapify(self._longest)

    def forget(self, row: int) -> None:
        """Removes a trial that neither runs nor waits any more."""
        self._total -= self.by_row.pop(row, 0.0)
        self._paths.pop(row, None)
        if not self.by_row:
            self._total = 0.0  # rounding must not add up through a long session
