"""All runs below a folder, each in short, at a small cost: what ``fluid runs`` and the index page show.

As a session ends, ``session.json`` says how its trials stand and what the best value is (:func:`closing_facts`), so
nothing else is read of its run. Of one that runs, that was killed, or that an older Fluid wrote, all is read. A folder
that is damaged or may not be read is told of, and is no error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fluid._clock import wall_seconds
from fluid.errors import FluidError, InvalidFieldError
from fluid.joint.folders import fullest, is_shared, member_folders
from fluid.keeping import finite_number
from fluid.results.best import BestTracker
from fluid.results.metrics import Goal
from fluid.results.run_files import (
    JOURNAL,
    RESULTS,
    SESSION,
    TRIALS,
    amount_in,
    facts_in,
    is_locked,
    why_unreadable,
)
from fluid.results.stored_run import StoredRun, read_run
from fluid.results.submitted import UNFINISHED, UNKNOWN, SubmittedGroup
from fluid.trainables.encoded_metrics import numbers_in
from fluid.trialgroup import PAUSED_BY_USER, TrialState

#: How a run may stand: it runs; all its trials have ended; it was ended before that; it was killed; it has no trials;
#: its files are damaged; they may not be read, or are of a newer Fluid.
STATES = ("running", "done", "unfinished", "interrupted", "empty", "damaged", "unreadable")
#: What ``session.json`` says in short of a session that has ended.
CLOSING = "summary"
#: Files of which one at least is in each run folder.
_MARKS = (SESSION, RESULTS, JOURNAL, TRIALS)
#: Folders within one another in which runs are looked for.
_DEEPEST = 3
#: States of trials that have not ended as their session has.
_OPEN = frozenset((UNFINISHED, UNKNOWN, PAUSED_BY_USER))


class BestValue(NamedTuple):
    """The best value in a run.

    Attributes:
        metric: of which it is.
        mode: ``"min"`` or ``"max"``.
        value: the value.
        trial: the trial that has reported it.
    """

    metric: str
    mode: str
    value: float
    trial: str

    @property
    def goal(self) -> Goal:
        """What it is the best by."""
        return Goal(self.metric, self.mode == "min")


class GroupStanding(NamedTuple):
    """How a group of a run stands.

    Attributes:
        name: its name.
        states: how many of its trials are in each state.
        best: its best value; ``None`` if there is none.
    """

    name: str
    states: Mapping[str, int]
    best: BestValue | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in short.

    Attributes:
        path: its folder.
        name: of its sweep; of the folder, if it has none or several.
        state: one of :data:`STATES`.
        why: why it is damaged or unreadable; else empty.
        began: when it began, in seconds since 1970; ``None`` if unknown.
        seconds: from its begin to its end, or until now; on the virtual clock, of a rehearsal; ``None`` if unknown.
        trials: how many there are in each state.
        best: the best value; ``None`` if there is none.
    """

    path: Path
    name: str
    state: str
    why: str = ""
    began: float | None = None
    seconds: float | None = None
    trials: Mapping[str, int]
    best: BestValue | None = None


class FoundRuns(NamedTuple):
    """What is below a folder.

    Attributes:
        runs: the run folders.
        others: folders without a run.
    """

    runs: tuple[Path, ...]
    others: tuple[Path, ...]


def closing_facts(groups: Iterable[GroupStanding]) -> dict[str, Any]:
    """What ``session.json`` says in short of a session that has ended."""
    listed = list(groups)
    states: Counter[str] = Counter()
    for group in listed:
        states.update(group.states)
    best = best_of_groups(group.best for group in listed)
    name = listed[0].name if len(listed) == 1 else ""
    return {CLOSING: {"name": name, "trials": dict(states), "best": None if best is None else best._asdict()}}


def best_of_groups(found: Iterable[BestValue | None]) -> BestValue | None:
    """The best value of several groups: of the metric of the last one that has any, as they may have several."""
    values = [best for best in found if best is not None]
    same = [best for best in values if best.goal == values[-1].goal]
    return min(same, key=lambda best: best.value if best.goal.less else -best.value, default=None)


# -- one run -----------------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Whether it is a run folder, or one that several drivers share; what has a pipe for a file is none.

    Raises:
        OSError: it may not be looked into.
    """
    with os.scandir(folder) as entries:
        marks = [entry.is_file() or entry.is_symlink() for entry in entries if entry.name in _MARKS]
    return all(marks) if marks else is_shared(folder)


def summarize(folder: Path) -> RunSummary:
    """Says in short how a run stands; never an error."""
    return RunSummaries().of(folder)


class RunSummaries:
    """Says in short how runs stand, again and again: what has not changed is not read anew."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, RunSummary]] = {}
        #: Runs of which all files are read, and read on.
        self._read: dict[Path, StoredRun] = {}

    def of(self, folder: Path) -> RunSummary:
        """How a run stands now."""
        try:
            inner = (fullest(folder) or folder) if is_shared(folder) else folder
            runs = any(map(is_locked, member_folders(folder) if inner != folder else [folder]))
            seen = (inner, runs, *(_stamp(inner / name) for name in _MARKS))
            known = self._known.get(folder)
            if known is None or known[0] != seen:
                known = self._known[folder] = seen, self._summary(folder, inner, runs)
            found = known[1]
            if runs and found.began is not None and found.seconds is not None:
                return replace(found, seconds=max(0.0, wall_seconds() - found.began))
            return found
        except PermissionError:
            return _nothing(folder, "unreadable", "it may not be read")
        except InvalidFieldError as error:
            return _nothing(folder, "damaged", error.reason)
        except (FluidError, OSError, ValueError, OverflowError, TypeError, KeyError, AttributeError) as error:
            return _nothing(folder, "damaged", str(error))

    def forget(self, folder: Path) -> None:
        """Drops what is known of a run that is gone."""
        self._known.pop(folder, None)
        self._read.pop(folder, None)

    def _summary(self, folder: Path, inner: Path, runs: bool) -> RunSummary:
        facts, why = _facts(inner)
        if why:
            return _nothing(folder, "unreadable", why)
        began, seconds = _times(inner, facts, runs)
        summary = facts.get(CLOSING)
        if runs or not isinstance(summary, Mapping):
            standings, why = self._standings(folder, inner)
            summary = {**closing_facts(standings)[CLOSING], "why": "" if runs else why}
        trials = {str(state): int(number) for state, number in dict(summary.get("trials") or {}).items()}
        best = _best_in(summary.get("best"))
        why = str(summary.get("why") or "")
        is_closed = "closed" in facts
        if runs:
            state = "running"
        elif why:
            state = "damaged"
        elif not trials:
            state = "empty"
        elif _OPEN.isdisjoint(trials):
            state = "done"
        else:
            state = "unfinished" if is_closed else "interrupted"
        name = str(summary.get("name") or folder.name)
        return RunSummary(
            path=folder, name=name, state=state, why=why, began=began, seconds=seconds, trials=trials, best=best
        )

    def _standings(self, folder: Path, inner: Path) -> tuple[list[GroupStanding], str]:
        """How the groups of a run stand, by all its files; and what is damaged, or nothing."""
        stored = self._read.pop(folder, None)
        if stored is None or stored.path != inner:
            stored = read_run(folder)
        else:
            stored.refresh()
        standings = [_standing(stored, group) for group in stored.groups]
        if stored.is_running:
            self._read[folder] = stored
        return standings, " ".join(stored.notes[:1])


def _standing(stored: StoredRun, group: SubmittedGroup) -> GroupStanding:
    tracker, states = BestTracker(group.search), Counter[str]()
    for parts in group.trials.values():
        states[parts[-1].state] += 1
        for part in parts:
            tracker.enter(part)
            for one in stored.of_trial.get(part.trial_id, ()):
                tracker.hear(part, one.number, numbers_in(one.metrics))
            if part.state == TrialState.FAILED:
                tracker.end(part.trial_id, TrialState.FAILED)
    best = tracker.best()
    found = None if best is None else BestValue(best.metric, best.mode, best.value, best.trial_id)
    return GroupStanding(group.name, states, found)


def _facts(inner: Path) -> tuple[dict[str, Any], str]:
    """What ``session.json`` says, and why the run cannot be read; of a damaged file, it says nothing."""
    try:
        content = facts_in((inner / SESSION).read_bytes()) or {}
    except FileNotFoundError:
        return {}, ""
    return content, why_unreadable(content) or ""


def _times(inner: Path, facts: Mapping[str, Any], runs: bool) -> tuple[float | None, float | None]:
    """When the run began, in seconds since 1970, and how many seconds it took so far."""
    began = None
    with suppress(ValueError, OverflowError, OSError):
        began = datetime.fromisoformat(str(facts.get("began"))).timestamp()
    clock = facts.get("clock")
    clock = clock if isinstance(clock, Mapping) else {}
    at, wall, closed = finite_number(clock.get("at")), finite_number(clock.get("wall")), amount_in(facts, "closed")
    if began is not None and wall is not None and 0.0 <= wall - began < 1.0:
        began = wall  # The same to a fraction of a second, so that runs of one second have an order.
    if at is not None and closed is not None and not clock.get("name"):
        return began, max(0.0, closed - at)  # A virtual clock, which ran on its own.
    if began is None:
        with suppress(OSError):
            began = min(file.stat().st_mtime for file in (inner / name for name in _MARKS) if file.exists())
    if began is None or (runs and wall is None):
        return began, None
    if runs:
        return began, max(0.0, wall_seconds() - began)
    if at is not None and wall is not None and closed is not None:
        return began, max(0.0, wall + closed - at - began)
    last = [stamp[1] / 1e9 for name in (RESULTS, JOURNAL) if (stamp := _stamp(inner / name)) is not None]
    return began, max(0.0, max(last) - began) if last else None


def _best_in(found: object) -> BestValue | None:
    if not isinstance(found, Mapping):
        return None
    value, mode = finite_number(found.get("value")), found.get("mode")
    if value is None or mode not in ("min", "max"):
        return None
    return BestValue(str(found.get("metric")), str(mode), value, str(found.get("trial")))


def _nothing(folder: Path, state: str, why: str) -> RunSummary:
    began = None
    with suppress(OSError):
        began = folder.stat().st_mtime
    return RunSummary(path=folder, name=folder.name, state=state, why=why, began=began, trials={})


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def size_on_disk(folder: Path) -> int:
    """Bytes that a folder takes on the disk, as far as it may be looked into; a file with several names counts once."""
    total, seen, left = 0, set[tuple[int, int]](), [os.fspath(folder)]
    while left:
        try:
            entries = list(os.scandir(left.pop()))
        except OSError:
            continue
        for entry in entries:
            with suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if found.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                    if (found.st_dev, found.st_ino) in seen:
                        continue
                    seen.add((found.st_dev, found.st_ino))
                total += found.st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
    return total


# -- all runs ----------------------------------------------------------------------------------------------------------


def find_runs(folder: Path) -> FoundRuns:
    """The run folders below a folder, or that folder itself if it is one. Hidden folders are left out.

    Raises:
        InvalidFieldError: there is no such folder, or it may not be looked into.
    """
    if not folder.is_dir():
        reason = "is a file; give a folder" if folder.exists() else "does not exist"
        raise InvalidFieldError("dir", str(folder), reason)
    try:
        if is_run(folder):
            return FoundRuns((folder,), ())
        runs: list[Path] = []
        others = [child for child in _children(folder) if not _collect(child, runs, _DEEPEST - 1)]
    except OSError as error:
        raise InvalidFieldError("dir", str(folder), f"cannot be read: {error.strerror}") from error
    return FoundRuns(tuple(runs), tuple(others))


def _collect(folder: Path, runs: list[Path], deeper: int) -> bool:
    """Adds the runs in a folder; returns whether there are any, or it may not be looked into, which is told of it."""
    try:
        if is_run(folder):
            runs.append(folder)
            return True
        children = list(_children(folder)) if deeper and not folder.is_symlink() else []
    except OSError:
        runs.append(folder)
        return True
    found = [_collect(child, runs, deeper - 1) for child in children]
    return any(found)


def _children(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in sorted(found, key=lambda entry: entry.name):
        with suppress(OSError):  # A link that leads in a circle.
            if entry.is_dir():
                yield folder / entry.name


def newest_first(runs: Iterable[RunSummary]) -> list[RunSummary]:
    """Runs by when they began, the newest first."""
    return sorted(runs, key=lambda run: (-(run.began or 0.0), str(run.path)))


def newest_run(home: Path) -> Path:
    """The run below a folder that began last, of those that can be read.

    Raises:
        InvalidFieldError: there is none.
    """
    try:
        found = find_runs(home).runs
    except InvalidFieldError:
        found = ()
    began = sorted(((_began(folder), folder) for folder in found), reverse=True)
    for _, folder in began:
        with suppress(FluidError, OSError):
            read_run(folder)
            return folder
    raise InvalidFieldError("run", None, f"is not given, and there is no run in {home}: name the folder of one")


def _began(folder: Path) -> float:
    try:
        inner = (fullest(folder) or folder) if is_shared(folder) else folder
        began, _ = _times(inner, _facts(inner)[0], runs=False)
        return began or 0.0
    except OSError:
        return 0.0
