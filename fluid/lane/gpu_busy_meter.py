"""How busy a trial keeps a GPU that no other trial uses, which bounds what packing can gain there."""

from __future__ import annotations

import os
from collections.abc import Callable

from fluid._clock import Clock
from fluid.gpu.mps_support import foreign_daemon
from fluid.gpu.nvml import find_gpus, find_handle
from fluid.gpu.utilization import UnitUse, running_share
from fluid.lane.busy_meter import BusyMeter
from fluid.lane.messages import LaneOptions

#: Seconds that a reading covers: as long as NVML's longest sampling period.
_WINDOW_S = 1.0
#: Most of a window that may lie between iterations.
_MOST_IDLE = 0.05


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
        #: Seconds of the window in iterations.
        self._iterated = 0.0

    def change_trial(self) -> None:
        """Begins a new window with the next iteration, which is another trial's."""
        self._since = None

    def begin(self) -> None:
        """Begins an iteration."""
        if self._since is None:
            self._since, self._iterated = self._clock.now(), 0.0
            if self._read is not None:
                self._read()

    def end(self, seconds: float) -> float | None:
        """Ends an iteration of that many seconds.

        Returns:
            The share of the GPU's capacity used in the window that ends now, 0 to 1; ``None`` if the window goes on,
            if the trial did not iterate all the time, or if the GPU does not report it.
        """
        self._iterated += seconds
        now = self._clock.now()
        length = now - (now if self._since is None else self._since)
        if length < _WINDOW_S:
            return None
        iterated, self._since, self._iterated = self._iterated, now, 0.0
        if self._read is None:
            self._read = _reader()
        share = self._read()
        return share if iterated >= (1.0 - _MOST_IDLE) * length else None


def make_busy_meter(options: LaneOptions, clock: Clock) -> BusyMeter | GpuBusyMeter:
    """Returns the meter for a lane's device."""
    return GpuBusyMeter(clock) if options.kind == "gpu" else BusyMeter(options.threads)


def _reader() -> Callable[[], float | None]:
    """Asks NVML about the first GPU that this process sees."""
    handle = next((find_handle(gpu.token) for gpu in find_gpus()), None)
    if foreign_daemon(os.environ) is not None:  # Fluid's own daemon is named in the environment, too.
        return UnitUse(handle).share
    return lambda: running_share(handle)
