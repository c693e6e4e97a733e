"""How busy a trial keeps a GPU that no other trial uses, which bounds what packing can gain there."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from fluid._clock import Clock, processor_seconds
from fluid.gpu.mps_support import foreign_daemon
from fluid.gpu.nvml import find_gpus, find_handle
from fluid.gpu.utilization import UnitUse, running_share
from fluid.lane.protocol import LaneOptions
from fluid.processes.below import BELOW

# -- busy meter ----------------------------------------------------------------------------------
#
# How busy a lane keeps its CPU device.


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
        self._computed, (self._ran, self._waited) = self._used(), self._main_thread()

    def end(self, seconds: float) -> float | None:
        """The share, from 0 to 1, of an interval of that many seconds; ``None`` for none at all."""
        if seconds <= 0.0:
            return None
        computed = max(0.0, self._used() - self._computed)
        ran, waited = self._main_thread()
        ran, waited = ran - self._ran, waited - self._waited
        if ran > 0.0:
            computed *= 1.0 + waited / ran  # Assumes that other threads waited as long as the main one.
        return min(1.0, computed / self._threads / seconds)

    @staticmethod
    def _used() -> float:
        return processor_seconds() + (BELOW.processor_seconds() if BELOW.leaders else 0.0)

    def _main_thread(self) -> tuple[float, float]:
        """Seconds that the main thread ran, and seconds that it waited for a processor; a trial's script's, if any."""
        if BELOW.leaders:
            return BELOW.run_and_wait()
        if self._schedstat < 0:
            return 0.0, 0.0
        ran, waited, _ = os.pread(self._schedstat, 128, 0).split()
        return int(ran) / 1e9, int(waited) / 1e9


# -- gpu busy meter ------------------------------------------------------------------------------


#: Seconds that a reading covers: as long as NVML's longest sampling period.
_WINDOW_S = 1.0
#: Most of a window that may lie between two iterations, and least that must be in iterations.
_LONGEST_GAP = 0.05
_LEAST_ITERATED = 0.5


class GpuBusyMeter:
    """Reads once a second which share of a GPU's capacity its trials used.

    Where processes take turns on the GPU, that is the share of the time in which a kernel ran: no kernel of another
    process can run then. Under MPS kernels of several processes run side by side, and the use of the GPU's busiest
    unit counts.

    Args:
        clock: the lane's.
        read: returns the share since it was last called; ``None`` to ask NVML about the first GPU.
    """

    def __init__(self, clock: Clock, read: Callable[[], float | None] | None = None) -> None:
        self._clock = clock
        self._read = read
        #: When the window began; ``None`` until the next iteration begins.
        self._since: float | None = None
        #: Seconds of the window in iterations, when the last one ended, and the longest time between two.
        self._iterated = 0.0
        self._ended = 0.0
        self._gap = 0.0

    def change_trial(self) -> None:
        """Begins a new window with the next iteration, which is another trial's."""
        self._since = None

    def begin(self) -> None:
        """Begins an iteration."""
        now = self._clock.now()
        if self._since is None:
            self._since, self._iterated, self._gap = now, 0.0, 0.0
            if self._read is not None:
                self._read()
        else:
            self._gap = max(self._gap, now - self._ended)

    def end(self, seconds: float) -> float | None:
        """Ends an iteration of that many seconds.

        Returns:
            The share of the GPU's capacity used by iterations of the window that ends now, 0 to 1; ``None`` if the
            window goes on, if the trial paused in it, or if the GPU does not report it. If the driver decides after
            each iteration, which takes some milliseconds, the GPU was used in the rest of the window.
        """
        self._iterated += seconds
        now = self._ended = self._clock.now()
        length = now - (now if self._since is None else self._since)
        if length < _WINDOW_S:
            return None
        iterated, gap = self._iterated, self._gap
        self._since, self._iterated, self._gap = now, 0.0, 0.0
        if self._read is None:
            self._read = _reader()
        share = self._read()
        if share is None or gap > _LONGEST_GAP * length or iterated < _LEAST_ITERATED * length:
            return None
        return min(1.0, share * max(1.0, length / iterated))


def make_busy_meter(options: LaneOptions, clock: Clock) -> BusyMeter | GpuBusyMeter:
    """Returns the meter for a lane's device."""
    return GpuBusyMeter(clock) if options.kind == "gpu" else BusyMeter(options.threads)


def _reader() -> Callable[[], float | None]:
    """Asks NVML about the first GPU that this process sees."""
    handle = next((find_handle(gpu.token) for gpu in find_gpus()), None)
    if foreign_daemon(os.environ) is not None:  # Fluid's own daemon is named in the environment, too.
        return UnitUse(handle).share
    return lambda: running_share(handle)
