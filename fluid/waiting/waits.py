"""Waits in which the main thread hears signals.

Python runs the handler of a signal in the main thread, between two bytecodes. A signal that another thread received, or
that came just before the main thread began to wait, does not wake it: a wait without end would leave Ctrl-C and notices
of preemption unheard. So every wait of unknown length is made of short ones.

Threads that others wait for are here, too.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from fluid._clock import MonotonicClock, nap
from fluid._logs import logger_of

#: Seconds after which a thread that waits runs a few bytecodes.
LOOK_UP_S = 0.5
#: Times that a background thread begins its work again which does not go well for so many seconds in between.
_MOST_TIMES = 5
_WELL_S = 60.0
#: Seconds before it begins again; twice as many each further time.
_PAUSE_S = 0.1
_log = logger_of("fluid.session")


def await_descriptor(
    descriptor: int, seconds: float | None = None, *, readable: bool = True, writable: bool = False
) -> bool:
    """Waits for a descriptor of any number; ``select.select`` refuses those from 1,024 on.

    Args:
        descriptor: of a socket or a pipe.
        seconds: longest to wait; ``None`` for no end.
        readable: whether to wait until it can be read from. An end or an error ends the wait in any case.
        writable: whether to wait until it can be written to; with both, either ends the wait.

    Returns:
        Whether it is ready, not merely the time over.
    """
    poll, clock = select.poll(), MonotonicClock()
    poll.register(descriptor, select.POLLIN * readable | select.POLLOUT * writable)
    deadline = None if seconds is None else clock.now() + seconds
    while True:
        left = LOOK_UP_S if deadline is None else min(LOOK_UP_S, max(0.0, deadline - clock.now()))
        if poll.poll(1000.0 * left):
            return True
        if deadline is not None and clock.now() >= deadline:
            return False


class AwaitedThread(threading.Thread):
    """A thread whose end others await in ``join()``, although an interrupt may hit them there.

    Once Ctrl-C has interrupted a ``join()`` of a thread, Python takes the thread for ended, although it runs: a
    second ``close()`` would not wait for it. This one's ``join()`` may be interrupted, and called again.
    """

    def __init__(self, name: str, target: Callable[[], object]) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._pid = os.getpid()
        self._is_over = False
        #: Held until the thread is over. A joining thread that is interrupted may keep it afterwards: the flag counts.
        self._until_over = threading.Lock()
        self._until_over.acquire()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._is_over = True
            self._until_over.release()

    def is_alive(self) -> bool:
        return (
            self.ident is not None and not self._is_over and self._pid == os.getpid()
        )  # A forked process does not have it.

    def join(self, timeout: float | None = None) -> None:
        clock = MonotonicClock()
        deadline = None if timeout is None else clock.now() + timeout
        while self.is_alive():
            left = LOOK_UP_S if deadline is None else min(LOOK_UP_S, deadline - clock.now())
            if left <= 0.0:
                return
            if self._until_over.acquire(timeout=left):
                self._until_over.release()
        if self._pid == os.getpid():
            super().join(timeout)


class BackgroundThread(AwaitedThread):
    """A thread whose work goes on until it returns, also where it raises an unexpected error.

    The log tells the error, once; a thread that fails again and again is given up, which the log tells, too.

    Args:
        name: of the thread.
        work: returns once it is told to end; may be begun again after it has raised.
        given_up: called in the thread, with the last error, if it is given up.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        given_up: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        super().__init__(name, self._go_on)
        self._work = work
        self._given_up = given_up

    def _go_on(self) -> None:
        clock, failures, told = MonotonicClock(), 0, ""
        while True:
            began = clock.now()
            try:
                self._work()
                return
            except BaseException as error:
                failures = 1 if clock.now() - began >= _WELL_S else failures + 1
                text = f"{type(error).__name__}: {error}"
                if failures > _MOST_TIMES:
                    _log.error("the thread %s is given up after %d errors in a row: %s", self.name, failures, text)
                    self._given_up(error)
                    return
                if text != told:
                    _log.error("the thread %s has ended on an error, and goes on", self.name, exc_info=error)
                    told = text
            nap(_PAUSE_S * 2.0 ** (failures - 1))
