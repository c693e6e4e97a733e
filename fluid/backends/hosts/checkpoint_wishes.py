"""Which checkpoints the engine wants in a host's memory: a wish for which there is no room yet is tried again."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from fluid.engine.commands import CheckpointValue

#: Seconds after which a wish without room is tried again in any case.
_LOOK_S = 2.0
#: So many of them, the oldest, are tried again at once: each looks through what is in memory.
_TRIED_AGAIN = 4


class Wanted(NamedTuple):
    """A checkpoint that is to come into memory.

    Attributes:
        trial: name of its trial's folder.
        path: where it was written.
        source: where the server of the machine that has it listens; ``None`` for this machine.
    """

    trial: str
    path: str
    source: tuple[str, int] | None


class CheckpointWishes:
    """The wishes of one host, at most one of a trial; its methods may be called in any thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        #: By trial, the oldest first; and the trials of those that are to be tried now.
        self._wanted: dict[str, Wanted] = {}
        self._due: set[str] = set()
        self._closed = False

    def add(self, wanted: Wanted) -> None:
        """Adds a wish, instead of an earlier one of that trial."""
        with self._condition:
            self._wanted.pop(wanted.trial, None)
            self._wanted[wanted.trial] = wanted
            self._due.add(wanted.trial)
            self._condition.notify_all()

    def drop(self, trial: str, wanted: Wanted | None = None) -> None:
        """Drops the wish of a trial, if there is one; if one is given, only that."""
        with self._condition:
            if wanted is None or self._wanted.get(trial) is wanted:
                self._wanted.pop(trial, None)
                self._due.discard(trial)

    def revalue(self, values: Mapping[str, CheckpointValue]) -> None:
        """Takes what is worth something else now, by trial: what is not pinned has started, or is not about to."""
        for trial, value in values.items():
            if not value.pinned:
                self.drop(trial)
        self.try_again()

    def try_again(self) -> None:
        """Has those without room tried again: there may be some now."""
        with self._condition:
            if self._wanted:
                self._due.update(islice(self._wanted, _TRIED_AGAIN))
                self._condition.notify_all()

    def next(self) -> Wanted | None:
        """Waits for a wish that is to be tried, which stays until it is dropped; ``None`` once they are closed."""
        with self._condition:
            while not self._closed:
                for trial, wanted in self._wanted.items():
                    if trial in self._due:
                        self._due.discard(trial)
                        return wanted
                if not self._condition.wait(_LOOK_S if self._wanted else None):
                    self._due.update(islice(self._wanted, _TRIED_AGAIN))
            return None

    def close(self) -> None:
        """Ends what waits."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
