"""Clocks. No other module reads the time, so that tests and simulations can set it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import NamedTuple, Protocol

from fluid.errors import InvalidFieldError, require_number


class Clock(Protocol):
    """Tells the time in seconds from an arbitrary origin; it never goes back."""

    def now(self) -> float:
        """Returns the time, seconds."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Returns the time, seconds since an origin that differs between machines and reboots."""
        return time.monotonic()


class ClockReading(NamedTuple):
    """What a clock and the wall clock show at one instant.

    Attributes:
        at: seconds, on the clock.
        wall: seconds since 1970.
        name: of the clock; all clocks of one name have one origin. Empty if unknown, or if no other process has it.
    """

    at: float
    wall: float
    name: str = ""


def read_clock() -> ClockReading:
    """Reads the machine's monotonic clock, to compare with what another process has read, perhaps on another machine.

    Its name is that of the machine's boot, and of the time namespace, whose clocks are set off from the machine's.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            name = file.read().strip()
    except (OSError, ValueError):
        name = ""
    with suppress(OSError, ValueError), open("/proc/self/timens_offsets", encoding="ascii") as file:
        lines = [line.split() for line in file]
        offset = next((line[1:] for line in lines if line[:1] == ["monotonic"]), ["0", "0"])
        name += "" if not name or offset == ["0", "0"] else f"+{offset[0]}.{offset[1]}"
    return ClockReading(time.monotonic(), time.time(), name)


class VirtualClock:
    """A clock that stands still until :meth:`advance_to` is called.

    Args:
        start: the time it shows at first, seconds; at least 0.

    Raises:
        InvalidFieldError: ``start`` is negative or not a finite number.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = require_number("start", start, at_least=0.0)

    def now(self) -> float:
        """Returns the time, seconds."""
        return self._now

    def advance_to(self, t: float) -> None:
        """Sets the time to ``t`` seconds; advancing to the current time changes nothing.

        Raises:
            InvalidFieldError: ``t`` is earlier than now, or not a finite number. The clock keeps its time.
        """
        later = require_number("t", t, at_least=0.0)
        if later < self._now:
            raise InvalidFieldError("t", t, f"a clock cannot go back, it is already at {self._now!r} s")
        self._now = later


def processor_seconds() -> float:
    """CPU seconds that this process has used, in all of its threads."""
    return time.process_time()


def processor_seconds_of(process: int) -> float:
    """CPU seconds that another process has used, in all of its threads.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime((~process << 3) | 2)  # As clock_getcpuclockid(3) has it.


def thread_seconds() -> float:
    """CPU seconds that the calling thread has used."""
    return time.thread_time()


class ThreadState(NamedTuple):
    """What a thread of this process does.

    Attributes:
        seconds: of a processor that it has used.
        sleeps: whether it waits.
    """

    seconds: float
    sleeps: bool


def thread_state(identifier: int) -> ThreadState | None:
    """Returns what a thread does; ``None`` if it has ended.

    Args:
        identifier: its ``threading.Thread.ident``.
    """
    native = next((thread.native_id for thread in threading.enumerate() if thread.ident == identifier), None)
    if native is None:
        return None
    try:
        with open(f"/proc/self/task/{native}/stat", encoding="utf-8") as file:
            state = file.read().rpartition(")")[2].split()[0]
        # The clock that pthread_getcpuclockid() finds, which must not be called for a thread that may have ended.
        seconds = time.clock_gettime((~native << 3) | 6)
    except OSError:
        return None
    return ThreadState(seconds, sleeps=state == "S")


def nap(seconds: float) -> None:
    """Sleeps; 0 seconds only let other threads of this process run."""
    time.sleep(seconds)


def wall_seconds() -> float:
    """Returns seconds since 1970, to compare with what another machine's wall clock shows; never used to measure."""
    return time.time()


def local_time(seconds: float, pattern: str) -> str:
    """A wall-clock time, seconds since 1970, in the local time zone, as ``time.strftime`` writes it by a pattern."""
    return time.strftime(pattern, time.localtime(seconds))


def timestamp() -> str:
    """The wall-clock time as text, ``2026-01-31 12:34:56``; never used to measure."""
    return time.strftime("%Y-%m-%d %H:%M:%S")
