"""Tells threads that sleep, and so wait for something else than a session, from those that think."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fluid._clock import Clock, MonotonicClock, ThreadState, thread_state
from fluid._logs import logger_of
from fluid.errors import FluidError
from fluid.waiting.waits import LOOK_UP_S

#: Seconds between two looks at these threads, and how many looks in a row have to find them asleep.
LOOK_S, _LOOKS = 0.02, 8
#: Most of a processor that a thread uses which only looks, every now and then, how things stand.
_IDLE_SHARE = 0.05


class Sleepers:
    """Follows some threads, look by look."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self.restart()

    def restart(self) -> None:
        """A thread acts that did not, or asks for something: it thinks until it was seen to sleep."""
        self._since: float | None = None
        self._looked_at: float | None = None
        self._looks = 0
        #: CPU seconds that each thread had used then.
        self._used: dict[int, float] = {}

    def look(self, threads: set[int], seconds: float) -> tuple[set[int], bool]:
        """Looks at these threads, unless it is too early to look again.

        Args:
            threads: by their identifiers.
            seconds: how long they have to sleep.

        Returns:
            Those that have ended, and whether all others have slept for so many seconds, by all looks so far.
        """
        now = self._clock.now()
        if self._looked_at is None or now < self._looked_at + LOOK_S:  # Most act for less than that.
            self._looked_at = now if self._looked_at is None else self._looked_at
            return set(), False
        self._looked_at = now
        states = {thread: thread_state(thread) for thread in threads}
        alive = {thread: state for thread, state in states.items() if state is not None}
        since = self._since
        if since is None or any(self._thinks(thread, state, now - since) for thread, state in alive.items()):
            self._since = since = now
            self._looks = 0
            self._used = {thread: state.seconds for thread, state in alive.items()}
        self._looks += 1
        return threads - alive.keys(), self._looks >= _LOOKS and now - since >= seconds

    def _thinks(self, thread: int, state: ThreadState, seconds: float) -> bool:
        before = self._used.get(thread)
        return not state.sleeps or before is None or state.seconds - before > _IDLE_SHARE * max(seconds, LOOK_S)


# --  clock hold ---------------------------------------------------------------------------------
#
# Who holds a virtual clock: the threads that submit to a session and may still act at this instant.
#
# A real clock goes on while a searcher thinks. A virtual one must not: it stands still until each of these threads
# waits for the session again. So a rehearsal takes no account of how fast this machine is, and the same seed gives the
# same sweep.


#: Seconds for which all threads that hold the clock sleep, and use next to no processor, until it is let go: they wait
#: for something else than the session, such as another thread.
_ASLEEP_S = 0.25
#: The same where one of them is known to wait for the session in no other way than by the methods here.
_STEADY_ASLEEP_S = 60.0
#: Looks, ten seconds, after which a thread for which something was done does not wait for the mover of the clock.
_PATIENT_LOOKS = 20
_log = logger_of("fluid.session")


class Place:
    """Where threads wait for something that the session does, such as a group's results.

    Attributes:
        waits: of the threads that wait there.
        wakes: how often something was done: a thread that has looked before does not wait.
    """

    __slots__ = ("waits", "wakes")

    def __init__(self) -> None:
        self.waits: dict[_ClockWait, None] = {}
        self.wakes = 0


class ClockHold:
    """That of a real clock, which goes on in any case. No method does anything."""

    is_virtual = False

    def take(self) -> None:
        """The calling thread has asked the session for something, and acts at this instant."""

    def wake(self, place: Place) -> None:
        """Something was done for which threads may wait at a place: these act at this instant."""

    def let_go(self) -> None:
        """The session is about to end: no thread holds the clock from now on."""

    def end(self) -> None:
        """The session has ended: nothing is done for those who wait any more."""

    def keep(self) -> AbstractContextManager[None]:
        """Lets the calling thread hold the clock also while it sleeps, such as for a file or another process."""
        return nullcontext()


class VirtualClockHold(ClockHold):
    """That of a virtual clock.

    Args:
        clock: the virtual clock.
    """

    is_virtual = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Re-entrant: a signal handler runs wherever the main thread is. It is held in short blocks, in which those who
        # submit wait for nothing; each of their waits has a lock of its own.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: Threads that act at this instant, by their identifier.
        self._acting: set[int] = set()
        #: Those that wait, in order.
        self._waits: dict[_ClockWait, None] = {}
        self._sleepers = Sleepers()
        #: Threads that no longer hold the clock as they slept, and its time then.
        self._strayed: dict[int, float] = {}
        self._is_let_go = self._is_over = False
        self._nudged = self._is_idle = self._has_warned = False
        #: The thread that moves the clock, while it does something else than wait for those that act.
        self._mover: int | None = None
        #: Threads that hold the clock also while they sleep, and how many of their :meth:`keep` are open.
        self._steady: Counter[int] = Counter()

    # -- the threads that submit ---------------------------------------------------------------------------

    def take(self) -> None:
        thread = threading.get_ident()
        with self._lock:
            strayed_at = self._strayed.pop(thread, None)
            moves = not (self._acting or self._is_idle or self._is_let_go)
            warns = strayed_at is not None and moves and self._clock.now() > strayed_at and not self._has_warned
            self._has_warned |= warns
            self._hold_for(thread)
        if warns:
            text = "%s has waited for something else than this session, and the clock of the rehearsal went on: when it"
            text += " asks for something depends on how fast this machine is; decide in a listener, or read results()"
            _log.warning(text, threading.current_thread().name)

    def wake(self, place: Place) -> None:
        with self._lock:
            place.wakes += 1
            # A thread is woken once all is done that the one which moves the clock does at a time: what it finds then
            # does not depend on which of the two is faster.
            is_mover = self._mover == threading.get_ident()
            for each in tuple(place.waits):
                if each.settles or is_mover:
                    each.is_due = True
                else:
                    self._end(each)
            if not is_mover:
                self._changed.notify_all()

    def let_go(self) -> None:
        with self._lock:
            self._is_let_go = True
            self._acting.clear()
            self._changed.notify_all()

    def end(self) -> None:
        with self._lock:
            self._is_let_go = self._is_over = True
            self._acting.clear()
            for each in tuple(self._waits):
                self._end(each)

    @property
    def is_over(self) -> bool:
        """Whether the session has ended."""
        return self._is_over

    @contextmanager
    def keep(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._steady[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._steady[thread] -= 1
                self._steady += Counter()

    def wait_until(
        self,
        condition: Callable[[], bool],
        place: Place,
        timeout: float | None = None,
        *,
        polls: bool = False,
    ) -> bool:
        """Waits until a condition holds; returns whether it does.

        Args:
            condition: of what the session does; changes are told by :meth:`wake` of the place.
            place: where to wait.
            timeout: most virtual seconds; ``None`` for no limit.
            polls: whether the wait also ends where nothing is left to happen on the virtual clock.

        Raises:
            FluidError: the thread that moves the clock would wait without end, as in a listener.
        """
        if self._mover == threading.get_ident() and not (self._is_over or condition()):
            if timeout is None:
                raise FluidError("a listener cannot wait for its own session: wait in another thread")
            return False  # No time passes in a listener.
        deadline = float("inf") if timeout is None else self._clock.now() + timeout
        while True:
            seen = place.wakes  # Before the condition is looked at: what is done from then on ends the wait at once.
            if condition():
                return True
            if self._is_over:
                return condition()
            begun = self._begin(place, seen, deadline, polls)
            if begun is None:
                continue
            try:
                self._sleep(begun)
            finally:
                self._leave(begun)
            if begun.is_expired:
                return condition()

    def wait_settled(
        self, condition: Callable[[], bool], place: Place, timeout: float | None = None, *, polls: bool = False
    ) -> None:
        """Waits until something was done for a place, and nothing more will be at that instant.

        Args:
            condition: whether something was done already, which no one has looked at.
            place: where to wait.
            timeout: most virtual seconds; ``None`` for no limit.
            polls: whether the wait also ends where nothing is left to happen on the virtual clock.
        """
        deadline = float("inf") if timeout is None else self._clock.now() + timeout
        with self._lock:
            if self._is_over:
                return
            begun = _ClockWait(threading.get_ident(), place, deadline, polls)
            begun.settles, begun.is_due = True, condition()
            self._enter(begun)
        try:
            self._sleep(begun)
        finally:
            self._leave(begun)

    def _sleep(self, begun: _ClockWait) -> None:
        """Sleeps until a wait is over, in short waits, so that the main thread hears signals."""
        looks = 0
        while not begun.signal.acquire(timeout=LOOK_UP_S):
            looks += begun.is_due and not begun.settles
            if looks >= _PATIENT_LOOKS:
                self._leave(begun)  # A listener, in the thread that moves the clock, may wait for this thread.

    def _begin(self, place: Place, seen: int, deadline: float, polls: bool) -> _ClockWait | None:
        """Begins a wait; ``None`` if something was done at the place since, or the session has ended."""
        with self._lock:
            if place.wakes != seen or self._is_over:
                return None
            begun = _ClockWait(threading.get_ident(), place, deadline, polls)
            self._enter(begun)
            return begun

    def _enter(self, begun: _ClockWait) -> None:
        begun.place.waits[begun] = None
        self._waits[begun] = None
        self._acting.discard(begun.thread)
        if not self._acting or begun.may_expire:
            self._changed.notify_all()

    def _leave(self, begun: _ClockWait) -> None:
        """Ends a wait that an exception has ended, such as that of Ctrl-C."""
        with self._lock:
            if begun in self._waits:
                self._end(begun)

    def _end(self, begun: _ClockWait) -> None:
        # Done twice is harmless: an interrupt may have come between any two of these lines.
        begun.place.waits.pop(begun, None)
        self._hold_for(begun.thread)
        if begun.signal.locked():
            begun.signal.release()
        self._waits.pop(begun, None)

    def _hold_for(self, thread: int) -> None:
        if not self._is_let_go:
            self._acting.add(thread)
            self._sleepers.restart()

    # -- the thread that moves the clock -------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """When the first wait ends by its timeout; infinite if none does."""
        with self._lock:
            return min((each.deadline for each in self._waits), default=float("inf"))

    def nudge(self) -> None:
        """Makes :meth:`await_free`, the call in progress or else the next, return; from any thread."""
        with self._lock:
            self._nudged = True
            self._changed.notify_all()

    def await_free(self) -> bool:
        """Waits until no thread holds the clock, or for :meth:`nudge`; returns whether none does."""
        with self._lock:
            self._mover = None
            for each in [each for each in self._waits if each.is_due and not each.settles]:
                self._end(each)
            while self._acting and not self._nudged:
                limit = _ASLEEP_S if self._steady.keys().isdisjoint(self._acting) else _STEADY_ASLEEP_S
                ended, have_slept = self._sleepers.look(self._acting, limit)
                self._acting -= ended
                if have_slept:
                    self._strayed.update(dict.fromkeys(self._acting, self._clock.now()))
                    self._acting.clear()
                elif self._acting:
                    self._changed.wait(LOOK_S)
            nudged, self._nudged = self._nudged, False
            self._mover = threading.get_ident()
            return not self._acting and not nudged

    def await_nudge(self) -> None:
        """Waits for :meth:`nudge`, or for a thread that acts or polls: nothing will happen by itself."""
        with self._lock:
            self._is_idle = True
            while not (self._nudged or self._acting or any(each.may_expire or each.is_due for each in self._waits)):
                self._changed.wait()
            self._nudged = self._is_idle = False

    def end_settled(self) -> bool:
        """Ends the waits until this instant has settled; returns whether there were any."""
        return self._end_those(lambda each: each.is_due and each.settles, expired=False)

    def expire(self, now: float) -> bool:
        """Ends the waits whose timeout has come; returns whether there were any."""
        return self._end_those(lambda each: each.deadline <= now)

    def expire_limited_polls(self) -> bool:
        """Ends those of the polls that have a timeout; returns whether there were any."""
        return self._end_those(lambda each: each.polls and each.deadline < float("inf"))

    def expire_polls(self) -> bool:
        """Ends the waits of threads that only poll, as nothing is left to happen; returns whether there were any."""
        return self._end_those(lambda each: each.polls)

    def _end_those(self, is_over: Callable[[_ClockWait], bool], *, expired: bool = True) -> bool:
        with self._lock:
            over = [each for each in self._waits if is_over(each)]
            for each in over:
                each.is_expired = expired
                self._end(each)
            return bool(over)


class _ClockWait:
    """One thread's wait.

    Attributes:
        signal: released when the wait is over.
        is_expired: whether its timeout has ended it.
        settles: whether it ends only when nothing more happens at an instant.
        is_due: whether something was done for it: it ends when the thread that moves the clock is through with what it
            does, or, if it settles, when nothing more happens at this instant.
    """

    __slots__ = ("deadline", "is_due", "is_expired", "place", "polls", "settles", "signal", "thread")

    def __init__(self, thread: int, place: Place, deadline: float, polls: bool) -> None:
        self.thread = thread
        self.place = place
        self.deadline = deadline
        self.polls = polls
        self.is_expired = self.settles = self.is_due = False
        self.signal = threading.Lock()
        self.signal.acquire()

    @property
    def may_expire(self) -> bool:
        """Whether it ends with time alone, or where nothing is left to happen."""
        return self.polls or self.deadline < float("inf")


#: Of every session on a real clock.
NO_HOLD = ClockHold()
