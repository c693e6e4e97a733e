"""Pickles values so that the bytes of their arrays, tensors and tables stay apart from the pickle.

NumPy arrays and Arrow tables do that by themselves, by protocol 5, with exceptions that are handled here. PyTorch does
not: its tensors are reduced to their storages here. Neither library is imported: a value that needs one comes with it.
"""

from __future__ import annotations

import pickle
import sys
from io import BytesIO
from typing import Any, NamedTuple

import cloudpickle

from fluid.trainables.ray_handles import reduce_handle


class Pickled(NamedTuple):
    """A pickled value.

    Attributes:
        pickle: the pickle without its buffers.
        buffers: bytes of the buffers, in the order in which they are unpickled.
        is_writable: for each buffer, whether the library must be given writable memory, as PyTorch.
    """

    pickle: memoryview
    buffers: tuple[memoryview, ...]
    is_writable: tuple[bool, ...]


def dump_shared(value: Any) -> Pickled:
    """Pickles a value; the buffers are views of its memory, not copies, wherever that is contiguous."""
    file = BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = SharedPickler(file, buffers)
    pickler.dump(value)
    writable = tuple(id(buffer) in pickler.writable for buffer in buffers)
    return Pickled(file.getbuffer(), tuple(buffer.raw() for buffer in buffers), writable)


class SharedPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles classes that lanes cannot import by value, as trainables are pickled.

    Attributes:
        writable: identities of the buffers that belong to tensors.
    """

    def __init__(self, file: BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.writable: set[int] = set()
        #: By address: tensors that share memory when they are pickled share it afterwards.
        self._storages: dict[int, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        numpy: Any = sys.modules.get("numpy")
        torch: Any = sys.modules.get("torch")
        reduced = reduce_handle(obj)
        if numpy is not None and type(obj) in (numpy.ndarray, getattr(numpy, "memmap", None)):
            reduced = _reduce_array(numpy, obj)
        elif hasattr(torch, "UntypedStorage"):  # Not in a module that is being imported.
            if type(obj) is torch.Tensor:
                reduced = self._reduce_tensor(torch, obj)
            elif type(obj) is torch.UntypedStorage and obj.device.type == "cpu":
                reduced = self._reduce_storage(torch, obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
        if not (is_plain and tensor.is_leaf) or tensor.is_conj() or tensor.is_neg():
            return NotImplemented
        storage = tensor.untyped_storage()
        storage = self._storages.setdefault(storage.data_ptr(), storage)
        shape = tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
        return _make_tensor, (storage, tensor.dtype, *shape, tensor.requires_grad)

    def _reduce_storage(self, torch: Any, storage: Any) -> Any:
        if storage.nbytes() == 0:
            return _make_storage, (b"",)
        buffer = pickle.PickleBuffer(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        self.writable.add(id(buffer))
        return _make_storage, (buffer,)


def _reduce_array(numpy: Any, array: Any) -> Any:
    """Handles arrays that NumPy would pickle as a copy: times, maps of files, and arrays that are not contiguous."""
    if array.dtype.hasobject:
        return NotImplemented
    plain = numpy.asarray(array)
    if array.dtype.kind in "mM":
        return _view_as, (plain.view("i8"), array.dtype)
    if not (plain.flags.c_contiguous or plain.flags.f_contiguous):
        plain = numpy.ascontiguousarray(plain)
    return NotImplemented if plain is array else plain.__reduce_ex__(5)


def _view_as(array: Any, dtype: Any) -> Any:
    return array.view(dtype)


def _make_storage(buffer: Any) -> Any:
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _make_tensor(
    storage: Any, dtype: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride).requires_grad_(requires_grad)
