"""The wall-clock time of a session, which other libraries record: of a rehearsal, that of its virtual clock."""

from __future__ import annotations

import math
import threading
from weakref import WeakKeyDictionary

from fluid._clock import wall_seconds
from fluid.executor import FluidExecutor
from fluid.session.session import Session

_lock = threading.Lock()
#: When the clock of a rehearsal showed 0, seconds since 1970.
_epochs: WeakKeyDictionary[Session, float] = WeakKeyDictionary()


class SessionTime:
    """The time in a session.

    A rehearsal begins now, at a whole second: differences between its times are exact.

    Args:
        executor: the session's.
    """

    def __init__(self, executor: FluidExecutor) -> None:
        session = executor.session
        self._clock = session.clock
        self._epoch: float | None = None
        if session.hold.is_virtual:
            with _lock:
                self._epoch = _epochs.setdefault(session, float(math.floor(wall_seconds())))

    @property
    def is_virtual(self) -> bool:
        """Whether it is that of a rehearsal."""
        return self._epoch is not None

    def now(self) -> float:
        """Returns seconds since 1970."""
        return wall_seconds() if self._epoch is None else self._epoch + self._clock.now()
