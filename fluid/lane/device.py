"""A lane's device: binding to it, and measuring the memory trials take on it."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

from fluid.gpu.nvml import find_gpus, process_bytes, used_bytes
from fluid.lane.messages import LaneOptions

#: Read by OpenMP, MKL, OpenBLAS and NumExpr when they are loaded.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

#: Written to a process's clear_refs it makes the kernel forget the most memory that was ever resident.
_RESET_PEAK = "5"


def bind(options: LaneOptions) -> None:
    """Binds this process to its device. Called before anything can have touched CUDA.

    A lane of a CPU sees no GPU at all: trials that look for one would otherwise all take the first.
    """
    if options.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.visible
        # The order in which NVML counts them, which is how the driver chose this one.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.update(options.environment)
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(options.threads)
    if options.core is not None:
        with suppress(OSError, AttributeError):  # The core may have been taken from this container.
            os.sched_setaffinity(0, {options.core})
    torch = sys.modules.get("torch")
    if torch is not None:  # Loaded before the fork: it has read its environment already.
        torch.set_num_threads(options.threads)


def warm_up(options: LaneOptions) -> float:
    """Makes the CUDA context of a GPU's lane now, ahead of its first trial, if PyTorch is loaded.

    Returns:
        Bytes of device memory that the process takes for itself thereby; 0 where that is not known.
    """
    torch = sys.modules.get("torch")
    if options.kind != "gpu" or torch is None:
        return 0.0
    try:
        token = next((gpu.token for gpu in find_gpus()), "")
        before = used_bytes(token)
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return _own_bytes(token, before, float(torch.cuda.memory_reserved()))
    except Exception:  # Whatever is wrong, a trial that needs the GPU will say so.
        traceback.print_exc()
        return 0.0


def _own_bytes(token: str, before: float | None, reserved: float) -> float:
    """What this process takes on a GPU besides what PyTorch has reserved for tensors."""
    held = process_bytes(token, os.getpid())
    if not held:
        # NVML counts this process under another number, or has not seen it yet. What others took meanwhile is
        # counted along then, which errs on the safe side.
        after = used_bytes(token)
        held = None if before is None or after is None else after - before
    return 0.0 if held is None else max(0.0, held - reserved)


class Meter:
    """Measures device memory around a piece of work. Before CUDA is used, and here on a CPU, it measures nothing.

    PyTorch keeps memory that it has freed, and hands none of it to other processes. So a peak is what it had reserved,
    not what tensors took of that; and between two trials, or when there is nothing to do, it is given back.

    Args:
        kind: kind of the lane's device.
    """

    def __init__(self, kind: str) -> None:
        self._is_gpu = kind == "gpu"
        self._held = 0.0

    def begin(self) -> None:
        """Starts a measurement."""
        cuda = self._cuda()
        if cuda is not None:
            self._held = float(cuda.memory_allocated())
            cuda.reset_peak_memory_stats()

    def end(self) -> tuple[float, float] | None:
        """Waits for the device to finish, which also raises its errors.

        Returns:
            (bytes held more than at the beginning, bytes needed on top of what is held now), or ``None``.
        """
        cuda = self._cuda()
        if cuda is None:
            return None
        cuda.synchronize()
        before, self._held = self._held, float(cuda.memory_allocated())
        peak = max(float(cuda.max_memory_allocated()), float(cuda.max_memory_reserved()))
        return self._held - before, peak - self._held

    def give_back(self, *, collect: bool = False) -> None:
        """Hands memory that no trial holds any more back to the device, where others need it.

        Args:
            collect: whether to look for what only reference cycles hold, as after a trial has left.
        """
        cuda = self._cuda()
        if cuda is None:
            return
        if collect:
            gc.collect()
        if collect or cuda.memory_reserved() > cuda.memory_allocated():
            with suppress(RuntimeError):  # A device with a fault; see is_usable.
                cuda.empty_cache()

    def is_usable(self) -> bool:
        """Whether the device still answers; after some faults nothing but a new process helps."""
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


class ProcessMeter(Meter):
    """Measures the process's own memory instead: that of a CPU is the host's."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def begin(self) -> None:
        """Starts a measurement."""
        _trim()  # As at its end, or what goes back to the system then would count as the trial's.
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write(_RESET_PEAK)
            self._held = _memory_of_process()["RssAnon"]
        except (OSError, KeyError):  # An old kernel, or one that keeps this from containers.
            self._held = -1.0

    def end(self) -> tuple[float, float] | None:
        """Ends a measurement: see :meth:`Meter.end`."""
        if self._held < 0.0:
            return None
        peak = _memory_of_process()["VmHWM"]
        _trim()  # What the allocator keeps for later is not the trial's.
        now = _memory_of_process()
        before, self._held = self._held, now["RssAnon"]
        return self._held - before, peak - now["VmRSS"]

    def give_back(self, *, collect: bool = False) -> None:
        """Hands memory that no trial holds any more back to the system: see :meth:`Meter.give_back`."""
        if collect:
            gc.collect()
            _trim()


def _trim() -> None:
    """Has the C library hand memory that nobody uses back to the system."""
    with suppress(OSError, AttributeError):  # Not glibc.
        ctypes.CDLL(None).malloc_trim(0)


def make_meter(options: LaneOptions) -> Meter:
    """Returns what measures the memory of a lane's device."""
    return ProcessMeter() if options.kind == "cpu" and options.bounded else Meter(options.kind)


def _memory_of_process() -> dict[str, float]:
    """What the system says of this process's memory, bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        parts = [line.split() for line in file if line.endswith(" kB\n")]
    return {name.rstrip(":"): float(value) * 1024.0 for name, value, _ in parts}
