"""A session's mark in the environment of its processes on a machine: those without a living parent are killed by it.

Processes below a lane inherit the environment. The kernel shows the environment with which a process was executed, so
neither a new process group or session nor the death of its parents hides a process; an environment of its own does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

from fluid._clock import MonotonicClock, nap

#: The environment variable.
SESSION_VARIABLE = "FLUID_SESSION"
#: Seconds in which killed processes vanish.
_KILL_WAIT_S = 2.0
_LOOK_S = 0.005


def kill_marked(mark: str, variable: str = SESSION_VARIABLE) -> None:
    """Kills all processes of this user that have a mark, but this one; waits at most two seconds for it.

    It reads the environment of every process of this user, so it is for cases in which their parents are gone.

    Args:
        mark: value of the variable.
        variable: the environment's, by default that of sessions.
    """
    clock = MonotonicClock()
    deadline = clock.now() + _KILL_WAIT_S
    entry = f"{variable}={mark}".encode()
    while sum(_kill_if_marked(process, entry) for process in _own_processes()) and clock.now() < deadline:
        nap(_LOOK_S)  # They may have started others meanwhile.


def _own_processes() -> Iterator[int]:
    user, this = os.getuid(), os.getpid()
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != this:
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    yield int(name)


def _kill_if_marked(process: int, entry: bytes) -> bool:
    """Kills a process if it has the mark; returns whether it had."""
    descriptor = -1
    try:
        # Opened first: should the process end now, and its number be given to another one, none is killed.
        descriptor = os.pidfd_open(process)
        with open(f"/proc/{process}/environ", "rb") as file:
            if entry not in file.read().split(b"\0"):  # Empty once it has ended.
                return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    except (OSError, AttributeError):  # It has ended, or the kernel is too old.
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
