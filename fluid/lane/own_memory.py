"""The GPU memory that a lane takes for itself: its CUDA context, loaded kernels and library workspaces, not tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from fluid.gpu.nvml import Gpu, find_gpus, process_bytes, processes_on, used_bytes
from fluid.lane.context_sizes import MOST, ContextSizes
from fluid.lane.messages import LaneOptions

#: A GPU of which processes hold fewer bytes has no context on it.
_UNUSED = 64e6
#: A change below this many bytes is not worth telling the driver.
_NOTABLE = 16 * 2**20


class OwnMemory:
    """Measures the memory that this process takes on its first GPU besides what its trials hold.

    NVML lists what each process holds. In a container it may list processes under numbers of the host: then the number
    that comes with the context is this process's. It may also list none: then the difference that the context makes to
    the whole device's memory counts, if no better figure is remembered (:mod:`fluid.lane.context_sizes`). For both,
    one lane of a device makes its context at a time.

    Args:
        options: the lane's.
    """

    def __init__(self, options: LaneOptions) -> None:
        self._is_gpu = options.kind == "gpu"
        self._folder = os.path.dirname(options.note)
        self._is_client = bool(options.environment)
        self._gpu = Gpu("", 0.0)
        self._sizes: ContextSizes | None = None
        #: The number under which NVML lists this process; ``None`` if it does not.
        self._pid: int | None = None
        #: Bytes of the context when it was new, if no other process held memory on the device then.
        self._exact: float | None = None
        #: Bytes that the driver was told last.
        self._told = 0.0

    def around(self, make_context: Callable[[], None]) -> float:
        """Makes the context; returns the bytes that it takes, 0 where that cannot be measured."""
        sizes = self._open()
        if sizes.are_listed or (sizes.lanes and sizes.remembered and not self._numbers()):
            make_context()  # There is nothing to compare.
            self._pid = os.getpid() if sizes.are_listed else None
        else:
            with sizes.turn() as is_alone:
                before, numbers = self._used(), self._numbers()
                make_context()
                self._pid = self._find_number(numbers, is_alone=is_alone)
                if self._pid is None and is_alone:
                    self._compare(sizes, before)
        sizes.add_lane(listed=self._pid == os.getpid())
        self._told = self._context() or 0.0
        return self._told

    def changed(self, held: float) -> float | None:
        """Returns the bytes that it takes now if they differ notably from those returned last; ``None`` otherwise.

        A context is smallest when it is new: each library and kernel that a trial uses for the first time adds to it.

        Args:
            held: bytes that the trials in the lane hold, while no memory is cached. The rest of what PyTorch has
                reserved is the lane's own, such as workspaces of cuBLAS.
        """
        if not self._is_gpu or not _uses_cuda():
            return None
        sizes = self._open()
        if self._pid is None and (sizes.are_listed or not sizes.lanes) and process_bytes(self._gpu.token, os.getpid()):
            self._pid = os.getpid()  # A trial has loaded PyTorch, and made the context.
        context = self._context(is_used=True)
        own = None if context is None else context + max(0.0, _reserved() - held)
        if own is None or abs(own - self._told) < _NOTABLE:
            return None
        self._told = own
        return own

    def _open(self) -> ContextSizes:
        """Finds the GPU, and what is known of contexts on it."""
        if self._sizes is None:
            self._gpu = next(iter(find_gpus()), self._gpu)
            release = getattr(sys.modules.get("torch"), "__version__", "")
            about = f"{self._gpu.name} torch {release}{' MPS' * self._is_client}"
            self._sizes = ContextSizes(self._folder, self._gpu.token, about)
        return self._sizes

    def _context(self, *, is_used: bool = False) -> float | None:
        """What the context takes now, or is estimated to take; once trials have used it, with what they loaded."""
        listed = None if self._pid is None else self._bytes_of(self._pid)
        if listed:
            return max(0.0, listed - _reserved())
        sizes = self._open()
        if self._exact is not None and is_used and sizes.lanes == 1 and (used := self._used()) is not None:
            # No other lane has come since the device was unused, so what is used there is this process's.
            sizes.add_growth(max(0.0, min(MOST, used - _reserved()) - self._exact))
        estimate = sizes.estimate
        return None if estimate is None else estimate + (sizes.grown if is_used else 0.0)

    # -- what NVML tells -----------------------------------------------------------------------------------

    def _numbers(self) -> set[int] | None:
        processes = processes_on(self._gpu.token)
        return None if processes is None else {process.pid for process in processes}

    def _find_number(self, before: set[int] | None, *, is_alone: bool) -> int | None:
        """The number of this process in NVML's list, which was not there before the context; ``None`` if unknown."""
        after = self._numbers()
        if before is None or after is None:
            return None
        new = {pid for pid in after - before if self._bytes_of(pid)}
        if os.getpid() in new:
            return os.getpid()
        return new.pop() if is_alone and len(new) == 1 and not self._is_client else None

    def _bytes_of(self, pid: int) -> float | None:
        processes = processes_on(self._gpu.token) or ()
        return next((process.memory_bytes for process in processes if process.pid == pid), None)

    def _used(self) -> float | None:
        """Bytes that processes hold on the device; with what the driver reserves, if it does not tell that apart."""
        used = used_bytes(self._gpu.token, reserved=False)
        return used if used is not None else used_bytes(self._gpu.token)

    def _compare(self, sizes: ContextSizes, before: float | None) -> None:
        """Adds the difference that the context has made to the device's memory."""
        after = self._used()
        if before is None or after is None:
            return
        difference, is_exact = after - before - _reserved(), before < _UNUSED and sizes.is_orderly
        sizes.add(difference, exact=is_exact)
        if is_exact and 0.0 < difference <= MOST:
            self._exact = difference


def _uses_cuda() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _reserved() -> float:
    """Bytes that PyTorch has reserved on the first GPU; 0 before CUDA is used."""
    return float(sys.modules["torch"].cuda.memory_reserved(0)) if _uses_cuda() else 0.0
