"""A lane's device: binds the process to it, and measures the memory and the processor time that trials use there."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import traceback
from contextlib import suppress
from typing import Any, Protocol

from fluid._clock import processor_seconds
from fluid.gpu.nvml import find_gpus, process_bytes, used_bytes
from fluid.lane.messages import LaneOptions

#: Read by OpenMP, MKL, OpenBLAS and NumExpr when they are loaded.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
#: Written to a process's clear_refs, it resets the peak of resident memory (VmHWM).
_RESET_PEAK = "5"
#: Of the main thread, in which trials run: nanoseconds on a processor, nanoseconds in the run queue, time slices.
_SCHEDSTAT = "/proc/self/schedstat"


def bind(options: LaneOptions) -> None:
    """Binds this process to its device. Must be called before anything can have touched CUDA.

    The lane of a CPU sees no GPU: trials that look for one would otherwise all take the first.
    """
    if options.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.visible
        # NVML counts GPUs in this order, and the driver chose this one by NVML's number.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.update((*options.environment, *options.variables))
    if options.cores:
        with suppress(OSError, AttributeError):  # The cores may have been taken from this container.
            os.sched_setaffinity(0, options.cores)
    set_threads(options.threads)


def set_threads(threads: int) -> None:
    """Sets how many threads PyTorch, and numeric libraries that are loaded from now on, may use in this process."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads)
    set_num_threads = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_num_threads is not None:  # PyTorch is loaded, and has read its environment already.
        set_num_threads(threads)


def warm_up(options: LaneOptions) -> float:
    """Makes the CUDA context of a GPU's lane ahead of its first trial, if PyTorch is loaded.

    Returns:
        Bytes of device memory that the context takes on the first GPU; 0 where that cannot be measured.
    """
    torch = sys.modules.get("torch")
    if options.kind != "gpu" or torch is None:
        return 0.0
    try:
        token = next((gpu.token for gpu in find_gpus()), "")
        before = used_bytes(token)
        for index in range(torch.cuda.device_count()):  # Several for the lane of a gang.
            torch.zeros(1, device=f"cuda:{index}")
        torch.cuda.synchronize(0)
        torch.cuda.empty_cache()
        return _own_bytes(token, before, float(torch.cuda.memory_reserved(0)))
    except Exception:  # A trial that needs the GPU will meet the same error and report it.
        traceback.print_exc()
        return 0.0


def _own_bytes(token: str, before: float | None, reserved: float) -> float:
    """Bytes that this process takes on a GPU besides what PyTorch has reserved for tensors."""
    held = process_bytes(token, os.getpid())
    if not held:
        # NVML lists this process under another number, or not yet. The difference also counts what other processes
        # took meanwhile, which errs on the safe side.
        after = used_bytes(token)
        held = None if before is None or after is None else after - before
    return 0.0 if held is None else max(0.0, held - reserved)


class MemoryMeter(Protocol):
    """Measures the memory that a piece of work takes on a lane's device."""

    def begin(self) -> None:
        """Starts a measurement."""
        ...

    def end(self) -> tuple[float, float] | None:
        """Ends a measurement; waits for the device to finish, which also raises the device's errors.

        Returns:
            (bytes held more than at the beginning, peak bytes on top of what is held now); ``None`` if not measured.
        """
        ...

    def release_cached(self, *, collect: bool = False) -> None:
        """Returns memory that no trial holds to the device, or to the system, for other processes.

        Args:
            collect: whether to free reference cycles first, as after a trial has left.
        """
        ...

    def is_usable(self) -> bool:
        """Whether the device still answers; after some faults only a new process can use it."""
        ...


class DeviceMemoryMeter:
    """Measures GPU memory through PyTorch; nothing on a CPU, or before CUDA is used.

    Of several GPUs, each measurement is the largest of any.

    PyTorch keeps memory that tensors have freed, and other processes cannot use it. So the peak is the most that
    PyTorch had reserved, and cached memory is released when the lane switches trials or has nothing to do.

    Args:
        kind: kind of the lane's device.
    """

    def __init__(self, kind: str) -> None:
        self._is_gpu = kind == "gpu"
        #: Bytes held on each GPU.
        self._held: list[float] = []

    def begin(self) -> None:
        """Starts a measurement."""
        cuda = self._cuda()
        if cuda is not None:
            gpus = range(cuda.device_count())
            self._held = [float(cuda.memory_allocated(gpu)) for gpu in gpus]
            for gpu in gpus:
                cuda.reset_peak_memory_stats(gpu)

    def end(self) -> tuple[float, float] | None:
        """Ends a measurement: see :meth:`MemoryMeter.end`."""
        cuda = self._cuda()
        if cuda is None:
            return None
        gpus = range(cuda.device_count())
        for gpu in gpus:
            cuda.synchronize(gpu)
        before, self._held = self._held or [0.0] * len(gpus), [float(cuda.memory_allocated(gpu)) for gpu in gpus]
        peaks = [max(float(cuda.max_memory_allocated(gpu)), float(cuda.max_memory_reserved(gpu))) for gpu in gpus]
        grown = max(now - then for now, then in zip(self._held, before, strict=True))
        return grown, max(peak - now for peak, now in zip(peaks, self._held, strict=True))

    def release_cached(self, *, collect: bool = False) -> None:
        """Empties PyTorch's cache: see :meth:`MemoryMeter.release_cached`."""
        cuda = self._cuda()
        if cuda is None:
            return
        if collect:
            gc.collect()
        gpus = range(cuda.device_count())
        if collect or any(cuda.memory_reserved(gpu) > cuda.memory_allocated(gpu) for gpu in gpus):
            with suppress(RuntimeError):  # A device with a fault; see is_usable.
                cuda.empty_cache()

    def is_usable(self) -> bool:
        """Whether the device still answers."""
        cuda = self._cuda()
        if cuda is None:
            return True
        try:
            cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def _cuda(self) -> Any:
        if not self._is_gpu:
            return None
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        return cuda if cuda is not None and cuda.is_initialized() else None


class ProcessMemoryMeter:
    """Measures the process's own memory, for the lane of a CPU whose memory is limited."""

    def __init__(self) -> None:
        self._held = 0.0

    def begin(self) -> None:
        """Starts a measurement."""
        _trim()  # As at the end of a measurement: memory that goes back later would count as freed by the trial.
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write(_RESET_PEAK)
            self._held = _memory_of_process()["RssAnon"]
        except (OSError, KeyError):  # An old kernel, or one that forbids this in containers.
            self._held = -1.0

    def end(self) -> tuple[float, float] | None:
        """Ends a measurement: see :meth:`MemoryMeter.end`."""
        if self._held < 0.0:
            return None
        peak = _memory_of_process()["VmHWM"]
        _trim()  # Free memory that the allocator keeps is not the trial's.
        now = _memory_of_process()
        before, self._held = self._held, now["RssAnon"]
        return self._held - before, peak - now["VmRSS"]

    def release_cached(self, *, collect: bool = False) -> None:
        """Returns free memory to the system, after a collection only: see :meth:`MemoryMeter.release_cached`."""
        if collect:
            gc.collect()
            _trim()

    def is_usable(self) -> bool:
        """True: a CPU does not fail on its own."""
        return True


def make_memory_meter(options: LaneOptions) -> MemoryMeter:
    """Returns the meter for the memory of a lane's device."""
    bounded_cpu = options.kind == "cpu" and options.bounded
    return ProcessMemoryMeter() if bounded_cpu else DeviceMemoryMeter(options.kind)


def _trim() -> None:
    """Makes the C library return free memory to the system."""
    with suppress(OSError, AttributeError):  # Not glibc.
        ctypes.CDLL(None).malloc_trim(0)


def _memory_of_process() -> dict[str, float]:
    """The memory figures of /proc/self/status, bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        parts = [line.split() for line in file if line.endswith(" kB\n")]
    return {name.rstrip(":"): float(value) * 1024.0 for name, value, _ in parts}


class BusyMeter:
    """Measures the share of an interval in which this process kept its CPU device busy or waited for the processor.

    The remainder is what further trials on that device could use. On a GPU it measures nothing: only what a kernel
    leaves free tells whether another one fits beside it.

    Args:
        kind: kind of the lane's device.
        threads: how many computing threads the device is for.
    """

    def __init__(self, kind: str, threads: int) -> None:
        self._is_cpu = kind == "cpu"
        self._threads = max(1, threads)
        self._schedstat = -1
        self._computed = self._ran = self._waited = 0.0
        if self._is_cpu:
            with suppress(OSError):  # A kernel without scheduling statistics: time in the run queue then looks idle.
                self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    def begin(self) -> None:
        """Starts an interval."""
        if self._is_cpu:
            self._computed, (self._ran, self._waited) = processor_seconds(), self._main_thread()

    def end(self, seconds: float) -> float | None:
        """The share, from 0 to 1, of an interval of that many seconds; ``None`` if it is not measured."""
        if not self._is_cpu or seconds <= 0.0:
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
