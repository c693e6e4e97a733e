"""Optuna's clock in a rehearsal: the start and end of trials that a storage writes are those of the virtual clock.

Only the thread that optimizes a rehearsed study sees it. A storage behind gRPC, whose server writes the times, has the
real ones.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import Any

from fluid._clock import wall_seconds
from fluid.integrations.session_time import SessionTime

#: Optuna's modules that write when a trial began and ended.
MODULES = ("optuna.storages._in_memory", "optuna.storages._rdb.storage", "optuna.storages.journal._storage")

_lock = threading.Lock()
#: The time of the study that each thread rehearses.
_times: dict[int, SessionTime] = {}
#: Modules that read virtual clocks now.
_changed: list[Any] = []


class StudyDatetime:
    """In place of the class ``datetime`` in Optuna's storages: virtual in threads that rehearse a study."""

    def now(self, tz: tzinfo | None = None) -> datetime:
        """Returns the time."""
        time = _times.get(threading.get_ident())
        return datetime.fromtimestamp(wall_seconds() if time is None else time.now(), tz)

    def __getattr__(self, name: str) -> Any:
        return getattr(datetime, name)


@contextmanager
def study_time(time: SessionTime) -> Iterator[None]:
    """Has storages write the time of a rehearsal, in this thread; that of a real session changes nothing."""
    if not time.is_virtual:
        yield
        return
    thread = threading.get_ident()
    with _lock:
        outer = _times.get(thread)  # Of a study whose callback optimizes another one.
        _times[thread] = time
        loaded = [sys.modules[name] for name in MODULES if name in sys.modules]
        for module in loaded:
            if getattr(module, "datetime", None) is datetime:
                module.datetime = StudyDatetime()  # type: ignore[attr-defined]
                _changed.append(module)
    try:
        yield
    finally:
        with _lock:
            if outer is None:
                del _times[thread]
            else:
                _times[thread] = outer
            while _changed and not _times:
                _changed.pop().datetime = datetime
