"""Comparison of values of the user, such as those of a config: arrays, tables, tensors, objects of any class.

Their ``==`` may give an array, raise an error or have no truth value, and ``is`` tells copies apart. So no other module
compares a user's values, or asks whether one is true.
"""

from __future__ import annotations

import io
import json
import numbers
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

#: Types whose ``==`` gives a truth value.
_PLAIN = frozenset({str, int, float, complex, bool, bytes, type(None)})


def is_same_value(one: Any, other: Any) -> bool:
    """Whether two values are surely the same, of the same type; never raises.

    Dicts, lists and tuples are compared entry by entry, a dict's whatever their order. Values of other classes are the
    same if they are one object or their pickles are equal: 1 and True differ, and NaN is NaN. In doubt, as of values
    that cannot be pickled, two values differ.

    Example:
        >>> import numpy as np
        >>> from fluid.user_values import is_same_value
        >>> is_same_value({"weights": np.array([1.0, 2.0])}, {"weights": np.array([1.0, 2.0])})
        True
    """
    try:
        return _is_same(one, other)
    except Exception:
        return False


def is_equal_value(one: Any, other: Any) -> bool:
    """Whether two values, perhaps of different types, are equal by ``==``; never raises.

    They are not if the answer is not one truth value, but an array.
    """
    try:
        equal = one == other
        return type(equal).__name__ in ("bool", "bool_") and bool(equal)
    except Exception:
        return False


def dotted(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the names and values of a config; names of nested ones are joined by a dot."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def text_of(value: Any) -> str:
    """A text of a value that other processes give it, too; never raises.

    Dicts are in the order of their names. Of what is neither a text, a number, a dataclass nor a list or dict of these,
    the text has only the name: of a function or class its own, of any other object that of its class.

    Example:
        >>> from fluid.user_values import text_of
        >>> text_of({"lr": 0.1, "activation": len, "device": object()})
        '{"activation": "len", "device": "object", "lr": 0.1}'
    """
    try:
        return json.dumps(value, sort_keys=True, default=_text_of_other)
    except Exception:  # Its names are no texts, it contains itself, or its class raises.
        return type(value).__qualname__


def _text_of_other(value: Any) -> Any:
    if isinstance(value, numbers.Number):  # Such as NumPy's.
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__qualname__: {field.name: getattr(value, field.name) for field in fields(value)}}
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _is_same(one: Any, other: Any) -> bool:
    kind = type(one)
    if one is other:
        return True
    if kind is not type(other):
        return False
    if kind in _PLAIN:
        return bool(one == other or (one != one and other != other))
    if kind is dict:
        return len(one) == len(other) and all(name in other and _is_same(one[name], other[name]) for name in one)
    if kind is list or kind is tuple:
        return len(one) == len(other) and all(map(_is_same, one, other))
    return _pickled(one) == _pickled(other)


def _pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    """The pickle of a value, with its large buffers beside it, uncopied."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _ContentPickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


class _ContentPickler(pickle.Pickler):
    """Pickles PyTorch's tensors by their content: their own pickles hold addresses."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return tuple, ((value.dtype, value.shape, str(value.device), value.requires_grad, content),)
