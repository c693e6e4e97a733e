"""``fluid.shared``: data that trials use in common."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from fluid._logs import logger_of
from fluid.errors import FluidError, InvalidFieldError
from fluid.random_state import read_random_state, write_random_state
from fluid.shared_data.key import shared_key
from fluid.shared_data.pickling import Pickled, dump_shared
from fluid.shared_data.store import SharedStore
from fluid.trainables.json_form import message_of
from fluid.trainables.shared_place import shared_place

_log = logger_of(__name__)

_Value = TypeVar("_Value")


class _ProcessValues:
    """The values that this process has, or is loading, by key.

    Attributes:
        loaded: the values.
        loading: keys that a thread of this process is loading.
        guard: held while ``locks`` is looked at.
        locks: one per key, so that a thread waits for another one that loads the same value, and for no other.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, object] = {}
        self.loading: set[str] = set()
        self.guard = threading.Lock()
        self.locks: dict[str, threading.RLock] = {}


_kept = _ProcessValues()


def shared(loader: Callable[..., _Value], *args: object) -> _Value:
    """Returns ``loader(*args)``, which is called once per host, and which all trials there share.

    The first lane of a host that asks calls the loader, and keeps the result in host memory, or, where that has too
    little room, in a file on disk. All lanes of the host map it until the session ends. Lanes that ask while it is
    being loaded wait. If the loader raises, so does this call, and the next one calls the loader again.

    The bytes of NumPy arrays, PyTorch tensors on the CPU and Arrow tables, also those inside of containers, dataclasses
    and other objects that can be pickled, are in memory once. Arrays and tables are read-only. PyTorch has no read-only
    tensors: a trial that writes to one changes it for the later trials of its own lane, not for other lanes. Everything
    else is unpickled once in each lane.

    All calls in one process that have equal arguments return the same object. Outside a lane, as in the driver or
    under Ray Tune alone, the loader is called once per process, and what it returns is returned as it is.

    Args:
        loader: returns the data. It should not keep a reference to them, as ``functools.cache`` does. The global random
            number generators are set back afterwards, so that a trial draws the same numbers whether or not it loads.
        *args: for the loader. Data are the same if the loader, its code, and the arguments are.

    Raises:
        InvalidFieldError: the loader is not callable; it, an argument, or what it returns cannot be pickled.
        FluidError: the loader asks for its own result.

    Example:
        >>> import fluid
        >>> def squares(count: int) -> list[int]:
        ...     return [number**2 for number in range(count)]
        >>> fluid.shared(squares, 4)
        [0, 1, 4, 9]
        >>> fluid.shared(squares, 4) is fluid.shared(squares, 4)
        True
    """
    if not callable(loader):
        raise InvalidFieldError("loader", loader, "must be callable")
    key = shared_key(loader, args)
    with _kept.guard:
        lock = _kept.locks.setdefault(key, threading.RLock())
    with lock:
        if key not in _kept.loaded:
            if key in _kept.loading:
                raise FluidError(f"{loader!r} calls fluid.shared for its own result")
            _kept.loading.add(key)
            try:
                _kept.loaded[key] = _obtain(key, loader, args)
            finally:
                _kept.loading.discard(key)
        return _kept.loaded[key]  # type: ignore[return-value]


def _obtain(key: str, loader: Callable[..., object], args: tuple[object, ...]) -> object:
    place = shared_place()
    if place is None or not place.folders:
        return _load(loader, args)
    store = SharedStore(place)
    found = store.read(key)
    if found is None:
        with store.turn(key):
            found = store.read(key) or _share(key, loader, args, store)
    return found[0]


def _share(key: str, loader: Callable[..., object], args: tuple[object, ...], store: SharedStore) -> tuple[object]:
    """Calls the loader, and returns the file's copy of the result, or the result itself if there is no space."""
    value = _load(loader, args)
    found = store.read(key) if store.write(key, _dump(loader, value)) else None
    if found is None:
        _log.warning("there is no space to share what %r returned: each lane loads it", loader)
        return (value,)
    del value
    _give_memory_back()
    return found


def _give_memory_back() -> None:
    """Returns to the system what the loader has freed, of which glibc's malloc may keep blocks of up to 32 MiB."""
    with suppress(OSError, AttributeError):  # Another C library.
        ctypes.CDLL(None).malloc_trim(0)


def _load(loader: Callable[..., object], args: tuple[object, ...]) -> object:
    random_state = read_random_state()
    try:
        return loader(*args)
    finally:
        write_random_state(random_state)


def _dump(loader: Callable[..., object], value: object) -> Pickled:
    try:
        return dump_shared(value)
    except Exception as error:  # A __reduce__ may raise anything.
        raise InvalidFieldError("loader", loader, f"returned what cannot be pickled: {message_of(error)}") from error
