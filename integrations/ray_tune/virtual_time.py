"""Tune's clocks in a rehearsal: while a rehearsed sweep runs, Tune reads the virtual clock of its session.

So time budgets, :class:`ray.tune.stopper.TimeoutStopper`, the start times of trials and the times that Tune prints are
those of the sweep that is rehearsed. Only the thread that runs a rehearsed sweep sees them, and only in the modules of
Tune listed here; a stopper or callback of the user's that calls ``time.time()`` reads the real time.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from fluid._clock import Clock, MonotonicClock, nap, wall_seconds
from fluid.executor import FluidExecutor
from fluid.session.session import Session
from fluid.waiting.clock_hold import Place, VirtualClockHold

#: Modules of Tune that tell the time with ``time.time()`` of a sweep, not of their own work.
MODULES = (
    "ray.tune.execution.tune_controller",
    "ray.tune.experiment.trial",
    "ray.tune.experimental.output",
    "ray.tune.progress_reporter",
    "ray.tune.stopper.timeout",
    "ray.tune.tune",
)
#: Functions of theirs that look at the time only to do something seldom enough, on the real clock.
SELDOM = frozenset({"log_result", "print_heartbeat", "should_report"})

_REAL = sys.modules["time"]

_lock = threading.RLock()
#: When the clock of a session showed 0, seconds since 1970.
_epochs: WeakKeyDictionary[Session, float] = WeakKeyDictionary()
#: Sweeps that are rehearsed now, by thread.
_sweeps: dict[int, SweepTime] = {}
#: What the modules had, while they read virtual clocks.
_before: dict[Any, Any] = {}


class SweepTime:
    """The time in a sweep that is rehearsed.

    Args:
        executor: runs the sweep.
    """

    def __init__(self, executor: FluidExecutor) -> None:
        self._session = executor.session
        self._epoch = epoch_of(executor) or 0.0

    def time(self) -> float:
        """Seconds since 1970."""
        return self._epoch + self._session.clock.now()

    def sleep(self, seconds: float) -> None:
        """Waits on the session's clock."""
        hold = self._session.hold
        if isinstance(hold, VirtualClockHold):
            hold.wait_until(lambda: False, Place(), seconds)


class TuneTime:
    """In place of the module :mod:`time` in Tune's: virtual in threads that run a rehearsed sweep."""

    def time(self) -> float:
        """Seconds since 1970."""
        sweep = _sweeps.get(threading.get_ident())
        if sweep is None or sys._getframe(1).f_code.co_name in SELDOM:
            return wall_seconds()
        return sweep.time()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        sweep = _sweeps.get(threading.get_ident())
        if sweep is None:
            nap(seconds)
        else:
            sweep.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(_REAL, name)


@contextmanager
def tune_time(executor: FluidExecutor) -> Iterator[None]:
    """Has Tune read the session's clock, in this thread, where the executor rehearses; on a real one does nothing."""
    hold = executor.session.hold
    if not isinstance(hold, VirtualClockHold):
        yield
        return
    thread = threading.get_ident()
    with _lock:
        if not _before:
            _put_in_place()
        outer = _sweeps.get(thread)
        _sweeps[thread] = SweepTime(executor)
    try:
        with hold.keep():  # The controller waits for the processes of its loggers, too.
            yield
    finally:
        with _lock:
            if outer is None:
                del _sweeps[thread]
            else:
                _sweeps[thread] = outer
            if not _sweeps:
                for module, before in _before.items():
                    module.time = before
                _before.clear()


def is_rehearsed(executor: FluidExecutor) -> bool:
    """Whether the sweeps of an executor are rehearsed."""
    return executor.session.hold.is_virtual


def epoch_of(executor: FluidExecutor) -> float | None:
    """When a rehearsal's clock showed 0, as whole seconds since 1970; ``None`` on a real clock."""
    if not is_rehearsed(executor):
        return None
    with _lock:
        return _epochs.setdefault(executor.session, float(int(wall_seconds())))


def clock_of(executor: FluidExecutor) -> Clock:
    """The clock by which the driver of a sweep measures how long it gathers things: a virtual one stands still then."""
    return executor.session.clock if is_rehearsed(executor) else MonotonicClock()


def _put_in_place() -> None:
    shim = TuneTime()
    for module in [importlib.import_module(name) for name in MODULES]:  # If one is missing, none is changed.
        if getattr(module, "time", None) is _REAL:
            _before[module] = module.time
            module.time = shim  # type: ignore[attr-defined]
