"""Measures what iterations use besides time and device memory: see :class:`fluid.trainables.usage.Usage`."""

from __future__ import annotations

import os
from contextlib import suppress

from fluid.processes.below import BELOW
from fluid.trainables.usage import NO_USAGE, Usage

#: What takes less is not measured, seconds: a look at the counters, of which an iteration needs two, takes 10 us.
_LEAST_S = 0.01


class UsageMeter:
    """Measures one iteration after the other."""

    def __init__(self) -> None:
        self._counters: int | None = None
        with suppress(OSError):  # Not Linux, or hidden.
            self._counters = os.open("/proc/self/io", os.O_RDONLY)
        self._begun: list[int] | None = None

    def begin(self, pace: float | None) -> None:
        """Begins a measurement.

        Args:
            pace: seconds that an iteration of the trial takes; ``None`` before its first one.
        """
        self._begun = self._read() if pace is None or pace >= _LEAST_S else None

    def end(self, seconds: float, rows: int = 1) -> Usage:
        """Returns what an iteration of so many seconds used; of several trials in one step, the part of one."""
        if self._begun is None or seconds < _LEAST_S or (now := self._read()) is None:
            return NO_USAGE
        read, written = (max(0, after - before) // rows for before, after in zip(self._begun, now, strict=True))
        return Usage(read_bytes=read, written_bytes=written)

    def _read(self) -> list[int] | None:
        """Bytes that the process has read so far, and written; ``None`` where that cannot be told."""
        if self._counters is None:
            return None
        try:
            lines = os.pread(self._counters, 128, 0).split(b"\n", 2)
            own = [int(line.split()[1]) for line in lines[:2]]  # rchar and wchar.
            return [mine + theirs for mine, theirs in zip(own, BELOW.transferred(), strict=True)]
        except (OSError, ValueError, IndexError):
            self._counters = None
            return None
