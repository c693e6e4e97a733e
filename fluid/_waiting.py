"""Waits in which the main thread hears signals.

Python runs the handler of a signal in the main thread, between two bytecodes. A signal that another thread received, or
that came just before the main thread began to wait, does not wake it: a wait without end would leave Ctrl-C and notices
of preemption unheard. So every wait of unknown length is made of short ones.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from fluid._clock import MonotonicClock

#: Seconds after which a thread that waits runs a few bytecodes.
LOOK_UP_S = 0.5


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
        self._pid, self._is_over = os.getpid(), False
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
