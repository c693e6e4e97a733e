"""Who holds a virtual clock: the threads that submit to a session and may still act at this instant.

A real clock goes on while a searcher thinks. A virtual one must not: it stands still until each of these threads waits
for the session again. So a rehearsal takes no account of how fast this machine is, and the same seed gives the same
sweep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fluid._clock import Clock, MonotonicClock, thread_state
from fluid._waiting import LOOK_UP_S

#: Seconds for which all threads that hold the clock sleep and use no processor until it is let go: they wait for
#: something else than the session, such as another thread.
_ASLEEP_S = 0.25
_LOOK_S = 0.02


class Place:
    """Where threads wait for something that the session does, such as a group's results.

    Attributes:
        waits: of the threads that wait there.
        was_woken: whether something was done since a thread last looked.
    """

    __slots__ = ("waits", "was_woken")

    def __init__(self) -> None:
        self.waits: list[_ClockWait] = []
        self.was_woken = False


class ClockHold:
    """That of a real clock, which goes on in any case. No method does anything."""

    is_virtual = False

    def take(self) -> None:
        """The calling thread has asked the session for something, and acts at this instant."""

    def wake(self, place: Place) -> None:
        """Something was done for which threads may wait at a place: these act at this instant."""

    def let_go(self) -> None:
        """The session ends: no thread holds the clock from now on."""

    def future(self) -> Future[Any]:
        """Returns a future of something that the session does: to wait for it is to wait for the session."""
        return Future()


class VirtualClockHold(ClockHold):
    """That of a virtual clock.

    Args:
        clock: the virtual clock.
    """

    is_virtual = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Threads that act at this instant, by their identifier.
        self._acting: set[int] = set()
        #: Those that wait, in order.
        self._waits: dict[_ClockWait, None] = {}
        self._is_over = False
        self._nudged = False

    # -- the threads that submit ---------------------------------------------------------------------------

    def take(self) -> None:
        with self._lock:
            if not self._is_over:
                self._acting.add(threading.get_ident())

    def wake(self, place: Place) -> None:
        with self._lock:
            if not place.waits:
                place.was_woken = True
            for wait in tuple(place.waits):
                self._end(wait)

    def let_go(self) -> None:
        with self._lock:
            self._is_over = True
            self._acting.clear()
            for wait in tuple(self._waits):
                self._end(wait)
            self._changed.notify_all()

    def future(self) -> Future[Any]:
        return _HeldFuture(self)

    def wait_until(
        self,
        condition: Callable[[], bool],
        place: Place,
        timeout: float | None = None,
        *,
        polls: bool = False,
        unlocked: threading.Condition | None = None,
    ) -> bool:
        """Waits until a condition holds; returns whether it does.

        Args:
            condition: of what the session does; changes are told by :meth:`wake` of the place.
            place: where to wait.
            timeout: most virtual seconds; ``None`` for no limit.
            polls: whether the wait also ends where nothing is left to happen on the virtual clock.
            unlocked: held by the caller while the condition is evaluated, and not while it waits.
        """
        deadline = float("inf") if timeout is None else self._clock.now() + timeout
        while not condition():
            if self._is_over:
                return False
            wait = self._begin(place, deadline, polls)
            if wait is None:
                continue
            if unlocked is not None:
                unlocked.release()
            try:
                while not wait.signal.acquire(timeout=LOOK_UP_S):
                    pass
            finally:
                self._leave(wait)
                if unlocked is not None:
                    unlocked.acquire()
            if wait.is_expired:
                return condition()
        return True

    def _begin(self, place: Place, deadline: float, polls: bool) -> _ClockWait | None:
        with self._lock:
            if place.was_woken:
                place.was_woken = False
                return None
            wait = _ClockWait(threading.get_ident(), place, deadline, polls)
            place.waits.append(wait)
            self._waits[wait] = None
            self._acting.discard(wait.thread)
            self._changed.notify_all()
            return wait

    def _leave(self, wait: _ClockWait) -> None:
        """Ends a wait that an exception has ended, such as that of Ctrl-C."""
        with self._lock:
            if wait in self._waits:
                self._end(wait)

    def _end(self, wait: _ClockWait) -> None:
        wait.place.waits.remove(wait)
        del self._waits[wait]
        if not self._is_over:
            self._acting.add(wait.thread)
        wait.signal.release()

    # -- the thread that moves the clock -------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """When the first wait ends by its timeout; infinite if none does."""
        with self._lock:
            return min((wait.deadline for wait in self._waits), default=float("inf"))

    def nudge(self) -> None:
        """Makes :meth:`await_free`, the call in progress or else the next, return; from any thread."""
        with self._lock:
            self._nudged = True
            self._changed.notify_all()

    def await_free(self) -> bool:
        """Waits until no thread holds the clock, or for :meth:`nudge`; returns whether none does."""
        sleepers = _Sleepers()
        with self._lock:
            while self._acting and not self._nudged:
                if sleepers.have_slept(self._acting):
                    self._acting.clear()
                else:
                    self._changed.wait(_LOOK_S)
            nudged, self._nudged = self._nudged, False
            return not self._acting and not nudged

    def await_nudge(self) -> None:
        """Waits for :meth:`nudge`: nothing will ever happen by itself."""
        with self._lock:
            while not self._nudged and not self._acting:
                self._changed.wait()
            self._nudged = False

    def expire(self, now: float) -> bool:
        """Ends the waits whose timeout has come; returns whether there were any."""
        return self._end_those(lambda wait: wait.deadline <= now)

    def expire_polls(self) -> bool:
        """Ends the waits of threads that only poll, as nothing is left to happen; returns whether there were any."""
        return self._end_those(lambda wait: wait.polls)

    def _end_those(self, is_over: Callable[[_ClockWait], bool]) -> bool:
        with self._lock:
            over = [wait for wait in self._waits if is_over(wait)]
            for wait in over:
                wait.is_expired = True
                self._end(wait)
            return bool(over)


class _ClockWait:
    """One thread's wait.

    Attributes:
        signal: released when the wait is over.
        is_expired: whether its timeout has ended it.
    """

    __slots__ = ("deadline", "is_expired", "place", "polls", "signal", "thread")

    def __init__(self, thread: int, place: Place, deadline: float, polls: bool) -> None:
        self.thread, self.place, self.deadline, self.polls = thread, place, deadline, polls
        self.is_expired = False
        self.signal = threading.Lock()
        self.signal.acquire()


class _HeldFuture(Future[Any]):
    """A future for which a thread waits as it does for the session."""

    def __init__(self, hold: VirtualClockHold) -> None:
        super().__init__()
        self._hold, self._place = hold, Place()
        self.add_done_callback(lambda _: hold.wake(self._place))

    def result(self, timeout: float | None = None) -> Any:
        self._hold.wait_until(self.done, self._place, timeout)
        return super().result(0.0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._hold.wait_until(self.done, self._place, timeout)
        return super().exception(0.0)


class _Sleepers:
    """Tells threads that sleep, and so wait for something else, from those that think."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self._since: float | None = None
        self._used: dict[int, float] = {}

    def have_slept(self, threads: set[int]) -> bool:
        """Whether all of these threads have slept since some time, by all calls so far."""
        states = {thread: thread_state(thread) for thread in threads}
        used = {thread: state.seconds for thread, state in states.items() if state is not None}
        if used != self._used or any(state is not None and not state.sleeps for state in states.values()):
            self._used, self._since = used, self._clock.now()
        if self._since is None:
            self._since = self._clock.now()
        return self._clock.now() - self._since >= _ASLEEP_S


#: Of every session on a real clock.
NO_HOLD = ClockHold()
