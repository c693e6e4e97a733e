"""What ``ray.tune.with_parameters`` gives to a trainable, kept once per host where that is large.

Ray puts the values in its object store when Ray runs, and else leaves them in the trainable, with which Fluid pickles
them. Here the large ones become parts beside the pickle. A host keeps those in one file, which all its lanes map. As
in Ray's object store, arrays are read-only, and each trial gets a value of its own.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from fluid.shared_data.mapped_file import pieces_of, read_copied, read_shared
from fluid.shared_data.pickling import Pickled, dump_shared
from fluid.trainables.parted_pickle import PartWriter, TrainablePart
from fluid.trainables.script_names import ScriptPickler

#: Least size of the arrays, tensors and tables of a trainable's parameters that are kept apart, bytes in all.
LARGE_PARAMETERS = 1 << 20


class TrialParameters:
    """Stands for Ray's registry of the parameters of a trainable, where that is unpickled.

    Args:
        values: the parameters, by Ray's name; a :class:`KeptValue` stands for its value, and so does a reference to
            Ray's object store.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def get(self, name: str) -> Any:
        """Returns a parameter, as Ray's registry does."""
        value = self._values[name]
        if isinstance(value, KeptValue):
            return value.load()
        ray: Any = sys.modules.get("ray")
        return ray.get(value) if isinstance(value, getattr(ray, "ObjectRef", ())) else value


class KeptValue:
    """A value of which the arrays, tensors and tables lie beside the pickle of a trainable.

    Args:
        content: the value, pickled; or where it lies.
    """

    def __init__(self, content: Pickled | TrainablePart) -> None:
        self._content = content

    def load(self) -> Any:
        """Returns the value, unpickled anew; its arrays and tables are read-only and its tensors the caller's own."""
        content = self._content
        if isinstance(content, TrainablePart) and not isinstance(content.source, bytes):
            return read_shared(content.source.descriptor, content.offset)
        return read_copied(memoryview(b"".join(self.pieces())))

    def pieces(self) -> list[memoryview]:
        """Returns the bytes of the file of the value, piece by piece."""
        content = self._content
        if isinstance(content, Pickled):
            return list(pieces_of(content))
        source = content.source
        if isinstance(source, bytes):
            return [memoryview(source)[content.offset : content.offset + content.length]]
        with open(source.descriptor, "rb", closefd=False) as file:
            file.seek(content.offset)
            return [memoryview(file.read(content.length))]

    def __reduce__(self) -> tuple[Any, ...]:
        """Takes the bytes into a pickle that can have no parts."""
        data = b"".join(self.pieces())
        return KeptValue, (TrainablePart(data, 0, len(data)),)


def dump_with_parameters(value: Any) -> bytes:
    """Pickles a trainable; to be read by :mod:`fluid.trainables.parted_pickle`."""
    pickler = _ParameterPickler(file := io.BytesIO())
    pickler.dump(value)
    return pickler.parts.join(file.getvalue())


class _ParameterPickler(ScriptPickler):
    """Pickles large parameters as parts.

    Attributes:
        parts: what lies beside the pickle.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.parts = PartWriter()
        #: Place of each value in the pickle, by id(); keeping the value keeps its id from being reused.
        self._places: dict[int, tuple[KeptValue, int, int]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not KeptValue:
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = (obj, *self.parts.add(obj.pieces()))
        return KeptValue, *self._places[id(obj)][1:]

    def reducer_override(self, obj: Any) -> Any:
        registry: Any = getattr(sys.modules.get("ray.tune.registry"), "_ParameterRegistry", None)
        if registry is not None and type(obj) is registry:
            return _reduce_registry(obj)
        return super().reducer_override(obj)


def _reduce_registry(registry: Any) -> tuple[Any, ...]:
    # Those that are in Ray's object store are read from there: a lane is not connected to it.
    values = {**{name: registry.get(name) for name in registry.references}, **registry.to_flush}
    pickled = {name: dump_shared(value) for name, value in values.items()}
    if sum(map(_buffer_bytes, pickled.values())) < LARGE_PARAMETERS:
        return _make_parameters, ({name: _copied(one) for name, one in pickled.items()},)
    # A trial unpickles what is kept: that is to be little.
    kept = {name: KeptValue(one) if _buffer_bytes(one) > one.pickle.nbytes else None for name, one in pickled.items()}
    return _make_parameters, (
        {name: _copied(pickled[name]) if value is None else value for name, value in kept.items()},
    )


def _buffer_bytes(pickled: Pickled) -> int:
    return sum(buffer.nbytes for buffer in pickled.buffers)


def _copied(pickled: Pickled) -> tuple[bytes, list[bytearray]]:
    """Returns a pickled value that is small, or has small arrays only: each lane has its own, and may write to it."""
    return bytes(pickled.pickle), [bytearray(buffer) for buffer in pickled.buffers]


def _make_parameters(pickled: Mapping[str, Any]) -> TrialParameters:
    return TrialParameters(
        {
            name: value if isinstance(value, KeptValue) else pickle.loads(value[0], buffers=value[1])
            for name, value in pickled.items()
        }
    )
