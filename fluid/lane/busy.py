"""How busy a trial keeps a CPU device: what it computes there, and what it would if it were its turn."""

from __future__ import annotations

import os
from contextlib import suppress

from fluid._clock import processor_seconds

#: Of the main thread, in which trials run: nanoseconds it ran, nanoseconds it waited for its turn, time slices.
_SCHEDULED = "/proc/self/schedstat"


class BusyMeter:
    """Measures the share of a stretch of time in which this process kept its CPU device busy, or was kept waiting by
    others that do: all that more trials on that device could fill is the rest.

    Of a GPU it says nothing, as only what a kernel leaves free tells whether another one fits beside it.

    Args:
        kind: kind of the lane's device.
        threads: how many computing threads the device is for.
    """

    def __init__(self, kind: str, threads: int) -> None:
        self._is_cpu = kind == "cpu"
        self._threads = max(1, threads)
        self._scheduled = -1
        self._computed = self._ran = self._waited = 0.0
        if self._is_cpu:
            with suppress(OSError):  # A kernel that does not count it: waiting for one's turn looks idle then.
                self._scheduled = os.open(_SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)

    def begin(self) -> None:
        """Starts a stretch."""
        if self._is_cpu:
            self._computed, (self._ran, self._waited) = processor_seconds(), self._main_thread()

    def end(self, seconds: float) -> float | None:
        """The share, from 0 to 1, of a stretch of so many seconds; ``None`` where it cannot be told."""
        if not self._is_cpu or seconds <= 0.0:
            return None
        computed = processor_seconds() - self._computed
        ran, waited = self._main_thread()
        ran, waited = ran - self._ran, waited - self._waited
        if ran > 0.0:
            computed *= 1.0 + waited / ran  # Other threads are taken to have waited as the main one did.
        return min(1.0, computed / self._threads / seconds)

    def _main_thread(self) -> tuple[float, float]:
        """Seconds that the main thread ran, and that it waited for its turn."""
        if self._scheduled < 0:
            return 0.0, 0.0
        ran, waited, _ = os.pread(self._scheduled, 128, 0).split()
        return int(ran) / 1e9, int(waited) / 1e9
