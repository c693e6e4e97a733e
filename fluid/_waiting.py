"""Waits in which the main thread hears signals.

Python runs the handler of a signal in the main thread, between two bytecodes. A signal that another thread received, or
that came just before the main thread began to wait, does not wake it: a wait without end would leave Ctrl-C and notices
of preemption unheard. So every wait of unknown length is made of short ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from fluid._clock import MonotonicClock

#: Seconds after which a thread that waits runs a few bytecodes.
LOOK_UP_S = 0.5


def wait_until(condition: Callable[[], bool], changed: threading.Condition, timeout: float | None = None) -> bool:
    """Waits until a condition holds; returns whether it does.

    Args:
        condition: evaluated with the lock held.
        changed: notified when the condition may have come to hold; its lock is held by the caller.
        timeout: most seconds to wait; ``None`` for no limit.
    """
    clock = MonotonicClock()
    deadline = None if timeout is None else clock.now() + timeout
    while not condition():
        left = LOOK_UP_S if deadline is None else min(LOOK_UP_S, deadline - clock.now())
        if left <= 0.0:
            return False
        changed.wait(left)
    return True
