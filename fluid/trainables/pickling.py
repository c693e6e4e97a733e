"""Pickles what users give, and what trials return.

A lane is another process: it has neither the driver's ``__main__`` nor modules that exist only there.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle

from fluid.errors import InvalidFieldError
from fluid.trainables.import_scan import ImportScan, can_be_imported

_PLAIN = frozenset({int, float, str, bool, type(None)})
#: Most bytes of an exception that is sent to the driver; of a larger one only the traceback is sent.
_LARGEST_EXCEPTION = 1 << 20
#: Held while modules are registered for pickling by value, which concerns the whole process.
_BY_VALUE = threading.RLock()


def dump_trainable(trainable: Any, dumps: Callable[[Any], bytes] | None = None, pickler: Any = cloudpickle) -> bytes:
    """Pickles a trainable, by value where a lane could not import it.

    Args:
        trainable: what the user gave.
        dumps: does the pickling; ``None`` for that of ``pickler``.
        pickler: the module, cloudpickle or a copy of it, in which modules to pickle by value are registered.

    Raises:
        InvalidFieldError: it cannot be pickled.
    """
    with _BY_VALUE, ExitStack() as stack:
        for name in sorted(ImportScan(trainable).modules):
            module = sys.modules.get(name)
            if module is not None and not can_be_imported(name):
                _pickle_by_value(module, stack, pickler)
        return _dump("trainable", trainable, dumps or pickler.dumps)


def dump_config(config: Mapping[str, Any]) -> bytes:
    """Pickles a trial's config as a plain dict.

    Raises:
        InvalidFieldError: it cannot be pickled; the field names the entry, as in ``config['data']``.
    """
    plain = dict(config)
    try:
        return bytes(cloudpickle.dumps(plain))
    except Exception:
        for name, value in plain.items():
            _dump(f"config[{name!r}]", value)
        return _dump("config", plain)


class Packed(NamedTuple):
    """Metrics that hold more than plain values.

    They are pickled separately: a driver that cannot unpickle them still reads ``plain``, and the rest of the batch.
    """

    payload: bytes
    plain: dict[str, Any]


def pack_metrics(metrics: Mapping[str, Any]) -> dict[str, Any] | Packed:
    """Prepares metrics for sending; scalars of NumPy and PyTorch become plain numbers.

    Raises:
        TypeError: a value cannot be pickled.
    """
    plain: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in metrics.items():
        if type(value) not in _PLAIN and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        (plain if _is_plain(value) else others)[name] = value
    if not others:
        return plain
    try:
        return Packed(cloudpickle.dumps({**plain, **others}), plain)
    except BaseException as error:  # Their __reduce__ is the user's, and may raise anything.
        raise TypeError(f"these metrics cannot be pickled: {', '.join(map(str, others))}: {error}") from error


def dump_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Pickles the arguments of a call.

    Raises:
        InvalidFieldError: one cannot be pickled; the field names it, as in ``args[0]``.
    """
    try:
        return bytes(cloudpickle.dumps((args, dict(kwargs))))
    except Exception:
        for position, value in enumerate(args):
            _dump(f"args[{position}]", value)
        for name, value in kwargs.items():
            _dump(name, value)
        return _dump("args", (args, dict(kwargs)))


def dump_result(result: Any) -> bytes:
    """Pickles what a call returned.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise TypeError(f"what the method returned cannot be pickled: {error}") from error


def dump_exception(error: BaseException) -> bytes | None:
    """Pickles an exception; ``None`` if it is too large, or cannot be pickled or unpickled."""
    buffer = _Bounded(_LARGEST_EXCEPTION)
    try:
        cloudpickle.dump(error, buffer)
        read = pickle.loads(buffer.data)
    except BaseException:  # The exception's __reduce__ and __init__ may raise anything.
        return None
    return bytes(buffer.data) if isinstance(read, BaseException) else None


class _Bounded:
    """A file in memory that refuses to grow beyond a size."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self._most = most

    def write(self, data: bytes) -> int:
        if len(self.data) + len(data) > self._most:
            raise OverflowError("too large")
        self.data += data
        return len(data)


def _dump(field: str, value: Any, dumps: Callable[[Any], bytes] = cloudpickle.dumps) -> bytes:
    try:
        return bytes(dumps(value))
    except Exception as error:  # A __reduce__ may raise any exception.
        raise InvalidFieldError(field, value, f"cannot be pickled: {error}") from error


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) is dict and all(map(_is_plain, value)) and all(map(_is_plain, value.values()))


def _pickle_by_value(module: ModuleType, stack: ExitStack, pickler: Any) -> None:
    if module.__name__ not in pickler.list_registry_pickle_by_value():
        pickler.register_pickle_by_value(module)
        stack.callback(pickler.unregister_pickle_by_value, module)
