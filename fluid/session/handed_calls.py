"""Calls that other threads hand to the session's thread, which makes them between two events."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from fluid.errors import FluidError
from fluid.session.waits import SessionFuture, SessionWaits

T = TypeVar("T")


class _HandedCall(SessionFuture):
    """A call: either the session's thread takes it, and makes it wholly, or an interrupted caller takes it back."""

    def __init__(self, waits: SessionWaits, work: Callable[[], Any]) -> None:
        super().__init__(waits)
        self.work, self._taken = work, threading.Lock()

    def take(self) -> bool:
        """Takes the call; returns whether the caller or the session's thread had not taken it before."""
        return self._taken.acquire(blocking=False)


class HandedCalls:
    """The calls of one session.

    Args:
        waits: of the session.
        wake: has the session's thread look for calls.
    """

    def __init__(self, waits: SessionWaits, wake: Callable[[], None]) -> None:
        self._waits, self._wake = waits, wake
        self._handed: queue.SimpleQueue[_HandedCall] = queue.SimpleQueue()

    def make(self, work: Callable[[], T]) -> T:
        """Has a call made, and returns or raises what it does. An interrupt ends the wait.

        The call was then made, or is being made, or never will be.
        """
        request = _HandedCall(self._waits, work)
        try:
            self._handed.put(request)
            self._wake()
            made: T = request.result()
            return made
        except BaseException:
            request.take()
            raise

    def post(self, work: Callable[[], None]) -> None:
        """Has a call made, without waiting for it."""
        self._handed.put(_HandedCall(self._waits, work))
        self._wake()

    # -- in the session's thread ---------------------------------------------------------------------------

    def answer(self, is_over: Callable[[], bool]) -> bool:
        """Makes the calls that there are, until the session is over; returns whether there was any."""
        answered = False
        for request in self._waiting():
            if not request.take():
                continue
            answered = True
            try:
                result = request.work()
            except BaseException as error:
                request.set_exception(error)
            else:
                request.set_result(result)
            if is_over():
                break
        return answered

    def refuse(self, error: Callable[[], FluidError]) -> None:
        """Refuses the calls that there are, each with an error of its own."""
        for request in self._waiting():
            request.take()
            request.set_exception(error())

    def _waiting(self) -> Iterator[_HandedCall]:
        with suppress(queue.Empty):
            while True:
                yield self._handed.get_nowait()
