"""Follows run folders while their sessions go on: reads them anew when they have changed, at a bounded cost.

A reading costs more the longer the run is. So the time between two readings grows with the CPU time of the last one,
and nothing is read while no page is open.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fluid._clock import MonotonicClock, thread_seconds
from fluid.errors import FluidError
from fluid.report.html import embedded
from fluid.report.importance import by_metric
from fluid.report.loader import load_run
from fluid.report.page_data import Importances as MetricImportances
from fluid.report.page_data import page_data
from fluid.report.run import RecordedRun
from fluid.results.folder_files import JOURNAL, PROFILE, RESULTS, SESSION, TRIALS, is_locked

#: Seconds between two looks at the folders, at least.
_LEAST_PAUSE = 1.0
#: Shares of one core for reading and drawing up the page, and for importances.
_SHARE, _SHARE_OF_IMPORTANCES = 0.04, 0.01
#: Importances are computed anew when the number of iterations has grown by this factor.
_GROWTH = 1.25
#: Seconds to wait for a reading to end. It may take several, and what it finds is not needed.
_PATIENCE = 0.5
_FILES = (SESSION, TRIALS, JOURNAL, RESULTS, PROFILE)

#: Sizes and times of change of the files of all folders, and whether a session runs in each.
_Signature = tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class FollowedState:
    """The runs as they were read last.

    Attributes:
        version: how many readings there have been; it grows by one with each.
        runs: the runs.
        importances: the importances of the hyperparameters of each run, of this reading or an earlier one.
        data: what the page draws, as JSON on one line.
    """

    version: int
    runs: tuple[RecordedRun, ...]
    importances: tuple[MetricImportances, ...]
    data: str


class RunFollower:
    """Reads runs anew as their sessions go on, in a thread of its own.

    Args:
        paths: the run folders.

    Raises:
        InvalidFieldError: a path is not a run folder, or cannot be read; the message names the path.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = [Path(path).expanduser() for path in paths]
        self._clock = MonotonicClock()
        self._changed = threading.Condition()
        self._listeners = 0
        self._closed = False
        #: CPU seconds of the newest reading.
        self._cost = 0.0
        #: Iterations of the runs whose importances were computed, and when they may be computed anew.
        self._judged, self._next_judging = 0, 0.0
        self._seen = self._signature()
        self._snapshot = self._read(FollowedState(0, (), (), ""))
        self._thread = threading.Thread(target=self._follow, name="fluid-view", daemon=True)
        self._thread.start()

    @property
    def snapshot(self) -> FollowedState:
        """The newest snapshot."""
        return self._snapshot

    @property
    def is_closed(self) -> bool:
        """Whether the follower was closed."""
        return self._closed

    def next_after(self, version: int, timeout: float) -> FollowedState | None:
        """Waits for a snapshot that is newer than ``version``; ``None`` if there is none after ``timeout`` seconds.

        As long as a thread waits here, the folders are read.
        """
        with self._changed:
            self._listeners += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._closed or self._snapshot.version > version, timeout)
            finally:
                self._listeners -= 1
            return self._snapshot if self._snapshot.version > version else None

    def close(self) -> None:
        """Ends the following, and the waiting of all threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_PATIENCE)

    def _follow(self) -> None:
        while self._wait():
            seen, before = self._signature(), self._snapshot
            try:
                if seen != self._seen:
                    self._publish(self._read(before))
                    self._seen = seen
                elif self._may_judge():
                    self._publish(self._judge(before))
            except FluidError:
                continue  # The folder is being removed or replaced: the page keeps what it has.

    def _wait(self) -> bool:
        """Waits until the folders may be looked at once more; returns whether the follower goes on."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, max(_LEAST_PAUSE, self._cost / _SHARE))
            self._changed.wait_for(lambda: self._closed or self._listeners > 0)
            return not self._closed

    def _publish(self, snapshot: FollowedState) -> None:
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()

    def _signature(self) -> _Signature:
        found: list[tuple[object, ...]] = []
        for folder in self._paths:
            for name in _FILES:
                try:
                    facts = (folder / name).stat()
                except OSError:
                    found.append((name,))
                else:
                    found.append((name, facts.st_size, facts.st_mtime_ns, facts.st_ino))
            found.append((is_locked(folder),))
        return tuple(found)

    def _read(self, before: FollowedState) -> FollowedState:
        began = thread_seconds()
        snapshot = _drawn(before.version + 1, tuple(load_run(path) for path in self._paths), before.importances)
        self._cost = thread_seconds() - began
        return snapshot

    def _may_judge(self) -> bool:
        iterations = sum(run.iterations for run in self._snapshot.runs)
        ended = not any(map(is_locked, self._paths))
        grown = iterations > self._judged if ended else iterations > _GROWTH * self._judged
        return grown and self._clock.now() >= self._next_judging

    def _judge(self, before: FollowedState) -> FollowedState:
        began = thread_seconds()
        importances = tuple(by_metric(run) for run in before.runs)
        self._judged = sum(run.iterations for run in before.runs)
        self._next_judging = self._clock.now() + (thread_seconds() - began) / _SHARE_OF_IMPORTANCES
        return _drawn(before.version + 1, before.runs, importances)


def _drawn(version: int, runs: tuple[RecordedRun, ...], importances: tuple[MetricImportances, ...]) -> FollowedState:
    return FollowedState(version, runs, importances, embedded(page_data(runs, importances=importances, live=True)))
