"""Measures what iterations use besides time and device memory: see :class:`fluid.trainables.usage.Usage`."""

from __future__ import annotations

import os
from contextlib import suppress

from fluid.trainables.usage import NO_USAGE, Usage

#: What takes less is not measured, seconds: a look at the counters, of which an iteration needs two, takes 10 us.
_LEAST_S = 0.01


class UsageMeter:
    """Measures one iteration after the other."""

    def __init__(self) -> None:
        self._counters: int | None = None
        with suppress(OSError):  # Not Linux, or hidden.
            self._counters = os.open("/proc/self/io", os.O_RDONLY)
        self._begun: int | None = None

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
        return Usage(read_bytes=(now - self._begun) // rows)

    def _read(self) -> int | None:
        """Bytes that the process has read so far; ``None`` where that cannot be told."""
        if self._counters is None:
            return None
        try:
            text = os.pread(self._counters, 64, 0)
            return int(text[: text.index(b"\n")].removeprefix(b"rchar: "))
        except (OSError, ValueError):
            self._counters = None
            return None
