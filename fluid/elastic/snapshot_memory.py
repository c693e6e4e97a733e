"""Buffers for snapshots: on the GPU if they are small beside what is free there, else page-locked host memory."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import torch

#: The share of a GPU's unused memory that a snapshot may take. Training needs the rest, and loading the snapshot needs
#: as much again for a moment.
_MOST_OF_UNUSED = 0.25


def allocate(kind: str, size: int) -> torch.Tensor:
    """Returns ``uint8 (size,)`` for tensors on devices of a kind, ``"cpu"`` or ``"cuda"``."""
    if kind == "cpu" or not size or not torch.cuda.is_available():
        return torch.empty(size, dtype=torch.uint8)
    if fits_on_gpu(size):
        with suppress(torch.cuda.OutOfMemoryError):  # The unused memory may be in pieces.
            return torch.empty(size, dtype=torch.uint8, device="cuda")
    return _page_locked(size)


def fits_on_gpu(size: int) -> bool:
    """Whether the current GPU has room for a snapshot, within this process's limit."""
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    limit = torch.cuda.get_per_process_memory_fraction() if _HAS_LIMIT else 1.0
    unused = min(free, limit * total - reserved) + reserved - torch.cuda.memory_allocated()
    return bool(size <= _MOST_OF_UNUSED * unused)


#: Older versions of PyTorch do not tell a process's limit.
_HAS_LIMIT = hasattr(torch.cuda, "get_per_process_memory_fraction")


def _page_locked(size: int) -> torch.Tensor:
    """Returns host memory of exactly this size, which a GPU copies to and from at full speed.

    PyTorch's own allocator rounds sizes up to a power of two, and locking takes up to a second a gigabyte.
    """
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    if int(runtime.cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    else:
        with suppress(RuntimeError, AssertionError):  # The next operation raises what CUDA notes of the refusal.
            torch.zeros(1, device="cuda")
    return memory  # Without the lock, if the system refused it: copies are slower then.
