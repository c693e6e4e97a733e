"""The work that is left in all, kept up to date so that an arrival does not have to sum over every trial."""

from __future__ import annotations


class RemainingWork:
    """Seconds of work left of each trial that runs or waits, at width 1 and speed 1, as last predicted."""

    def __init__(self) -> None:
        self.by_row: dict[int, float] = {}
        self._total = 0.0
        #: row -> seconds to the end of the critical path that begins with it, of trials with follow-up iterations.
        self._paths: dict[int, float] = {}

    @property
    def total(self) -> float:
        """Seconds of all trials together."""
        return max(0.0, self._total)

    @property
    def longest_path(self) -> float:
        """Seconds to the end of the longest critical path; 0 if no trial has follow-up iterations."""
        return max(self._paths.values(), default=0.0)

    def set(self, row: int, seconds: float) -> None:
        """Sets the work that a trial has left."""
        self._total += seconds - self.by_row.get(row, 0.0)
        self.by_row[row] = seconds

    def set_path(self, row: int, seconds: float) -> None:
        """Sets the length of the critical path that begins with a trial."""
        self._paths[row] = seconds

    def forget(self, row: int) -> None:
        """Removes a trial that neither runs nor waits any more."""
        self._total -= self.by_row.pop(row, 0.0)
        self._paths.pop(row, None)
        if not self.by_row:
            self._total = 0.0  # rounding must not add up through a long session
