"""The functions and classes of the script, by their names: a lane has them in its ``__main__``, as the script does.

cloudpickle sends what the script defines by value, and leaves no trace of it in the receiver's ``__main__``. There,
pickle looks for it: for a process pool of a trial, the workers of a DataLoader, or what a trial saves. So what the
script has under its own name says, as it is unpickled, that the receiver is to have it there, too.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from fluid.trainables.ray_handles import reduce_handle

MAIN = "__main__"
#: Most bytes of a pickled function or class that the trainable does not refer to, but names in a text.
_LARGEST_MENTIONED = 1 << 20
#: The module that takes what is unpickled; ``None`` in processes that have a script of their own.
_receiver: ModuleType | None = None
Rule = Callable[[Any, Any], Any]
#: The rule of each thread, if it has one.
_pickling = threading.local()


class ByValue:
    """Mixed into a class of cloudpickle's: what it pickles of the script is put into the receiver's ``__main__``.

    Handles of Ray are pickled so that the receiver can use them. Tensors of PyTorch that share memory, as views do,
    share it afterwards, too: that memory is pickled once, and not for each of them.
    """

    #: What holds the memory of tensors, by its address and what it holds; made when there is a first one.
    _storages: dict[tuple[int, Any], Any] | None = None

    def reducer_override(self, obj: Any) -> Any:
        if (handle := reduce_handle(obj)) is not NotImplemented:
            return handle
        torch: Any = sys.modules.get("torch")
        if type(obj) is getattr(torch, "Tensor", None) and (tensor := self._reduce_tensor(torch, obj)) is not None:
            return tensor
        reduced = super().reducer_override(obj)  # type: ignore[misc]
        if type(reduced) is tuple and len(reduced) == 6 and callable(reduced[5]) and is_of_script(obj):
            make, arguments, state, items, pairs, setter = reduced
            reduced = make, arguments, (setter, state), items, pairs, _settle
        rule: Rule | None = getattr(_pickling, "rule", None)
        return reduced if rule is None else rule(obj, reduced)

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        """PyTorch's own reduction with the storage of the first tensor there; ``None`` where that is another."""
        if tensor.layout != torch.strided or not tensor.is_leaf:
            return None
        reduced = tensor.__reduce_ex__(2)
        address = tensor.untyped_storage().data_ptr() if isinstance(reduced[1], tuple) and reduced[1] else 0
        if not address or not isinstance(reduced[1][0], torch.storage.TypedStorage):
            return None
        if self._storages is None:
            self._storages = {}
        storage, *arguments = reduced[1]
        storage = self._storages.setdefault((address, tensor.dtype), storage)
        return reduced[0], (storage, *arguments), *reduced[2:]


class ScriptPickler(ByValue, cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what users give."""


@contextmanager
def pickling_by(rule: Rule) -> Iterator[None]:
    """Has a rule say how objects are pickled that users give in this thread.

    Args:
        rule: takes each object and its reduction, ``NotImplemented`` for that of pickle; returns its reduction.
    """
    before = getattr(_pickling, "rule", None)
    _pickling.rule = rule
    try:
        yield
    finally:
        _pickling.rule = before


def dumps(value: Any) -> bytes:
    """Pickles what users give."""
    file = io.BytesIO()
    ScriptPickler(file).dump(value)
    return file.getvalue()


def is_of_script(value: Any) -> bool:
    """Whether that is a function or a class which the script has under its own name, or a copy of such a function.

    Ray Tune's registry gives copies.
    """
    try:
        if not isinstance(value, (FunctionType, type)) or value.__module__ != MAIN:
            return False
        known = vars(sys.modules[MAIN]).get(value.__qualname__)
        return known is value or (
            isinstance(value, FunctionType) and isinstance(known, FunctionType) and known.__code__ == value.__code__
        )
    except Exception:  # A metaclass may raise anything.
        return False


def names_of_script() -> tuple[str, ...]:
    """Returns the full names of all its functions and classes; a trainable that holds them can look them up."""
    return tuple(f"{MAIN}.{name}" for name, value in list(vars(sys.modules[MAIN]).items()) if is_of_script(value))


def receive_in(module: ModuleType) -> None:
    """Has a module take, from now on, what this process unpickles of the script; it is also its ``__main__``."""
    global _receiver
    _receiver = module
    sys.modules[MAIN] = module


def _settle(value: Any, state: tuple[Any, Any]) -> None:
    """Completes a function or class that was unpickled."""
    setter, own = state
    setter(value, own)
    if _receiver is None:
        return
    names = vars(_receiver)
    names[value.__qualname__] = value
    if isinstance(value, FunctionType):  # What it refers to, the script has as well.
        for name, found in value.__globals__.items():
            names.setdefault(name, found)


def mentioned_in(pickled: bytes) -> dict[str, bytes]:
    """Pickles what is named in a text only, such as ``"__main__.Model"`` of a config; what cannot be is left out.

    Args:
        pickled: the trainable; what it refers to itself is in there.
    """
    found: dict[str, bytes] = {}
    mark = f"{MAIN}.".encode()
    at = pickled.find(mark)
    while at >= 0:
        at += len(mark)
        end = at
        while end < len(pickled) and (pickled[end : end + 1].isalnum() or pickled[end : end + 1] == b"_"):
            end += 1
        name = pickled[at:end].decode()
        value = vars(sys.modules[MAIN]).get(name)
        if name not in found and is_of_script(value):
            found[name] = _dump_bounded(value)
        at = pickled.find(mark, end)
    return {name: data for name, data in found.items() if data}


def dump_each(values: dict[str, Any]) -> bytes:
    """Pickles a dict, without those of its values that cannot be."""
    try:
        return dumps(values)
    except Exception:
        return dumps({name: value for name, value in values.items() if _dump_bounded(value, sys.maxsize)})


class BoundedFile:
    """A file in memory that refuses to grow beyond a size."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self._most = most

    def write(self, data: bytes) -> int:
        """Appends to it."""
        if len(self.data) + len(data) > self._most:
            raise OverflowError("too large")
        self.data += data
        return len(data)


def _dump_bounded(value: Any, most: int = _LARGEST_MENTIONED) -> bytes:
    """Pickles a value; returns nothing if that is larger, or cannot be."""
    try:
        ScriptPickler(file := BoundedFile(most)).dump(value)
    except (Exception, SystemExit, GeneratorExit):  # A __reduce__ may raise anything.
        return b""
    return bytes(file.data)
