"""How much is left to do, kept up to date so that an arrival need not ask every trial."""

from __future__ import annotations


class RemainingWork:
    """Seconds of work left of each trial that runs or waits, at width 1 and speed 1, as last predicted."""

    def __init__(self) -> None:
        self.by_row: dict[int, float] = {}
        self._total = 0.0
        #: row -> seconds to the end of the longest path that begins with it, of those that lead to more.
        self._paths: dict[int, float] = {}

    @property
    def total(self) -> float:
        """Seconds in all."""
        return max(0.0, self._total)

    @property
    def longest_path(self) -> float:
        """Seconds from now to the end of what the trials lead to, one after the other; 0 if none leads to more."""
        return max(self._paths.values(), default=0.0)

    def note_path(self, row: int, seconds: float) -> None:
        """Notes what a trial and all that follows from it take, when it is queued."""
        self._paths[row] = seconds

    def note(self, row: int, seconds: float) -> None:
        """Notes what a trial has left."""
        self._total += seconds - self.by_row.get(row, 0.0)
        self.by_row[row] = seconds

    def forget(self, row: int) -> None:
        """Notes that a trial neither runs nor waits any more."""
        self._total -= self.by_row.pop(row, 0.0)
        self._paths.pop(row, None)
        if not self.by_row:
            self._total = 0.0  # rounding must not add up through a long session
