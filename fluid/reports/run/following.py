"""Follows run folders while their sessions go on, at a bounded cost.

What is new in the folders is read on, and told to pages as a patch. What depends on the whole run, such as the
timeline, is drawn anew at a slower pace: it costs more the longer the run is. Each time to the next reading grows with
the CPU time of the last one, and nothing is read while no page is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fluid._clock import MonotonicClock, thread_seconds
from fluid.reports.analysis.importance import by_metric
from fluid.reports.page.data import Importances as MetricImportances
from fluid.reports.page.html import embedded
from fluid.reports.page.patch import PageDrawer
from fluid.reports.run.follower import Follower
from fluid.reports.run.loader import RunReader
from fluid.reports.run.run import RecordedRun
from fluid.results.run_files import JOURNAL, PROFILE, RESULTS, SESSION, TRIALS, is_locked

#: Seconds between two looks at the folders, at least.
_LEAST_PAUSE = 1.0
#: Shares of one core for reading on, for drawing all anew, and for importances.
_SHARE, _SHARE_OF_DRAWING, _SHARE_OF_IMPORTANCES = 0.025, 0.02, 0.005
#: Importances are computed anew when the number of iterations has grown by this factor.
_GROWTH = 1.25
_FILES = (SESSION, TRIALS, JOURNAL, RESULTS, PROFILE)

#: Sizes and times of change of the files of all folders, and whether a session runs in each.
_Signature = tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class FollowedState:
    """The runs as they were read last.

    Attributes:
        drawn: the version at which all was drawn last.
        runs: the runs.
        importances: the importances of the hyperparameters of each run, of this reading or an earlier one.
        data: what the page drew at that version, as JSON on one line.
        patches: what has changed since, each with what a version added.
    """

    drawn: int
    runs: tuple[RecordedRun, ...]
    importances: tuple[MetricImportances, ...]
    data: str
    patches: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """How many readings there have been; it grows by one with each."""
        return self.drawn + len(self.patches)

    def after(self, version: int) -> tuple[str, ...]:
        """What brings a page at a version up to this one: patches, or all of the data and those that follow."""
        if self.drawn <= version <= self.version:
            return self.patches[version - self.drawn :]
        return (self.data, *self.patches)


class RunFollower(Follower[FollowedState]):
    """Reads runs anew as their sessions go on, in a thread of its own.

    Args:
        paths: the run folders.
        price: US dollars for a device-hour; ``None`` for the sessions' own.

    Raises:
        InvalidFieldError: a path is not a run folder, or cannot be read; the message names the path.
    """

    def __init__(self, paths: Sequence[str | Path], price: float | None = None) -> None:
        self._paths = [Path(path).expanduser() for path in paths]
        self._clock = MonotonicClock()
        self._readers = [RunReader(path, price) for path in self._paths]
        self._drawer = PageDrawer()
        #: When all may be drawn anew.
        self._next_drawing = 0.0
        #: Iterations of the runs whose importances were computed, and when they may be computed anew.
        self._judged = 0
        self._next_judging = 0.0
        self._seen = self._signature()
        super().__init__("fluid-view", self._draw(FollowedState(0, (), (), "")), _LEAST_PAUSE, _SHARE)

    def _look(self) -> None:
        seen, before = self._signature(), self._state
        if seen != self._seen or before.patches:
            newer = self._draw(before) if self._may_draw() else None
            if newer is None and seen != self._seen:
                newer = self._read_on(before)
            if newer is not None:
                self._publish(newer)
                self._seen = seen
        if self._may_judge():
            self._publish(self._judge(self._state))

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

    def _read_on(self, before: FollowedState) -> FollowedState | None:
        """What is new since; ``None`` if all is to be drawn anew."""
        began = thread_seconds()
        found = [reader.read_on() for reader in self._readers]
        runs = tuple(run for run in found if run is not None)
        patch = self._drawer.patch(runs) if len(runs) == len(found) and not self._has_ended(before, runs) else None
        newer = None if patch is None else replace(before, runs=runs, patches=(*before.patches, embedded(patch)))
        self._cost = thread_seconds() - began
        return newer

    def _has_ended(self, before: FollowedState, runs: Sequence[RecordedRun]) -> bool:
        """Whether a session has ended since: its page is drawn for the last time."""
        ended = any(one.is_running and not other.is_running for one, other in zip(before.runs, runs, strict=True))
        if ended:
            self._next_drawing = 0.0
        return ended

    def _may_draw(self) -> bool:
        return self._clock.now() >= self._next_drawing

    def _draw(self, before: FollowedState) -> FollowedState:
        began = thread_seconds()
        runs = tuple(reader.read() for reader in self._readers)
        data = embedded(self._drawer.draw(runs, before.importances))
        cost = thread_seconds() - began
        self._next_drawing = self._clock.now() + cost / _SHARE_OF_DRAWING
        return FollowedState(before.version + 1, runs, before.importances, data)

    def _may_judge(self) -> bool:
        iterations = sum(run.iterations for run in self._state.runs)
        ended = not any(map(is_locked, self._paths))
        grown = iterations > self._judged if ended else iterations > _GROWTH * self._judged
        return grown and self._clock.now() >= self._next_judging

    def _judge(self, before: FollowedState) -> FollowedState:
        began = thread_seconds()
        importances = tuple(by_metric(run) for run in before.runs)
        self._judged = sum(run.iterations for run in before.runs)
        self._next_judging = self._clock.now() + (thread_seconds() - began) / _SHARE_OF_IMPORTANCES
        patch = embedded(self._drawer.judged(importances))
        return replace(before, importances=importances, patches=(*before.patches, patch))
