"""Follows all runs below a folder, at a bounded cost: of a run that is unchanged a look costs a few system calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluid._clock import MonotonicClock
from fluid.directions import direction_text
from fluid.display.names import states_text
from fluid.reports.page.html import embedded
from fluid.reports.run.follower import Follower
from fluid.reports.tables.runs import name_of
from fluid.results.runs import RunSummaries, RunSummary, find_runs, size_on_disk

#: Seconds between two looks, at least, and the share of one core that they may take.
_LEAST_PAUSE, _SHARE = 2.0, 0.05


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


class IndexFollower(Follower[IndexState]):
    """Looks at the runs again and again, in a thread of its own, while a page is open.

    Args:
        home: the folder.

    Raises:
        InvalidFieldError: there is no such folder, or it may not be looked into.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._clock = MonotonicClock()
        self._summaries = RunSummaries()
        #: By folder: what was seen of a run when its size was found, and the size.
        self._sizes: dict[Path, tuple[RunSummary, int]] = {}
        super().__init__("fluid-view-runs", self._newer(IndexState(0, {}, {}, {}, {})), _LEAST_PAUSE, _SHARE)

    def _look(self) -> None:
        if (newer := self._newer(self._state)) is not self._state:
            self._publish(newer)

    def _newer(self, before: IndexState) -> IndexState:
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
