"""Loads a module that lanes are to have from the start, and finds out whether that has spoilt the process for forks.

A lane has none of the threads that its fork server has, cannot use CUDA if its server did, and would share a connection
with all other lanes. A thread of native code does not count: libraries that start one as they are imported, as
Arrow's memory pool, do so again after a fork, and half of all data libraries load Arrow.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from fluid._clock import Clock
from fluid.processes.children import children
from fluid.processes.collector import collector_held

#: What the driver of CUDA opens when it is initialised by whatever library; asking NVML what there is does not.
_CUDA_FILE = "/dev/nvidia-uvm"


class LoadedModule(NamedTuple):
    """What came of loading a module.

    Attributes:
        seconds: what it took.
        error: why it cannot be loaded; empty if it was.
        spoilt: what makes the process useless for forks from now on, to be read after "it"; empty if nothing does.
    """

    seconds: float
    error: str = ""
    spoilt: str = ""


class _Traces(NamedTuple):
    """What must not become more in a process that lanes are forked from."""

    threads: int
    processes: int
    sockets: frozenset[str]
    uses_cuda: bool

    @classmethod
    def of_now(cls) -> _Traces:
        files = _open_files()
        sockets = frozenset(name for name in files if name.startswith("socket:"))
        torch = sys.modules.get("torch")
        uses_cuda = any(name.startswith(_CUDA_FILE) for name in files)
        if torch is not None and not uses_cuda:
            cuda = getattr(torch, "cuda", None)  # An import of it that failed leaves less.
            uses_cuda = bool(cuda is not None and cuda.is_initialized())
        return cls(threading.active_count(), len(children()), sockets, uses_cuda)

    def spoilt_since(self, before: _Traces) -> str:
        if self.uses_cuda:
            return "uses CUDA when it is imported"
        if self.threads > before.threads:
            return "starts a thread when it is imported"
        if self.processes > before.processes:
            return "starts a process when it is imported"
        if self.sockets - before.sockets:
            return "opens a connection when it is imported"
        return ""


def load_module(name: str, clock: Clock, *, whole: bool = False) -> LoadedModule:
    """Imports a module that was not imported yet; whatever that raises is told, not raised.

    Args:
        name: its name.
        clock: measures what it takes.
        whole: whether one that raises spoils the process with the modules that it has loaded until then, which may
            have registered parts of it. A trial that imports it expects to be the first.
    """
    before, begun, error = _Traces.of_now(), clock.now(), ""
    modules = len(sys.modules)
    with collector_held():
        try:
            importlib.import_module(name)
        except BaseException as raised:  # Also what a script without a main guard may do.
            error = f"{type(raised).__name__}: {raised}"
    seconds = clock.now() - begun
    spoilt = _Traces.of_now().spoilt_since(before)
    if whole and error and not spoilt and len(sys.modules) > modules:
        spoilt = f"cannot be imported: {error}"
    return LoadedModule(seconds, error, spoilt)


def _open_files() -> list[str]:
    """What the descriptors of this process refer to, as the kernel names it."""
    files: list[str] = []
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return files


# -- huge pages ----------------------------------------------------------------------------------
#
# Joins the memory of a process that forks often into huge pages: a fork copies one entry for each of them, not 512.
#
# A process that has loaded PyTorch has 40,000 pages, which takes each fork 3 ms, and each end of a lane about as much.
# The kernel splits a huge page when a lane writes to it, and copies the small page only.


#: Advice of madvise(2), since Linux 6.1.
_MADV_COLLAPSE = 25
_HUGE = 2 << 20
_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


def join_memory() -> Iterator[None]:
    """Joins one huge page after the other, each of which takes milliseconds; nothing where the system does not."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        with open(_SETTING, encoding="ascii") as file:
            if "[never]" in file.read():
                return
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            places = list(huge_places(file))
    except OSError:
        return
    for place in places:
        with suppress(AttributeError):
            libc.madvise(place, _HUGE, _MADV_COLLAPSE)  # Where it is refused, the place stays as it is.
        yield


def huge_places(maps: Iterable[str]) -> Iterator[int]:
    """Yields where whole huge pages fit into memory that is the process's own, and no file's.

    Args:
        maps: lines of /proc/PID/maps.
    """
    for line in maps:
        fields = line.split(maxsplit=5)
        begin, _, end = fields[0].partition("-")
        is_own = fields[1].startswith("rw") and fields[1].endswith("p") and fields[4] == "0"
        if is_own and (len(fields) == 5 or fields[5].startswith(("[heap]", "[anon:"))):
            first = -(-int(begin, 16) // _HUGE) * _HUGE
            yield from range(first, int(end, 16) - _HUGE + 1, _HUGE)
