"""Follows all runs below a folder, at a bounded cost: of a run that is unchanged a look costs a few system calls."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluid._clock import MonotonicClock
from fluid.directions import direction_text
from fluid.display.names import states_text
from fluid.errors import FluidError
from fluid.reports.page.html import embedded
from fluid.reports.tables.runs import name_of
from fluid.results.runs import RunSummaries, RunSummary, find_runs, size_on_disk
from fluid.waiting.waits import BackgroundThread

#: Seconds between two looks, at least, and the share of one core that they may take.
_LEAST_PAUSE, _SHARE = 2.0, 0.05
#: Seconds to wait for a look to end.
_PATIENCE = 0.5


@dataclass(frozen=True)
class IndexState:
    """The runs as they were seen last.

    Attributes:
        version: how many looks have found something new.
        paths: the folder of each run, by its id.
        rows: what the page shows of each, by id.
        changed: the version at which each row came or changed.
        gone: the version at which a run was found to be gone, by id.
    """

    version: int
    paths: Mapping[str, Path]
    rows: Mapping[str, dict[str, Any]]
    changed: Mapping[str, int]
    gone: Mapping[str, int]

    def after(self, version: int) -> tuple[str, ...]:
        """What brings a page at a version up to this one, as JSON."""
        return (embedded(self.since(version)),)

    def since(self, version: int) -> dict[str, Any]:
        """The same, as data."""
        return {
            "rows": [row for name, row in self.rows.items() if self.changed[name] > version],
            "gone": [name for name, at in self.gone.items() if at > version],
        }


class IndexFollower:
    """Looks at the runs again and again, in a thread of its own, while a page is open.

    Args:
        home: the folder.

    Raises:
        InvalidFieldError: there is no such folder, or it may not be looked into.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._clock = MonotonicClock()
        self._changed = threading.Condition()
        self._listeners = 0
        self._closed = self._at_once = False
        self._summaries = RunSummaries()
        #: By folder: what was seen of a run when its size was found, and the size.
        self._sizes: dict[Path, tuple[RunSummary, int]] = {}
        self._cost = 0.0
        self._state = self._look(IndexState(0, {}, {}, {}, {}))
        self._thread = BackgroundThread("fluid-view-runs", self._follow)
        self._thread.start()

    @property
    def state(self) -> IndexState:
        """The runs as they were seen last."""
        return self._state

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def next_after(self, version: int, timeout: float) -> IndexState | None:
        """Waits for a state that is newer than ``version``; ``None`` if there is none after ``timeout`` seconds."""
        with self._changed:
            self._listeners += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._closed or self._state.version > version, timeout)
            finally:
                self._listeners -= 1
            return self._state if self._state.version > version else None

    def look_soon(self) -> None:
        """Has it look at once."""
        with self._changed:
            self._at_once = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the following, and the waiting of all threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_PATIENCE)

    def _follow(self) -> None:
        while self._wait():
            try:
                newer = self._look(self._state)
            except FluidError:
                continue  # The folder is gone for now: the page keeps what it has.
            with self._changed:
                self._state = newer
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Waits until the folder may be looked at once more; returns whether the follower goes on."""
        with self._changed:
            pause = max(_LEAST_PAUSE, self._cost / _SHARE)
            self._changed.wait_for(lambda: self._closed or self._at_once, pause)
            self._changed.wait_for(lambda: self._closed or self._at_once or self._listeners > 0)
            self._at_once = False
            return not self._closed

    def _look(self, before: IndexState) -> IndexState:
        began = self._clock.now()
        paths = {_id_of(path): path for path in find_runs(self._home).runs}
        rows = {name: self._row(name, path) for name, path in paths.items()}
        new = [name for name, row in rows.items() if before.rows.get(name) != row]
        gone = [name for name in before.rows if name not in rows]
        for name in gone:
            self._summaries.forget(before.paths[name])
            self._sizes.pop(before.paths[name], None)
        self._cost = self._clock.now() - began
        if not new and not gone:
            return before
        version = before.version + 1
        kept = {name: at for name, at in before.changed.items() if name in rows}
        left = {name: at for name, at in before.gone.items() if name not in rows}
        changed, all_gone = {**kept, **dict.fromkeys(new, version)}, {**left, **dict.fromkeys(gone, version)}
        return IndexState(version, paths, rows, changed, all_gone)

    def _row(self, name: str, path: Path) -> dict[str, Any]:
        run = self._summaries.of(path)
        best = run.best
        return {
            "id": name,
            "run": name_of(run, self._home),
            "name": run.name,
            "state": run.state,
            "why": run.why,
            "metric": None if best is None else best.metric,
            "mode": None if best is None else best.mode,
            "direction": "" if best is None else direction_text(best.mode),
            "value": None if best is None else best.value,
            "trials": sum(run.trials.values()),
            "states": states_text(run.trials),
            "failed": run.trials.get("FAILED", 0),
            "began": run.began,
            "seconds": None if run.state == "running" else run.seconds,
            "bytes": self._size_of(run),
        }

    def _size_of(self, run: RunSummary) -> int:
        known = self._sizes.get(run.path)
        if known is None or known[0] is not run:
            known = self._sizes[run.path] = run, size_on_disk(run.path)
        return known[1]


def _id_of(path: Path) -> str:
    """A name for a run in addresses, which tells nothing of its path."""
    return hashlib.blake2b(str(path).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
