"""A lane's device: binding to it, and measuring the memory trials take on it."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

from fluid.lane_messages import LaneOptions

#: Read by OpenMP, MKL, OpenBLAS and NumExpr when they are loaded.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def bind(options: LaneOptions) -> None:
    """Binds this process to its device. Called before anything can have touched CUDA.

    A lane of a CPU sees no GPU at all: trials that look for one would otherwise all take the first.
    """
    if options.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.visible
        # The order in which NVML counts them, which is how the driver chose this one.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(options.threads)
    if options.core is not None:
        with suppress(OSError, AttributeError):  # The core may have been taken from this container.
            os.sched_setaffinity(0, {options.core})
    torch = sys.modules.get("torch")
    if torch is not None:  # Loaded before the fork: it has read its environment already.
        torch.set_num_threads(options.threads)


def warm_up(options: LaneOptions) -> None:
    """Makes the CUDA context of a GPU's lane now, ahead of its first trial, if PyTorch is loaded."""
    torch = sys.modules.get("torch")
    if options.kind == "gpu" and torch is not None:
        try:
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
        except Exception:  # Whatever is wrong, a trial that needs the GPU will say so.
            traceback.print_exc()


class Meter:
    """Measures device memory around a piece of work. On a CPU, and before CUDA is used, it measures nothing.

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
        return self._held - before, float(cuda.max_memory_allocated()) - self._held

    def give_back(self) -> None:
        """Hands memory that no trial holds any more back to the device, where others need it."""
        cuda = self._cuda()
        if cuda is not None:
            gc.collect()
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
