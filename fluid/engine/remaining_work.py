"""The work that is left in all, kept up to date so that an arrival does not have to sum over every trial."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

from fluid.engine.open_jobs import OpenJobs
from fluid.engine.records import TrialRecord

#: Paths that are gone stay in the heap until there are as many of them as others, and so many more.
_SLACK = 64


class _PathLengths:
    """Seconds to the end of the critical path that begins with a trial, of one owner's trials with follow-ups."""

    def __init__(self) -> None:
        self._paths: dict[int, float] = {}
        #: Heap of (-seconds, row): all of those, and some that were removed or changed since.
        self._longest: list[tuple[float, int]] = []

    @property
    def longest(self) -> float:
        heap, paths = self._longest, self._paths
        while heap and paths.get(heap[0][1]) != -heap[0][0]:
            heapq.heappop(heap)
        return -heap[0][0] if heap else 0.0

    def set(self, row: int, seconds: float) -> None:
        self._paths[row] = seconds
        heapq.heappush(self._longest, (-seconds, row))
        if len(self._longest) > 2 * len(self._paths) + _SLACK:
            self._longest = [(-each, key) for key, each in self._paths.items()]
            heapq.heapify(self._longest)

    def forget(self, row: int) -> bool:
        """Returns whether none is left."""
        self._paths.pop(row, None)
        return not self._paths


class RemainingWork:
    """Seconds of work left of each trial that runs or waits, at width 1 and speed 1, as last predicted.

    Args:
        trials: the trials of the session, by row.
        jobs: is told the work of each job.
    """

    def __init__(self, trials: Mapping[int, TrialRecord], jobs: OpenJobs) -> None:
        self.by_row: dict[int, float] = {}
        self.jobs = jobs
        self._trials = trials
        self._total = 0.0
        #: by owner, of those of which a trial has follow-up iterations
        self._paths: dict[int, _PathLengths] = {}

    @property
    def total(self) -> float:
        """Seconds of all trials together."""
        return max(0.0, self._total)

    @property
    def has_paths(self) -> bool:
        """Whether any trial has follow-up iterations."""
        return bool(self._paths)

    def longest_path(self, owner: int) -> float:
        """Seconds to the end of an owner's longest critical path; 0 if none of its trials has follow-up iterations."""
        paths = self._paths.get(owner)
        return 0.0 if paths is None else paths.longest

    def set(self, row: int, seconds: float) -> None:
        """Sets the work that a trial has left."""
        before = self.by_row.get(row)
        if before is None:
            before = 0.0
            self.jobs.join(self._trials[row], seconds)
        elif seconds != before:
            self.jobs.change(self._trials[row], seconds - before)
        self._total += seconds - before
        self.by_row[row] = seconds

    def set_all(self, rows: Collection[int], seconds: float) -> None:
        """Sets the work that each of these trials of one job has left, which was the same for all."""
        first = next(iter(rows))
        before = self.by_row[first]
        self._total += (seconds - before) * len(rows)
        self.jobs.change(self._trials[first], seconds - before, len(rows))
        self.by_row.update(dict.fromkeys(rows, seconds))

    def set_path(self, row: int, seconds: float) -> None:
        """Sets the length of the critical path that begins with a trial."""
        self._paths.setdefault(self._trials[row].owner, _PathLengths()).set(row, seconds)

    def forget(self, row: int) -> None:
        """Removes a trial that neither runs nor waits any more."""
        trial = self._trials.get(row)
        if trial is None:
            return
        seconds = self.by_row.pop(row, None)
        if seconds is not None:
            self._total -= seconds
            self.jobs.leave(trial, seconds)
        if trial.owner in self._paths and self._paths[trial.owner].forget(row):
            del self._paths[trial.owner]
        if not self.by_row:
            self._total = 0.0  # rounding must not add up through a long session
            self.by_row.clear()  # An empty dict keeps the room that its members took.
