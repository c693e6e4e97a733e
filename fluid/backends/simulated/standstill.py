"""When the virtual clock stands still: while a thread that submits acts, or where nothing will ever happen."""

from __future__ import annotations

import threading

from fluid._clock import VirtualClock
from fluid._clock_hold import NO_HOLD, ClockHold, VirtualClockHold


class Standstill:
    """Lets the thread that moves a virtual clock wait.

    Args:
        clock: the clock.
        held: whether the clock stands still while a thread that submits to the session acts; otherwise it goes on
            whatever other threads do.

    Attributes:
        hold: who holds the clock.
    """

    def __init__(self, clock: VirtualClock, *, held: bool) -> None:
        self._clock = clock
        self._virtual = VirtualClockHold(clock) if held else None
        self.hold: ClockHold = NO_HOLD if self._virtual is None else self._virtual
        self._woken = threading.Event()

    def wake(self) -> None:
        """Ends the wait in progress, or else the next; from any thread."""
        if self._virtual is None:
            self._woken.set()
        else:
            self._virtual.nudge()

    def await_submitters(self) -> bool:
        """Waits until no thread holds the clock; returns whether none does, and :meth:`wake` was not called."""
        if self._virtual is not None:
            return self._virtual.await_free()
        is_woken = self._woken.is_set()
        self._woken.clear()
        return not is_woken

    def end_waits(self, instant: float) -> bool:
        """Ends waits of submitters whose timeout comes before an instant, seconds, and moves the clock there.

        Where nothing will happen, as the instant is infinite, it ends the waits of those who only poll; and where there
        are none, waits for :meth:`wake`.

        Returns:
            Whether there was anything to do.
        """
        if self._virtual is None:
            if instant == float("inf"):
                self._woken.wait()
                self._woken.clear()
                return True
            return False
        if self._virtual.end_settled() or (instant == float("inf") and self._virtual.expire_limited_polls()):
            return True
        deadline = self._virtual.next_deadline
        if deadline < instant:
            self._clock.advance_to(max(deadline, self._clock.now()))
            return self._virtual.expire(self._clock.now())
        if instant < float("inf"):
            return False
        if not self._virtual.expire_polls():
            self._virtual.await_nudge()
        return True
