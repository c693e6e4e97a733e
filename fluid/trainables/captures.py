"""What a trainable, or a config, takes along that is large: which variables, and how many bytes of each.

All of it is written to the run folder, and sent to each process that runs a trial. So who gives a data set by a global
variable, a closure or an attribute, which is easily done unawares, is told its name.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from fluid.trainables.pickling import parts_of
from fluid.trainables.script_names import ScriptPickler

#: Bytes of a pickled trainable or config from which on it is told what they are.
LARGE_CAPTURE = 16_000_000
#: Captures that are named at most, and the share of the whole that each of them has at least.
_MOST_NAMED, _LEAST_SHARE = 3, 0.02
#: A part that has at least this share of a capture is named in place of it; names at most, from the outside in.
_MAIN_SHARE, _DEEPEST = 0.8, 4


class Capture(NamedTuple):
    """A variable that is taken along.

    Attributes:
        name: by which the trainable refers to it, from the outside in: ``"DATA"``, ``"self.images"``.
        size: bytes, pickled.
        shown: bytes of what it shows, if it is a small view of a larger tensor, all of which goes along; else 0.
    """

    name: str
    size: int
    shown: int = 0


def captures_in(value: Any) -> list[Capture]:
    """The variables of a large value that take most, the largest first; at a cost like that of pickling it twice.

    There are none if what makes it large was given on purpose, by Ray's ``with_parameters``.
    """
    parts = list(value.items()) if isinstance(value, Mapping) else _distinct(parts_of(value))
    found = sorted(((_size_of(part), str(name), part) for name, part in parts), key=lambda one: -one[0])
    total = sum(size for size, _, _ in found)
    if total < LARGE_CAPTURE / 2:
        return []
    return [_main_part(name, size, part) for size, name, part in found[:_MOST_NAMED] if size >= _LEAST_SHARE * total]


def _main_part(name: str, size: int, value: Any) -> Capture:
    names = [name]
    while len(names) < _DEEPEST:
        parts = ((_size_of(part), inner, part) for inner, part in _distinct(parts_of(value)))
        largest, inner, part = max(parts, key=lambda one: one[0], default=(0, "", None))
        if largest < _MAIN_SHARE * size:
            break
        names.append(inner)
        size, value = largest, part
    return Capture(".".join(names), size, _shown_bytes(value, size))


def _distinct(parts: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Parts, each once; what Ray has been given on purpose, by ``with_parameters``, is none."""
    registry: Any = getattr(sys.modules.get("ray.tune.registry"), "_ParameterRegistry", ())
    own = [(name, part) for name, part in parts if not (name.startswith("__") or isinstance(part, registry))]
    return list({id(part): (name, part) for name, part in own}.values())


def _shown_bytes(value: Any, size: int) -> int:
    tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
    if not isinstance(value, tensor):
        return 0
    shown = int(value.numel() * value.element_size())
    return shown if 4 * shown < size else 0


class _Counted:
    """A file that keeps nothing but the number of bytes."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        return len(data)


def _size_of(value: Any) -> int:
    """Bytes of a value, pickled; 0 if it cannot be by itself."""
    file = _Counted()

    def count(buffer: pickle.PickleBuffer) -> None:  # Which so is not copied.
        file.size += buffer.raw().nbytes

    try:
        ScriptPickler(file, protocol=5, buffer_callback=count).dump(value)
    except (Exception, SystemExit, GeneratorExit):  # A __reduce__ may raise anything.
        return 0
    return file.size
