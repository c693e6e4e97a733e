"""The GPU memory that a lane takes for itself: its CUDA context, loaded kernels and library workspaces, not tensors."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from fluid._clock import MonotonicClock, nap
from fluid.gpu.nvml import find_gpus, process_bytes, used_bytes
from fluid.lane.messages import LaneOptions

#: Longest that a lane waits for another one of its device to make its context, and how often it looks, seconds.
_PATIENCE_S = 30.0
_LOOK_S = 0.01
#: Bytes that a context may take, where only the whole device's memory is known. Less was found because others freed
#: memory meanwhile, more because they took some.
_SMALLEST = 50e6
_LARGEST = 3e9
#: In a device's file, instead of the smallest difference: NVML lists the processes of this machine.
_LISTED = "listed"
#: A change below this many bytes is not worth telling the driver.
_NOTABLE = 16 * 2**20


class OwnMemory:
    """Measures the memory that this process takes on its first GPU besides what PyTorch has reserved for tensors.

    NVML lists what each process holds. In a container it may list processes under numbers of the host; then the
    difference that making the context made to the whole device's memory counts. Other lanes of the device must not
    make theirs meanwhile, so one of them does that at a time, and the smallest difference is believed: whatever else
    is allocated in that time only adds to it.

    Args:
        options: the lane's.
    """

    def __init__(self, options: LaneOptions) -> None:
        self._is_gpu = options.kind == "gpu"
        self._folder = os.path.dirname(options.note)
        self._token = ""
        #: Bytes that the driver was told last.
        self._told = 0.0

    def around(self, make_context: Callable[[], None]) -> float:
        """Makes the context; returns the bytes that it takes, 0 where that cannot be measured."""
        with self._turn() as is_alone:
            before = used_bytes(self._gpu())
            make_context()
            own = self._listed()
            if own is not None:
                _write(self._path(), _LISTED)
            elif is_alone:
                own = self._least_difference(before)
        self._told = own or 0.0
        return self._told

    def changed(self) -> float | None:
        """Returns the bytes that it takes now if they differ notably from those returned last; ``None`` otherwise.

        A context is smallest when it is new: each library and kernel that a trial uses for the first time adds to it.
        """
        if not self._is_gpu or not _reserved():
            return None
        own = self._listed()
        if own is None:
            own = _number(self._path())
        if own is None or abs(own - self._told) < _NOTABLE:
            return None
        self._told = own
        return own

    def _gpu(self) -> str:
        if not self._token:
            self._token = next((gpu.token for gpu in find_gpus()), "")
        return self._token

    def _listed(self) -> float | None:
        """What NVML lists for this process, besides tensors; ``None`` if it does not list it."""
        held = process_bytes(self._gpu(), os.getpid())
        return max(0.0, held - _reserved()) if held else None

    def _least_difference(self, before: float | None) -> float | None:
        """The smallest believable difference that a lane has made to the device's memory, this one included."""
        after, path = used_bytes(self._gpu()), self._path()
        found = [] if before is None or after is None else [min(after - before - _reserved(), _LARGEST)]
        least = min(filter(None, (*filter(_SMALLEST.__le__, found), _number(path))), default=None)
        if least is not None:
            _write(path, repr(least))
        return least

    # -- one lane of a device at a time --------------------------------------------------------------------

    def _path(self) -> str:
        """The device's file of what was found, for all its lanes; empty without a folder."""
        return os.path.join(self._folder, f"context-{self._gpu().replace('/', '-')}") if self._folder else ""

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Waits for the device's other lanes, unless NVML lists processes; yields whether no other makes its context.

        The wait has an end, as another lane may hang in its driver.
        """
        path = self._path()
        if not path or _read(path) == _LISTED:
            yield True
            return
        clock = MonotonicClock()
        deadline = clock.now() + _PATIENCE_S
        try:
            file = open(f"{path}.lock", "wb")  # noqa: SIM115
        except OSError:
            yield False
            return
        with file:
            while not (is_alone := _lock(file.fileno())) and clock.now() < deadline:
                nap(_LOOK_S)
            yield is_alone


def _reserved() -> float:
    """Bytes that PyTorch has reserved on the first GPU; 0 before CUDA is used."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return float(cuda.memory_reserved(0)) if cuda is not None and cuda.is_initialized() else 0.0


def _lock(file: int) -> bool:
    """Locks a file, if no other process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _number(path: str) -> float | None:
    """The number in a file; ``None`` if there is none."""
    try:
        return float(_read(path))
    except ValueError:
        return None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    """Writes a file that others may be reading; not if there is no folder or space for it."""
    if path:
        with suppress(OSError), open(f"{path}.new", "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
