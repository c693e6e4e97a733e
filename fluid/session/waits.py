"""Waits for what a session does.

A thread that waits may be interrupted at any point: Ctrl-C and signal handlers raise wherever the main thread is. So no
lock is shared between a thread that waits and the session's. Each wait has a lock of its own, which the session's
thread only ever releases. An interrupt ends the wait, and nothing else.
"""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from functools import partial
from types import CoroutineType
from typing import Any, TypeVar

from fluid._clock import MonotonicClock
from fluid._logs import logger_of
from fluid.errors import FluidError
from fluid.waiting.clock_hold import NO_HOLD, ClockHold, Place, VirtualClockHold
from fluid.waiting.waits import LOOK_UP_S

# -- guard ---------------------------------------------------------------------------------------
#
# The one door through which the session's thread calls code of users: listeners, callbacks, groups of their class.
#
# Such code may raise anything, also what ends a program (``SystemExit``, ``KeyboardInterrupt``). The session's thread
# goes on in any case: an error that left it would end the trials of all groups.


T = TypeVar("T")
_log = logger_of("fluid.session")


def guarded(whose: str, call: Callable[..., T], *facts: Any) -> T | None:
    """Calls a user's code; what it raises is logged, and ends nothing.

    Args:
        whose: names the code in the log.
        call: the code.
        facts: its arguments.

    Returns:
        What it returns; ``None`` where it raised, or returned a coroutine, which the session does not run.
    """
    try:
        found = call(*facts)
        if not isinstance(found, CoroutineType):
            return found
        found.close()
    except BaseException:
        _log.exception("%s raised", whose)
    return None


# -- waits ---------------------------------------------------------------------------------------


#: Seconds after which a lock of a future counts as lost: a thread was interrupted as it took it.
_LOST_S = 1.0
#: Seconds after which close() says what it waits for, and after which it gives up. Checkpoints of other machines may
#: take two minutes to come.
_TELL_S, _LIMIT_S = 15.0, 300.0
#: The sessions of this process by their threads. Each thread writes its own entry.
_by_thread: dict[int, SessionWaits] = {}
#: Held by sessions' threads alone, while one looks whether it may wait for another session.
_chain = threading.Lock()


def in_a_sessions_thread() -> bool:
    """Whether the calling thread is that of a session of this process."""
    return threading.get_ident() in _by_thread


class _WouldWaitForItselfError(FluidError):
    """A session's thread would wait for itself."""


class SessionWaits:
    """Who waits for a session, and for what.

    Args:
        hold: of the session's clock.
        gone: makes the error for those who would wait for a thread that has ended, as in a forked process.
        over: says why no trial will run any more; ``None`` while trials may.
    """

    def __init__(
        self,
        hold: ClockHold = NO_HOLD,
        gone: Callable[[], FluidError] = lambda: FluidError("the session has ended"),
        over: Callable[[], FluidError | None] = lambda: None,
    ) -> None:
        self.hold = hold
        self.over = over
        self.gone = gone
        #: The lock of each wait for a change, what changes, and what of it is awaited. Each is held but for the moment
        #: from its release until its thread has seen it. There are few threads, and may be very many groups.
        self.signals: dict[threading.Lock, tuple[ChangeWaits, str]] = {}
        #: Calls of trials' methods that were not answered: number -> the group's inbox, the method and the caller's
        #: future. Any thread adds one, and drops its own.
        self.calls: dict[int, tuple[object, str, Future[Any]]] = {}
        self.call_ids = itertools.count()
        self._thread: threading.Thread | None = None
        #: The session that this one's thread waits for, as a listener may use other executors.
        self._waits_for: SessionWaits | None = None

    def begin(self) -> None:
        """The calling thread is the session's from now on."""
        self._thread = threading.current_thread()
        _by_thread[threading.get_ident()] = self

    def end(self) -> None:
        """The session's thread is about to end."""
        _by_thread.pop(threading.get_ident(), None)

    @property
    def is_in_thread(self) -> bool:
        """Whether the session's thread asks."""
        return self._thread is threading.current_thread()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """While the calling thread waits for the session.

        Raises:
            FluidError: it is the session's own, or that of a session which this one waits for: the wait never ended.
        """
        mine = _by_thread.get(threading.get_ident())
        if mine is None:
            yield
            return
        with _chain:
            other: SessionWaits | None = self
            while other is not None and other is not mine:
                other = other._waits_for
            if other is mine:
                text = f"a listener cannot wait for {what}: the session's thread, which calls it, would wait for itself"
                raise _WouldWaitForItselfError(f"{text}; decide by what it is told, or wait in another thread")
            before, mine._waits_for = mine._waits_for, self
        try:
            yield
        finally:
            mine._waits_for = before

    def await_end(self) -> None:
        """Waits until the session's thread has ended, unless that waits for the calling one.

        Raises:
            FluidError: it has not ended in time.
        """
        thread = self._thread
        try:
            with self.waiting("its end"):
                waited = 0.0
                while thread is not None and thread.is_alive():
                    thread.join(LOOK_UP_S)
                    waited += LOOK_UP_S
                    if waited == _TELL_S:
                        _log.warning("close() waits for the thread %s, which is at\n%s", thread.name, _stack_of(thread))
                    if waited >= _LIMIT_S and thread.is_alive():
                        where = f"it is at\n{_stack_of(thread)}"
                        raise FluidError(f"{thread.name} has not ended within {_LIMIT_S:g} s: {where}")
        except _WouldWaitForItselfError:
            return

    def require_thread(self) -> None:
        """Refuses to wait for what the session's thread cannot do any more.

        Raises:
            FluidError: the session's thread is gone.
        """
        if self._thread is not None and not self._thread.is_alive():
            raise self.gone()


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "its end"


class ChangeWaits:
    """What the session's thread writes, and other threads wait for.

    Args:
        waits: of the session.
    """

    __slots__ = ("_place", "_waits")

    def __init__(self, waits: SessionWaits) -> None:
        self._waits = waits
        self._place = Place() if waits.hold.is_virtual else None

    def wait_until(self, what: str, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until a condition holds, for at most ``timeout`` seconds of the session's clock.

        Args:
            what: is awaited, also for errors.
            condition: looks at what the session's thread writes before it calls :meth:`notify`; under no lock.
            timeout: ``None`` for no limit.

        Raises:
            FluidError: the session's thread would wait for itself, or is gone.
        """
        if condition():
            return True
        if timeout == 0.0 and self._waits.is_in_thread:
            return False
        with self._waits.waiting(what):
            hold = self._waits.hold
            if isinstance(hold, VirtualClockHold) and self._place is not None:
                ended = hold.wait_until(condition, self._place, timeout)
                if not ended and timeout is None:  # As the session is over, and has told all who waited.
                    raise self._waits.gone()
                return ended
            return self._wait(what, condition, timeout)

    def _wait(self, what: str, condition: Callable[[], bool], timeout: float | None) -> bool:
        clock = MonotonicClock()
        deadline = None if timeout is None else clock.now() + timeout
        signal = threading.Lock()
        signal.acquire()
        try:
            self._waits.signals[signal] = self, what
            while not condition():
                left = LOOK_UP_S if deadline is None else min(LOOK_UP_S, deadline - clock.now())
                if left <= 0.0:
                    return False
                # Short waits, so that the main thread hears signals: see fluid.waiting.waits.
                if not signal.acquire(timeout=left) and not condition():
                    self._waits.require_thread()
            return True
        finally:
            self._waits.signals.pop(signal, None)

    def notify(self, what: str) -> None:
        """Wakes all threads that wait for that."""
        if self._place is not None:
            self._waits.hold.wake(self._place)
        for signal, (change, awaited) in self._waits.signals.copy().items() if self._waits.signals else ():
            if change is self and awaited == what:
                with suppress(RuntimeError):  # Its thread has not seen the last release yet.
                    signal.release()


class SessionFuture(Future[Any]):
    """A future of something that the session does. It cannot be cancelled.

    Callbacks that raise, whatever it is, harm neither the session nor each other.

    Args:
        waits: of the session.
        what: is awaited, for errors.
    """

    def __init__(self, waits: SessionWaits, what: str = "an answer of its session") -> None:
        super().__init__()
        self._waits = waits
        self._changes = ChangeWaits(waits)
        self._what = what
        self.set_running_or_notify_cancel()
        super().add_done_callback(lambda _: self._changes.notify(what))

    def result(self, timeout: float | None = None) -> Any:
        self._await(timeout)
        return super().result(0.0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await(timeout)
        return super().exception(0.0)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        super().add_done_callback(partial(self._call, fn))

    def set_result(self, result: Any) -> None:
        self._find_lost_lock()
        with suppress(InvalidStateError):  # A user has set it.
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self._find_lost_lock()
        with suppress(InvalidStateError):
            super().set_exception(exception)

    def _await(self, timeout: float | None) -> None:
        # Its own lock is not taken before it is done: the session's thread takes it, too.
        if not self._changes.wait_until(self._what, lambda: self._state == "FINISHED", timeout):
            raise FutureTimeoutError

    def _call(self, fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
        if in_a_sessions_thread():
            guarded("a callback of a future", fn, future)
        else:
            fn(future)

    def _find_lost_lock(self) -> None:
        if self._condition.acquire(timeout=_LOST_S):
            self._condition.release()
        else:
            self._condition = threading.Condition()
