"""Snapshots of a trainable's state: all tensors in one flat buffer, which is cheap to copy, send and restore."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch

if TYPE_CHECKING:
    from fluid.elastic.group import Group

#: Tensors start at multiples of this many bytes, an alignment for every element type.
_ALIGNMENT = 64
#: Bytes that are broadcast at a time; NCCL needs as much device memory.
_CHUNK = 256 * 2**20


class _TensorLocation(NamedTuple):
    """Replaces a tensor in the pickled rest: where it lies in the flat buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    offset: int


class Snapshot:
    """A copy of a state, in host memory.

    Attributes:
        rest: the state, pickled, with locations in place of its tensors.
        memory: ``uint8 (bytes,)``, all tensors.
    """

    def __init__(self, rest: bytes, memory: torch.Tensor) -> None:
        self.rest = rest
        self.memory = memory

    @classmethod
    def take(cls, state: Any, reuse: Snapshot | None = None) -> Snapshot:
        """Copies a state: nested dicts, lists and tuples of tensors and other picklable values.

        Args:
            state: the state; the call waits for GPUs to compute it.
            reuse: an older snapshot that is no longer needed, whose memory is used again if its size fits.
        """
        tensors: list[tuple[_TensorLocation, torch.Tensor]] = []
        end = 0

        def assign(tensor: torch.Tensor) -> _TensorLocation:
            nonlocal end
            location = _TensorLocation(tuple(tensor.shape), tensor.dtype, tensor.device.type, end)
            tensors.append((location, tensor.detach()))
            end += math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT
            return location

        rest = cloudpickle.dumps(_map(state, _is_plain_tensor, assign))
        on_gpu = any(location.device == "cuda" for location, _ in tensors)
        if reuse is not None and len(reuse.memory) == end and reuse.memory.is_pinned() == on_gpu:
            memory = reuse.memory
        else:
            memory = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        for location, tensor in tensors:
            _view(memory, location).copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return cls(rest, memory)

    def state(self) -> Any:
        """Returns a copy of the state, with its tensors on the devices that they came from."""

        def tensor_of(location: _TensorLocation) -> torch.Tensor:
            view = _view(self.memory, location)
            return view.clone() if location.device == "cpu" else view.to(location.device)

        return _map(pickle.loads(self.rest), lambda node: isinstance(node, _TensorLocation), tensor_of)


def broadcast(group: Group, snapshot: Snapshot | None) -> Snapshot:
    """Broadcasts rank 0's snapshot to every member of a group.

    Args:
        group: all its members call this.
        snapshot: rank 0's; ignored on other ranks.

    Raises:
        GenerationBrokenError: a member failed.
    """
    sizes = torch.zeros(2, dtype=torch.int64)
    if group.rank == 0:
        assert snapshot is not None
        sizes = torch.tensor([len(snapshot.rest), len(snapshot.memory)])
    group.broadcast(sizes)
    length, total = sizes.tolist()
    if group.rank == 0:
        assert snapshot is not None
        rest, memory = torch.frombuffer(bytearray(snapshot.rest), dtype=torch.uint8), snapshot.memory
    else:
        rest = torch.empty(length, dtype=torch.uint8)
        memory = torch.empty(total, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    group.broadcast(rest)
    for begin in range(0, total, _CHUNK):
        group.broadcast(memory[begin : begin + _CHUNK])
    return Snapshot(rest.numpy().tobytes(), memory)


def _is_plain_tensor(node: Any) -> bool:
    # Sparse and quantized tensors, and subclasses, are pickled with the rest.
    plain = type(node) in (torch.Tensor, torch.nn.Parameter)
    return plain and node.layout == torch.strided and not node.is_quantized and node.device.type in ("cpu", "cuda")


def _view(memory: torch.Tensor, location: _TensorLocation) -> torch.Tensor:
    size = math.prod(location.shape) * location.dtype.itemsize
    return memory[location.offset : location.offset + size].view(location.dtype).view(location.shape)


def _map(node: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Copies nested containers, and changes some of their leaves."""
    if wanted(node):
        return change(node)
    if type(node) in (dict, OrderedDict):
        copy = type(node)((key, _map(value, wanted, change)) for key, value in node.items())
        if hasattr(node, "_metadata"):  # Modules keep the versions of their submodules there.
            copy._metadata = node._metadata
        return copy
    if type(node) in (list, tuple):
        return type(node)(_map(value, wanted, change) for value in node)
    return node
