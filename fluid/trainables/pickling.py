"""Pickles what users give, and what trials return.

A lane is another process: it has neither the driver's ``__main__`` nor modules that exist only there.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle

from fluid import wire
from fluid._logs import logger_of
from fluid.errors import InvalidFieldError, TextOfValue
from fluid.trainables.import_scan import ImportScan, can_be_imported
from fluid.trainables.json_form import message_of
from fluid.trainables.script_names import dumps as dump_value

_log = logger_of(__name__)

#: Names at most of the part of a value that cannot be pickled, from the outside in.
_DEEPEST_PART = 5
#: Held while modules are registered for pickling by value, which concerns the whole process.
_BY_VALUE = threading.RLock()


def dump_trainable(trainable: Any, dumps: Callable[[Any], bytes] | None = None, pickler: Any = cloudpickle) -> bytes:
    """Pickles a trainable, by value where a lane could not import it.

    Args:
        trainable: what the user gave.
        dumps: does the pickling; ``None`` for cloudpickle.
        pickler: the module, cloudpickle or a copy of it, in which modules to pickle by value are registered.

    Raises:
        InvalidFieldError: it cannot be pickled.
    """
    with _BY_VALUE, ExitStack() as stack:
        for name in sorted(ImportScan(trainable).modules):
            module = sys.modules.get(name)
            if module is not None and not can_be_imported(name):
                _pickle_by_value(module, stack, pickler)
        return _dump("trainable", trainable, dumps or dump_value)


def dump_config(config: Mapping[str, Any]) -> bytes:
    """Pickles a trial's config as a plain dict.

    Raises:
        InvalidFieldError: it cannot be pickled; the field names the entry, as in ``config['data']``.
    """
    plain = dict(config)
    try:
        return dump_value(plain)
    except (Exception, SystemExit, GeneratorExit):
        for name, value in plain.items():
            _dump(f"config[{name!r}]", value)
        return _dump("config", plain)


def dump_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Pickles the arguments of a call.

    Raises:
        InvalidFieldError: one cannot be pickled, and the field names it, as in ``args[0]``; or they are too long.
    """
    try:
        payload = dump_value((args, dict(kwargs)))
    except (Exception, SystemExit, GeneratorExit):
        for position, value in enumerate(args):
            _dump(f"args[{position}]", value)
        for name, value in kwargs.items():
            _dump(name, value)
        payload = _dump("args", (args, dict(kwargs)))
    if len(payload) > wire.LONGEST_FIELD:
        reason = f"are too long: at most {wire.LONGEST_FIELD} bytes are sent at once; write them to a file"
        raise InvalidFieldError("args", TextOfValue(f"{len(payload)} bytes"), reason)
    return payload


def dump_result(result: Any) -> bytes:
    """Pickles what a call returned.

    Raises:
        TypeError: it cannot be pickled, or is too long.
    """
    try:
        payload = bytes(cloudpickle.dumps(result))
    except BaseException as error:
        raise TypeError(f"what the method returned cannot be pickled: {message_of(error)}") from error
    if len(payload) > wire.LONGEST_FIELD:
        raise TypeError(f"what the method returned is too long: {len(payload)} bytes of at most {wire.LONGEST_FIELD}")
    return payload


def _dump(field: str, value: Any, dumps: Callable[[Any], bytes] = dump_value) -> bytes:
    try:
        return bytes(dumps(value))
    except (Exception, SystemExit, GeneratorExit) as error:  # A __reduce__ may raise anything.
        reason = f"cannot be pickled{_because_of(value, dumps)}: {message_of(error)}"
        raise InvalidFieldError(field, value, reason) from error


def _because_of(value: Any, dumps: Callable[[Any], bytes]) -> str:
    """Names the part of a value that cannot be pickled, as in ``" because of loader.lock"``."""
    path: list[str] = []
    while len(path) < _DEEPEST_PART:
        part = next((part for part in parts_of(value) if not _can_be_pickled(part[1], dumps)), None)
        if part is None:
            break
        path.append(part[0])
        value = part[1]
    return f" because of {'.'.join(path)}" if path else ""


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """Returns what is pickled with a value, and its names."""
    if isinstance(value, functools.partial):
        args = [(f"args[{number}]", arg) for number, arg in enumerate(value.args)]
        return [("func", value.func), *args, *value.keywords.items()]
    if isinstance(value, MethodType):
        return [("self", value.__self__)]
    if isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        defaults = zip(reversed(names), reversed(value.__defaults__ or ()), strict=False)
        return [*used.nonlocals.items(), *used.globals.items(), *defaults, *(value.__kwdefaults__ or {}).items()]
    if isinstance(value, dict):
        return [(str(name), part) for name, part in value.items()]
    hooks = ("__reduce__", "__reduce_ex__", "__getstate__")
    if any(getattr(type(value), hook, None) is not getattr(object, hook, None) for hook in hooks):
        return []  # It says itself what is pickled.
    return list(getattr(value, "__dict__", {}).items())


def _can_be_pickled(value: Any, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(value)
    except (Exception, SystemExit, GeneratorExit):
        return False
    return True


def _pickle_by_value(module: ModuleType, stack: ExitStack, pickler: Any) -> None:
    if module.__name__ not in pickler.list_registry_pickle_by_value():
        pickler.register_pickle_by_value(module)
        stack.callback(pickler.unregister_pickle_by_value, module)
