"""Names of sweeps: no two groups of a session have one, as it is part of their trials' ids."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from fluid.session.session import Session


class _TakenNames:
    """Names that are taken in a session: of groups, and of sweeps that have not submitted theirs yet."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        #: Groups whose names were looked at, and the first number that may be free behind each name.
        self._seen = 0
        self._next: dict[str, int] = {}

    def take(self, name: str, session: Session) -> str:
        inboxes = session.inboxes
        self._taken.update(inbox.group.name for inbox in inboxes[self._seen :])
        self._seen = len(inboxes)
        chosen = name
        while chosen in self._taken:
            number = self._next.get(name, 2)
            chosen, self._next[name] = f"{name}-{number}", number + 1
        self._taken.add(chosen)
        return chosen


class SweepNames:
    """Gives each sweep a name of its own. Thread-safe: threads may share an executor."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of_session: WeakKeyDictionary[Session, _TakenNames] = WeakKeyDictionary()

    def new(self, name: str, session: Session) -> str:
        """A name that no group of the session has: the name itself, or with a number behind it."""
        with self._lock:
            return self._of_session.setdefault(session, _TakenNames()).take(name, session)
