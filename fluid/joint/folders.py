"""Where a shared folder's members write, for those who read what is in it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fluid.joint.entries import Ended, Iterated, Joined, Started, read_entry
from fluid.joint.log import LOG, LogError, SharedLog
from fluid.joint.membership import MEMBERS
from fluid.joint.state import JointState

#: The file of a run folder that has a line for each iteration.
_RESULTS = "results.jsonl"
#: Most members that reports name.
_MOST_NAMED = 12


def is_shared(folder: Path) -> bool:
    """Whether several drivers share a folder, or may."""
    return (folder / LOG).is_dir() and (folder / MEMBERS).is_dir()


def fullest(shared: Path) -> Path | None:
    """The run folder of the member that has written most; each writes what all have run. ``None`` if there is none."""
    sizes = {folder: _size(folder / _RESULTS) for folder in member_folders(shared)}
    known = {folder: size for folder, size in sizes.items() if size is not None}
    return max(known, key=lambda folder: (known[folder], folder.name), default=None)


def beside(run_dir: Path) -> Sequence[Path]:
    """The run folders in which files of a run's trials may be: its own, and those of the drivers that share it."""
    shared = run_dir.parent.parent
    if run_dir.parent.name != MEMBERS or not is_shared(shared):
        return [run_dir]
    return [run_dir, *(folder for folder in member_folders(shared) if folder != run_dir)]


def member_folders(shared: Path) -> list[Path]:
    """The run folders of the drivers that share a folder."""
    try:
        return sorted(Path(entry) for entry in os.scandir(shared / MEMBERS) if entry.is_dir())
    except OSError:
        return []


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


# -- members for people --------------------------------------------------------------------------


class MemberFacts(NamedTuple):
    """What a member did.

    Attributes:
        name: its name.
        joined: what it said of itself.
        gone: why it takes part no more; empty while it does.
        trials, iterations: that it has run, so that they count.
    """

    name: str
    joined: Joined
    gone: str
    trials: int
    iterations: int


class MembersReader:
    """Reads what the members of a shared folder did, by its log; each reading takes the entries that are new.

    Args:
        shared: the folder.
    """

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        self._log = SharedLog(shared, "reader", make=False)
        self._state = JointState()
        self._iterations = Counter[str]()
        self._trials: dict[str, set[str]] = {}

    def read(self) -> list[MemberFacts]:
        """The members, in the order in which they joined.

        Raises:
            LogError: the log is damaged.
        """
        for number, content in self._log.read() if is_shared(self._shared) else ():
            try:
                writer, items = read_entry(content)
            except ValueError as error:
                raise LogError(f"entry {number} of the log in {self._shared} cannot be read: {error}") from error
            for item in items:
                for fact in self._state.apply(number, writer, item):
                    if isinstance(fact, (Started, Iterated, Ended)):
                        self._trials.setdefault(writer, set()).add(fact.trial_id)
                    if isinstance(fact, Iterated):
                        self._iterations[writer] += len(fact.metrics)
        return [
            MemberFacts(name, one.joined, one.gone, len(self._trials.get(name, ())), self._iterations[name])
            for name, one in self._state.members.items()
        ]

    def notes(self) -> list[str]:
        """What each member did, in a sentence for reports."""
        try:
            found = self.read()
        except (LogError, OSError) as error:
            return [f"The shared folder's log cannot be read: {error}."]
        told = [
            f"{one.name}: {one.iterations:,} iterations of {one.trials:,} trials{f' ({one.gone})' if one.gone else ''}"
            for one in found[:_MOST_NAMED]
        ]
        more = len(found) - len(told)
        told += [f"and {more} more"] if more > 0 else []
        return [f"Drivers: {'; '.join(told)}.", *self._state.notes] if told else []
