"""Objects that both the driver and an objective in a lane have: on their way between the two they stay the same.

pickle makes a new object of each function and instance that arrives. Optuna compares choices of a categorical parameter
by identity where they define no equality, and an objective may ask which of its own functions was suggested. So what
the driver sends with an objective gets a name. Of an object with a name, a message has the name, and the receiver
looks up its own.
"""

from __future__ import annotations

import io
import pickle
import uuid
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cloudpickle

from fluid.trainables.driver_link import is_plain

#: What this process has, by name, and the names by ``id()``; an object that is gone has no name.
_objects: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
_names: dict[int, tuple[bytes, weakref.ref[Any]]] = {}


def reduce_with_name(obj: Any, reduced: Any) -> Any:
    """Has the receiver of an objective know the functions and instances in it by name.

    Args:
        obj: what is pickled.
        reduced: its reduction, or ``NotImplemented`` for that of pickle.

    Returns:
        Its reduction.
    """
    if reduced is NotImplemented and is_copied_by_value(obj):
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    elif reduced is NotImplemented or type(obj) is not FunctionType:
        return reduced
    make, args, *state = reduced
    return _make_with_name, (_name_of(obj) or _give_name(obj, uuid.uuid4().bytes), make, args), *state


def is_copied_by_value(obj: Any) -> bool:
    """Whether pickle copies an instance attribute by attribute, as its class says nothing else."""
    cls: Any = type(obj)
    return (
        not isinstance(obj, (type, FunctionType))
        and cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__reduce__ is object.__reduce__
        and cls not in cloudpickle.Pickler.dispatch_table
        and cls.__weakrefoffset__ > 0
    )


class Message:
    """A request or an answer: the names of known objects are pickled in place of them.

    Args:
        value: is what the receiver gets.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)

    def __reduce__(self) -> Any:
        _MessagePickler(file := io.BytesIO()).dump(self._value)
        return pickle.loads, (file.getvalue(),)


def as_message(value: Any) -> Any:
    """Returns what to send for a value to arrive; itself if it holds atoms only."""
    return value if is_plain(value) else Message(value)


class _MessagePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        name = _name_of(obj)
        if name is None:
            return super().reducer_override(obj)
        # The driver may know objects that this lane does not have, such as the choices of an earlier objective.
        return _find, (name, cloudpickle.dumps(obj))


def _find(name: bytes, pickled: bytes) -> Any:
    found = _objects.get(name)
    return pickle.loads(pickled) if found is None else found


def _make_with_name(name: bytes, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    obj = make(*args)
    _give_name(obj, name)
    return obj


def _name_of(obj: Any) -> bytes | None:
    name, reference = _names.get(id(obj), (None, None))
    return name if reference is not None and reference() is obj else None


def _give_name(obj: Any, name: bytes) -> bytes:
    key = id(obj)
    _objects[name] = obj
    _names[key] = name, weakref.ref(obj, lambda _: _names.pop(key, None))
    return name
