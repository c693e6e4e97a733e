"""Waits in which the main thread hears signals.

Python runs the handler of a signal in the main thread, between two bytecodes. A signal that another thread received, or
that came just before the main thread began to wait, does not wake it: a wait without end would leave Ctrl-C and notices
of preemption unheard. So every wait of unknown length is made of short ones.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from fluid._clock import MonotonicClock

#: Seconds after which a thread that waits runs a few bytecodes.
LOOK_UP_S = 0.5


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
