"""How busy a lane keeps its CPU device."""

from __future__ import annotations

import os
from contextlib import suppress

from fluid._clock import processor_seconds

#: Of the main thread, in which trials run: nanoseconds on a processor, nanoseconds in the run queue, time slices.
_SCHEDSTAT = "/proc/self/schedstat"


class BusyMeter:
    """Measures the share of an interval in which this process kept its CPU device busy or waited for the processor.

    The remainder is what further trials on that device could use.

    Args:
        threads: how many computing threads the device is for.
    """

    def __init__(self, threads: int) -> None:
        self._threads = max(1, threads)
        self._schedstat = -1
        self._computed = self._ran = self._waited = 0.0
        with suppress(OSError):  # A kernel without scheduling statistics: time in the run queue then looks idle.
            self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    def change_trial(self) -> None:
        """Does nothing: each interval is measured by itself."""

    def begin(self) -> None:
        """Starts an interval."""
        self._computed, (self._ran, self._waited) = processor_seconds(), self._main_thread()

    def end(self, seconds: float) -> float | None:
        """The share, from 0 to 1, of an interval of that many seconds; ``None`` for none at all."""
        if seconds <= 0.0:
            return None
        computed = processor_seconds() - self._computed
        ran, waited = self._main_thread()
        ran, waited = ran - self._ran, waited - self._waited
        if ran > 0.0:
            computed *= 1.0 + waited / ran  # Assumes that other threads waited as long as the main one.
        return min(1.0, computed / self._threads / seconds)

    def _main_thread(self) -> tuple[float, float]:
        """Seconds that the main thread ran, and seconds that it waited for a processor."""
        if self._schedstat < 0:
            return 0.0, 0.0
        ran, waited, _ = os.pread(self._schedstat, 128, 0).split()
        return int(ran) / 1e9, int(waited) / 1e9
