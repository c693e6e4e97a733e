"""How much is left to do, kept up to date so that an arrival need not ask every trial."""

from __future__ import annotations


class Work:
    """Seconds of work left of each trial that runs or waits, at width 1 and speed 1, as last predicted."""

    def __init__(self) -> None:
        self.by_row: dict[int, float] = {}
        self._total = 0.0

    @property
    def total(self) -> float:
        """Seconds in all."""
        return max(0.0, self._total)

    def note(self, row: int, seconds: float) -> None:
        """Notes what a trial has left."""
        self._total += seconds - self.by_row.get(row, 0.0)
        self.by_row[row] = seconds

    def forget(self, row: int) -> None:
        """Notes that a trial neither runs nor waits any more."""
        self._total -= self.by_row.pop(row, 0.0)
        if not self.by_row:
            self._total = 0.0  # rounding must not add up through a long session
