"""Copies of a trainable's state in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any, ClassVar

import torch

from fluid.elastic.state import ALIGNMENT, is_plain_tensor, lock_pages, map_leaves, mapped
from fluid.processes.memory_left import memory_left

#: Most bytes that the copies of all trainables of this process take, and the largest share of what is left of the
#: machine's memory for one of them. A state with no room is written as it is.
_MOST_BYTES = 4 * 2**30
_MOST_OF_LEFT = 0.25


class HostCopy:
    """A copy of a state, which nothing changes later.

    Attributes:
        state: with tensors on the CPU in place of those on a GPU.
    """

    def __init__(self, state: Any) -> None:
        self.state = state


class HostCopies:
    """Makes copies of one trainable's state, one at a time, in memory that is kept for the next one.

    Tensors that share a storage do so in the copy, too, and ``torch.save`` writes what it would write of the state. The
    memory is locked into RAM when it is used a second time: a GPU then copies to it at full speed (on an H200, 55 GB/s
    in place of 14). Locking takes 0.5 s a GB, which ten copies earn back.

    Args:
        kind: of the devices whose tensors are copied as memory; others are cloned.

    Attributes:
        kind: as above.
    """

    #: Bytes that the copies of this process take.
    taken: ClassVar[int] = 0

    def __init__(self, kind: str = "cuda") -> None:
        self.kind = kind
        #: ``uint8 (bytes,)``, or ``None`` before the first copy.
        self._memory: torch.Tensor | None = None
        self._is_locked = False
        self._latest: weakref.ref[HostCopy] | None = None

    def take(self, state: Any) -> HostCopy | None:
        """Copies a state: nested dicts, lists and tuples of tensors, and other values that can be copied.

        Returns:
            The copy, once the GPU has made it; ``None`` if no tensor of the state is on a GPU, something in it cannot
            be copied, the latest copy is still in use, or there is no room.
        """
        tensors: list[torch.Tensor] = []
        #: With where each begins in the memory.
        storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        size = 0

        def add(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal size
            if tensor.device.type == self.kind and not (tensor.is_conj() or tensor.is_neg()):
                tensors.append(tensor)
                storage = tensor.untyped_storage()
                if storage._cdata not in storages:
                    storages[storage._cdata] = storage, size
                    size += math.ceil(storage.nbytes() / ALIGNMENT) * ALIGNMENT
            return tensor

        map_leaves(state, is_plain_tensor, add)
        is_in_use = self._latest is not None and self._latest() is not None
        memory = None if is_in_use or not tensors else self._memory_for(size)
        if memory is None:
            return None
        parts = {}
        for key, (storage, begin) in storages.items():
            parts[key] = memory.untyped_storage()[begin : begin + storage.nbytes()]
            parts[key].copy_(storage, non_blocking=True)
        copied: HostCopy | None
        copies = {id(tensor): _like(tensor, parts[tensor.untyped_storage()._cdata]) for tensor in tensors}
        try:
            copied = HostCopy(copy.deepcopy(state, copies))
        except Exception:  # Such as of a tensor with a graph, or of a class of the user's: they may be written yet.
            copied = None
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # Training may go on in another stream.
        self._latest = None if copied is None else weakref.ref(copied)
        return copied

    def _memory_for(self, size: int) -> torch.Tensor | None:
        if self._memory is not None and len(self._memory) >= size:
            if not self._is_locked and self.kind == "cuda":
                lock_pages(self._memory)
            self._is_locked = True
            return self._memory
        self._memory, self._is_locked = None, False
        if HostCopies.taken + size > _MOST_BYTES or size > _MOST_OF_LEFT * (memory_left() or 0):
            return None
        try:
            self._memory = mapped(max(1, size))
        except OSError:  # A limit of the process, or of what the system promises.
            return None
        HostCopies.taken += len(self._memory)
        weakref.finalize(self._memory, _give_back, len(self._memory))
        return self._memory


def _give_back(size: int) -> None:
    HostCopies.taken -= size


def _like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns the tensor that this one is in a copy of its storage."""
    made = torch.empty(0, dtype=tensor.dtype)
    with torch.no_grad():
        made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
