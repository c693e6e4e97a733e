"""Snapshots of a trainable's state: tensors in a flat buffer per kind of device, cheap to copy, send and restore."""

from __future__ import annotations

import math
import mmap
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch

if TYPE_CHECKING:
    from fluid.elastic.groups.group import Group


# -- snapshot memory -----------------------------------------------------------------------------
#
# Buffers for snapshots: on the GPU if they are small beside what is free there, else page-locked host memory.


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
    memory = mapped(size)
    lock_pages(memory)
    return memory


def mapped(size: int) -> torch.Tensor:
    """Returns host memory of exactly this size, on pages of its own."""
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def lock_pages(memory: torch.Tensor) -> None:
    """Locks what :func:`mapped` has returned, until that is dropped; copies are slower if the system refuses it."""
    runtime, size = torch.cuda.cudart(), len(memory)
    address = memory.data_ptr()
    if int(runtime.cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    else:
        with suppress(RuntimeError, AssertionError):  # The next operation raises what CUDA notes of the refusal.
            torch.zeros(1, device="cuda")


# -- state ---------------------------------------------------------------------------------------


#: Tensors start at multiples of this many bytes, an alignment for every element type.
ALIGNMENT = 64
#: Bytes that are broadcast at a time; a member that stages them on its GPU needs as much memory there.
_CHUNK = 256 * 2**20
#: Kinds of devices that tensors are copied from.
_KINDS = ("cpu", "cuda")


class _TensorLocation(NamedTuple):
    """Replaces a tensor in the pickled rest: where it lies in the flat buffer of its kind of device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    offset: int


class Snapshot:
    """A copy of a state. Tensors of a GPU are kept on it if it has room, else in host memory.

    Attributes:
        rest: the state, pickled, with locations in place of its tensors.
        memory: by kind of device, ``uint8 (bytes,)``: all tensors that are on such a device.
    """

    def __init__(self, rest: bytes, memory: dict[str, torch.Tensor]) -> None:
        self.rest = rest
        self.memory = memory

    @classmethod
    def take(cls, state: Any, reuse: Snapshot | None = None) -> Snapshot:
        """Copies a state: nested dicts, lists and tuples of tensors and other picklable values.

        Args:
            state: the state. The call waits for a GPU only if the copy goes to host memory; otherwise the GPU copies
                it before it runs what is queued later.
            reuse: an older snapshot that is no longer needed, whose memory is used again if its sizes fit.
        """
        tensors: dict[str, list[tuple[_TensorLocation, torch.Tensor]]] = {kind: [] for kind in _KINDS}
        ends = dict.fromkeys(_KINDS, 0)

        def assign(tensor: torch.Tensor) -> _TensorLocation:
            kind = tensor.device.type
            location = _TensorLocation(tuple(tensor.shape), tensor.dtype, kind, ends[kind])
            tensors[kind].append((location, tensor.detach()))
            ends[kind] += math.ceil(tensor.numel() * tensor.element_size() / ALIGNMENT) * ALIGNMENT
            return location

        rest = cloudpickle.dumps(map_leaves(state, is_plain_tensor, assign))
        memory = {}
        for kind, size in ends.items():
            fits = reuse is not None and len(reuse.memory[kind]) == size
            memory[kind] = reuse.memory[kind] if reuse is not None and fits else allocate(kind, size)
            _copy(tensors[kind], memory[kind])
        if ends["cuda"] and memory["cuda"].device.type == "cpu":
            torch.cuda.current_stream().synchronize()
        return cls(rest, memory)

    def state(self) -> Any:
        """Returns a copy of the state, with its tensors on the devices that they came from."""

        def tensor_of(location: _TensorLocation) -> torch.Tensor:
            view = _view(self.memory[location.kind], location)
            return view.clone() if view.device.type == location.kind else view.to(location.kind)

        return map_leaves(pickle.loads(self.rest), lambda node: isinstance(node, _TensorLocation), tensor_of)


def broadcast(group: Group, snapshot: Snapshot | None) -> Snapshot:
    """Broadcasts rank 0's snapshot to every member of a group, from GPU to GPU where that is possible.

    Args:
        group: all its members call this.
        snapshot: rank 0's; ignored on other ranks.

    Raises:
        GenerationBrokenError: a member failed.
    """
    sizes = torch.zeros(1 + len(_KINDS), dtype=torch.int64)
    if group.rank == 0:
        assert snapshot is not None
        sizes = torch.tensor([len(snapshot.rest), *(len(snapshot.memory[kind]) for kind in _KINDS)])
    group.broadcast(sizes)
    length, *totals = sizes.tolist()
    if group.rank == 0:
        assert snapshot is not None
        rest, memory = torch.frombuffer(bytearray(snapshot.rest), dtype=torch.uint8), snapshot.memory
    else:
        rest = torch.empty(length, dtype=torch.uint8)
        memory = {kind: allocate(kind, total) for kind, total in zip(_KINDS, totals, strict=True)}
    group.broadcast(rest)
    for kind, total in zip(_KINDS, totals, strict=True):
        for begin in range(0, total, _CHUNK):
            group.broadcast(memory[kind][begin : begin + _CHUNK])
    return Snapshot(rest.numpy().tobytes(), memory)


def is_plain_tensor(node: Any) -> bool:
    # Sparse and quantized tensors, and subclasses, are pickled with the rest.
    plain = type(node) in (torch.Tensor, torch.nn.Parameter)
    return plain and node.layout == torch.strided and not node.is_quantized and node.device.type in _KINDS


def _copy(tensors: list[tuple[_TensorLocation, torch.Tensor]], memory: torch.Tensor) -> None:
    if tensors:
        views = [_view(memory, location) for location, _ in tensors]
        torch._foreach_copy_(views, [tensor for _, tensor in tensors], non_blocking=True)


def _view(memory: torch.Tensor, location: _TensorLocation) -> torch.Tensor:
    size = math.prod(location.shape) * location.dtype.itemsize
    return memory[location.offset : location.offset + size].view(location.dtype).view(location.shape)


def map_leaves(node: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Copies nested containers, and changes some of their leaves."""
    if wanted(node):
        return change(node)
    if type(node) in (dict, OrderedDict):
        copy = type(node)((key, map_leaves(value, wanted, change)) for key, value in node.items())
        if hasattr(node, "_metadata"):  # Modules keep the versions of their submodules there.
            copy._metadata = node._metadata
        return copy
    if type(node) in (list, tuple):
        return type(node)(map_leaves(value, wanted, change) for value in node)
    return node
