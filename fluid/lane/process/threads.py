"""The number of CPU threads of a lane: of PyTorch, and of numeric libraries that use OpenMP and its like.

Sums depend on it, so a trial keeps one number for its life: that of the lane in which it began, or the one that it asks
for. Neither other trials of the device change it, nor which modules the process that forked the lane had loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from fluid.resources import available_cores

#: Read by OpenMP, MKL, OpenBLAS and NumExpr when they are loaded.
_OF_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
#: Read by PyTorch's compiler, and by joblib for ``n_jobs=-1``, which otherwise start a process for each core of the
#: machine: in each trial's process anew.
_OF_COMPILER = "TORCHINDUCTOR_COMPILE_THREADS"
_OF_POOLS = (_OF_COMPILER, "LOKY_MAX_CPU_COUNT")
VARIABLES = (*_OF_LIBRARIES, *_OF_POOLS)
#: What sets the number in a library that is loaded already: a part of its file's name, and names of the function.
#: OpenBLAS has others in the wheels of NumPy, with integers of 64 bits, and of SciPy.
_SETTERS = {
    "openblas": (
        "openblas_set_num_threads",
        "openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "scipy_openblas_set_num_threads64_",
    ),
    "libmkl_rt": ("MKL_Set_Num_Threads",),
    "libgomp": ("omp_set_num_threads",),
    "libomp": ("omp_set_num_threads",),
    "libiomp5": ("omp_set_num_threads",),
}


def set_threads(threads: int) -> None:
    """Sets how many threads PyTorch and numeric libraries use in this process, loaded ones and those to come.

    As many processes compile for PyTorch, if its compiler is first used from now on, unless users have set another
    number of them.
    """
    chosen = _chosen()
    if os.environ.get(VARIABLES[0]) != str(threads):
        _set_in_libraries(threads)
    for name in VARIABLES:
        if name not in chosen:
            os.environ[name] = str(threads)
    set_num_threads = getattr(_torch(), "set_num_threads", None)
    if set_num_threads is not None:  # PyTorch is loaded, and has read its environment already.
        set_num_threads(threads)
    compiler = sys.modules.get("torch._inductor.config")
    if compiler is not None and _OF_COMPILER not in chosen:
        compiler.compile_threads = threads  # type: ignore[attr-defined]


def _set_in_libraries(threads: int) -> None:
    """Sets the number in libraries that have read their environment: in the process that forked this one, too."""
    for path, names in _loaded_libraries():
        with suppress(OSError):
            library = ctypes.CDLL(path)
            for name in names:
                with suppress(AttributeError):
                    # OpenBLAS has no more threads than it sees cores, if it is loaded only now: the same in both cases.
                    most = len(available_cores()) if "openblas" in name else threads
                    getattr(library, name)(ctypes.c_int(min(threads, most)))


def _loaded_libraries() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The numeric libraries that this process has loaded, each with names of what sets its threads."""
    paths: set[str] = set()
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if ".so" in line}
    for path in sorted(paths):
        file = os.path.basename(path)
        for part, names in _SETTERS.items():
            if part in file:
                yield path, names


@cache
def _chosen() -> frozenset[str]:
    """Sizes of pools that users had set before this process first set any.

    Those that equal the number of threads are of a lane in which the session of this one runs.
    """
    threads = os.environ.get(VARIABLES[0])
    return frozenset(name for name in _OF_POOLS if os.environ.get(name, threads) != threads)


class LaneThreads:
    """The number of threads in force in a lane.

    Args:
        own: the lane's own number, which is in force already.
    """

    def __init__(self, own: int) -> None:
        self._own = own
        #: Those of the trial in force; ``None`` for the lane's.
        self._asked: int | None = None

    def enter(self, asked: int | None) -> None:
        """Puts a trial's number in force; ``None`` leaves the lane's own."""
        self._asked = asked
        if asked is not None:
            set_threads(asked)

    def leave(self) -> int | None:
        """Puts the lane's own number in force; returns the one that the trial had asked for, or has set since."""
        asked = self._asked if self._is_as_set() else _torch_threads()
        self._asked = None
        if asked is not None or os.environ.get(VARIABLES[0]) != str(self._own):
            set_threads(self._own)
        return asked

    def _is_as_set(self) -> bool:
        """Whether PyTorch has the number that it was given here, if it is loaded."""
        return _torch_threads() in (None, self._own if self._asked is None else self._asked)


def _torch_threads() -> int | None:
    get_num_threads = getattr(_torch(), "get_num_threads", None)
    return None if get_num_threads is None else int(get_num_threads())


def _torch() -> Any:
    return sys.modules.get("torch")
