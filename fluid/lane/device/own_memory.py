"""The GPU memory that a lane takes for itself: its CUDA context, loaded kernels and library workspaces, not tensors."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median_low
from typing import Any

from fluid._clock import MonotonicClock, nap
from fluid.gpu.driver_notes import read_note, write_note
from fluid.gpu.nvml import Gpu, find_gpus, process_bytes, processes_on, used_bytes
from fluid.lane.protocol import LaneOptions

# -- context sizes -------------------------------------------------------------------------------
#
# What contexts were found to take on a GPU whose processes NVML does not list: shared by the lanes of a session, and
# remembered from one session to the next.
#
# A size that was found while no other process held memory on the GPU is exact. It is the same for each process of a
# GPU model, driver and release of PyTorch, and is noted in the user's cache folder. Other sizes are differences of the
# whole device's memory, which neighbours raise and lower by what they allocate and free meanwhile: their median
# counts.


_KIND = "context-bytes"
#: Bytes between which a context is taken to be where only the whole device's memory is known: less was found because
#: others freed memory meanwhile, more because they took some.
LEAST, MOST = 250e6, 3e9
#: Longest that a lane waits for another one of its device to make its context, and how often it looks, seconds.
PATIENCE_S = 5.0
_LOOK_S = 0.01


class ContextSizes:
    """Sizes of contexts on one device.

    Args:
        folder: where the lanes of the session have their files; empty for none.
        device: UUID of the GPU.
        about: what contexts depend on besides the driver: the GPU's model, and the release of PyTorch.
    """

    def __init__(self, folder: str, device: str, about: str) -> None:
        self._path = os.path.join(folder, f"context-{device.replace('/', '-')}") if folder else ""
        self._about = about
        #: What is known where there is no folder.
        self._alone: dict[str, Any] = {}

    @property
    def are_listed(self) -> bool:
        """Whether a lane of the device was listed by NVML under its own number, so that none has to guess."""
        return bool(self._read().get("listed"))

    @property
    def is_orderly(self) -> bool:
        """Whether every lane of the session has waited for its turn; else a difference may be that of two contexts."""
        return not self._read().get("hurried")

    @property
    def lanes(self) -> int:
        """Lanes that have made a context on the device in this session."""
        return int(self._read().get("lanes", 0))

    @property
    def estimate(self) -> float | None:
        """What a context takes, as far as is known, bytes; ``None`` if nothing is."""
        known, found = self.remembered, self._read().get("found", [])
        if known is not None:
            return known
        return min(MOST, max(LEAST, median_low(found))) if found else None

    @property
    def remembered(self) -> float | None:
        """The exact size, bytes; ``None`` if none was found yet, in any session."""
        with suppress(ValueError):
            known = float(read_note(_KIND, self._about))
            return known if 0.0 < known <= MOST else None
        return None

    @property
    def grown(self) -> float:
        """What libraries and kernels were seen to add to a context in this session, bytes."""
        return float(self._read().get("grown", 0.0))

    def add_lane(self, *, listed: bool) -> None:
        """Counts a lane that has made its context, and says whether NVML lists it."""
        self._update(lambda known: known.update(lanes=known.get("lanes", 0) + 1, listed=listed or known.get("listed")))

    def add(self, difference: float, *, exact: bool) -> None:
        """Adds by how much the device's memory grew with a context, bytes.

        Args:
            difference: without what is reserved for tensors.
            exact: whether no other process held memory there.
        """
        if exact and 0.0 < difference <= MOST:
            write_note(_KIND, repr(min(difference, self.remembered or difference)), self._about)
        self._update(lambda known: known.setdefault("found", []).append(difference))

    def add_growth(self, grown: float) -> None:
        """Adds by how many bytes a context grew once a trial had used it."""
        self._update(lambda known: known.update(grown=max(grown, known.get("grown", 0.0))))

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Waits until no other lane of the device makes its context; yields whether that is so.

        The wait has an end, as another lane may hang in its driver, or take a minute for a machine's first context.
        """
        with _locked(f"{self._path}.turn" if self._path else "") as is_alone:
            if not is_alone:
                self._update(lambda known: known.update(hurried=True))
            yield is_alone

    def _read(self) -> dict[str, Any]:
        if not self._path:
            return self._alone
        try:
            with open(self._path, encoding="ascii") as file:
                return dict(json.load(file))
        except (OSError, ValueError):
            return {}

    def _update(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Changes what the session's lanes know; not if there is no folder or space for it."""
        if not self._path:
            change(self._alone)
            return
        with _locked(f"{self._path}.lock") as is_alone, suppress(OSError):
            if is_alone:
                change(known := self._read())
                with open(f"{self._path}.new", "w", encoding="ascii") as file:
                    json.dump(known, file)
                os.replace(file.name, self._path)


@contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Locks a file for a while, which may take a few seconds; yields whether it is locked."""
    clock = MonotonicClock()
    deadline = clock.now() + PATIENCE_S
    try:
        file = open(path, "wb")  # noqa: SIM115
    except OSError:
        yield not path
        return
    with file:
        while (is_locked := _lock(file.fileno())) is False and clock.now() < deadline:
            nap(_LOOK_S)
        yield bool(is_locked)


def _lock(file: int) -> bool | None:
    """Locks a file, if no other process has; ``None`` where files cannot be locked, as on some network file systems."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# -- own memory ----------------------------------------------------------------------------------


#: A GPU of which processes hold fewer bytes has no context on it.
_UNUSED = 64e6
#: A change below this many bytes is not worth telling the driver.
_NOTABLE = 16 * 2**20
#: Others hold notably more than before from so many bytes on: what libraries take in this process, and NVML may not
#: tell apart, is less.
_SQUEEZE = 1e9


class OwnMemory:
    """Measures the memory that this process takes on its first GPU besides what its trials hold.

    NVML lists what each process holds. In a container it may list processes under numbers of the host: then the number
    that comes with the context is this process's. It may also list none: then the difference that the context makes to
    the whole device's memory counts, if no better figure is remembered (:mod:`fluid.lane.device.own_memory`). For both,
    one lane of a device makes its context at a time.

    Args:
        options: the lane's.
    """

    def __init__(self, options: LaneOptions) -> None:
        self._is_gpu = options.kind == "gpu"
        self._folder = os.path.dirname(options.note)
        self._is_client = bool(options.environment)
        self._gpu = Gpu("", 0.0)
        self._sizes: ContextSizes | None = None
        #: The number under which NVML lists this process; ``None`` if it does not.
        self._pid: int | None = None
        #: Bytes of the context when it was new, if no other process held memory on the device then.
        self._exact: float | None = None
        #: Bytes that the driver was told last.
        self._told = 0.0
        #: Bytes that were in use on the device before the context was made; ``None`` if unknown.
        self._before: float | None = None

    def around(self, make_context: Callable[[], None]) -> float:
        """Makes the context; returns the bytes that it takes, 0 where that cannot be measured."""
        sizes = self._open()
        self._before = self._used()
        if sizes.are_listed or (sizes.lanes and sizes.remembered and not self._numbers()):
            make_context()  # There is nothing to compare.
            self._pid = os.getpid() if sizes.are_listed else None
        else:
            with sizes.turn() as is_alone:
                before, numbers = self._used(), self._numbers()
                make_context()
                self._pid = self._find_number(numbers, is_alone=is_alone)
                if self._pid is None and is_alone:
                    self._compare(sizes, before)
        sizes.add_lane(listed=self._pid == os.getpid())
        self._told = self._context() or 0.0
        return self._told

    def changed(self, held: float) -> float | None:
        """Returns the bytes that it takes now if they differ notably from those returned last; ``None`` otherwise.

        A context is smallest when it is new: each library and kernel that a trial uses for the first time adds to it.

        Args:
            held: bytes that the trials in the lane hold, while no memory is cached. The rest of what PyTorch has
                reserved is the lane's own, such as workspaces of cuBLAS.
        """
        if not self._is_gpu or not _uses_cuda():
            return None
        sizes = self._open()
        if self._pid is None and (sizes.are_listed or not sizes.lanes) and process_bytes(self._gpu.token, os.getpid()):
            self._pid = os.getpid()  # A trial has loaded PyTorch, and made the context.
        context = self._context(is_used=True)
        own = None if context is None else context + max(0.0, _reserved() - held)
        if own is None or abs(own - self._told) < _NOTABLE:
            return None
        self._told = own
        return own

    def others_have_grown(self) -> bool:
        """Whether other processes hold notably more of the device than when this one made its context."""
        used = self._used() if self._is_gpu and _uses_cuda() and self._before is not None else None
        if used is None or self._before is None:
            return False
        own = (self._context(is_used=True) or 0.0) + _reserved()
        return used - own - self._before >= _SQUEEZE

    def _open(self) -> ContextSizes:
        """Finds the GPU, and what is known of contexts on it."""
        if self._sizes is None:
            self._gpu = next(iter(find_gpus()), self._gpu)
            release = getattr(sys.modules.get("torch"), "__version__", "")
            about = f"{self._gpu.name} torch {release}{' MPS' * self._is_client}"
            self._sizes = ContextSizes(self._folder, self._gpu.token, about)
        return self._sizes

    def _context(self, *, is_used: bool = False) -> float | None:
        """What the context takes now, or is estimated to take; once trials have used it, with what they loaded."""
        listed = None if self._pid is None else self._bytes_of(self._pid)
        if listed:
            return max(0.0, listed - _reserved())
        sizes = self._open()
        if self._exact is not None and is_used and sizes.lanes == 1 and (used := self._used()) is not None:
            # No other lane has come since the device was unused, so what is used there is this process's.
            sizes.add_growth(max(0.0, min(MOST, used - _reserved()) - self._exact))
        estimate = sizes.estimate
        return None if estimate is None else estimate + (sizes.grown if is_used else 0.0)

    # -- what NVML tells -----------------------------------------------------------------------------------

    def _numbers(self) -> set[int] | None:
        processes = processes_on(self._gpu.token)
        return None if processes is None else {process.pid for process in processes}

    def _find_number(self, before: set[int] | None, *, is_alone: bool) -> int | None:
        """The number of this process in NVML's list, which was not there before the context; ``None`` if unknown."""
        after = self._numbers()
        if before is None or after is None:
            return None
        new = {pid for pid in after - before if self._bytes_of(pid)}
        if os.getpid() in new:
            return os.getpid()
        return new.pop() if is_alone and len(new) == 1 and not self._is_client else None

    def _bytes_of(self, pid: int) -> float | None:
        processes = processes_on(self._gpu.token) or ()
        return next((process.memory_bytes for process in processes if process.pid == pid), None)

    def _used(self) -> float | None:
        """Bytes that processes hold on the device; with what the driver reserves, if it does not tell that apart."""
        used = used_bytes(self._gpu.token, reserved=False)
        return used if used is not None else used_bytes(self._gpu.token)

    def _compare(self, sizes: ContextSizes, before: float | None) -> None:
        """Adds the difference that the context has made to the device's memory."""
        after = self._used()
        if before is None or after is None:
            return
        difference, is_exact = after - before - _reserved(), before < _UNUSED and sizes.is_orderly
        sizes.add(difference, exact=is_exact)
        if is_exact and 0.0 < difference <= MOST:
            self._exact = difference


def _uses_cuda() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _reserved() -> float:
    """Bytes that PyTorch has reserved on the first GPU; 0 before CUDA is used."""
    return float(sys.modules["torch"].cuda.memory_reserved(0)) if _uses_cuda() else 0.0
