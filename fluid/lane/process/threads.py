"""The number of CPU threads of a lane: of PyTorch, and of numeric libraries that use OpenMP and its like.

Sums depend on it, so a trial keeps one number for its life: that of the lane in which it began, or the one that it asks
for. Neither other trials of the device change it, nor which modules the process that forked the lane had loaded.

The kernel divides the cores of a device among its lanes (docs/theory.md, section 19). A lane has none for itself:
OpenBLAS and joblib take the cores that they see for their number of threads, which would change sums. Nor has it a
nice value: it would fall behind other users' processes, and packing is judged by the seconds of equals.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import chain
from typing import Any, NamedTuple

from fluid.resources import available_cores

#: Read by OpenMP, MKL, OpenBLAS and NumExpr when they are loaded.
_OF_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
#: Read by PyTorch's compiler, and by joblib for ``n_jobs=-1``, which otherwise start a process for each core of the
#: machine: in each trial's process anew.
_OF_COMPILER = "TORCHINDUCTOR_COMPILE_THREADS"
_OF_POOLS = (_OF_COMPILER, "LOKY_MAX_CPU_COUNT")
VARIABLES = (*_OF_LIBRARIES, *_OF_POOLS)
#: What sets and reads the number in a library that is loaded already: a part of its file's name, and names of the
#: functions. OpenBLAS has others in the wheels of NumPy, with integers of 64 bits, and of SciPy.
_ACCESS = {
    "openblas": tuple(
        (f"{prefix}openblas_set_num_threads{suffix}", f"{prefix}openblas_get_num_threads{suffix}")
        for prefix in ("", "scipy_")
        for suffix in ("", "64_")
    ),
    "libmkl_rt": (("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),),
    "libgomp": (("omp_set_num_threads", "omp_get_max_threads"),),
    "libomp": (("omp_set_num_threads", "omp_get_max_threads"),),
    "libiomp5": (("omp_set_num_threads", "omp_get_max_threads"),),
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


class _Library(NamedTuple):
    """A numeric library that this process has loaded.

    Attributes:
        path: of its file.
        set: sets its threads.
        get: returns them.
    """

    path: str
    set: Callable[[int], object]
    get: Callable[[], int]


def _set_in_libraries(threads: int) -> None:
    """Sets the number in libraries that have read their environment: in the process that forked this one, too."""
    for library in _loaded_libraries():
        # OpenBLAS has no more threads than it sees cores, if it is loaded only now: the same in both cases.
        most = len(available_cores()) if "openblas" in os.path.basename(library.path) else threads
        library.set(min(threads, most))


def _loaded_libraries() -> Sequence[_Library]:
    """The numeric libraries that this process has loaded; looked for again once further modules are."""
    return _libraries_with(len(sys.modules))


@lru_cache(maxsize=1)
def _libraries_with(modules: int) -> Sequence[_Library]:
    paths: set[str] = set()
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if ".so" in line}
    found = []
    for path in sorted(paths):
        names = (each for part, each in _ACCESS.items() if part in os.path.basename(path))
        for setter, getter in chain.from_iterable(names):
            with suppress(OSError, AttributeError):
                library = ctypes.CDLL(path)
                found.append(_Library(path, getattr(library, setter), getattr(library, getter)))
    return found


@cache
def _chosen() -> frozenset[str]:
    """Sizes of pools that users had set before this process first set any.

    Those that equal the number of threads are of a lane in which the session of this one runs.
    """
    threads = os.environ.get(VARIABLES[0])
    return frozenset(name for name in _OF_POOLS if os.environ.get(name, threads) != threads)


class ThreadNumbers(NamedTuple):
    """The numbers of threads that are in force in this process.

    Attributes:
        variables: of the environment, by name.
        libraries: of those that are loaded, by path.
        torch: of PyTorch; ``None`` if it is not loaded.
    """

    variables: Mapping[str, str]
    libraries: Mapping[str, int]
    torch: int | None

    @classmethod
    def in_force(cls) -> ThreadNumbers:
        """Reads them."""
        variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        libraries = {library.path: int(library.get()) for library in _loaded_libraries()}
        get_num_threads = getattr(_torch(), "get_num_threads", None)
        return cls(variables, libraries, None if get_num_threads is None else int(get_num_threads()))

    def put(self) -> None:
        """Puts them in force."""
        for name in VARIABLES:
            if (value := self.variables.get(name)) is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        for library in _loaded_libraries():
            if library.path in self.libraries:
                library.set(self.libraries[library.path])
        if self.torch is not None:
            _torch().set_num_threads(self.torch)


class LaneThreads:
    """The numbers of threads in force in a lane.

    Args:
        own: the lane's own number, which is in force already.
    """

    def __init__(self, own: int) -> None:
        self.own = own
        #: The lane's own numbers, with the libraries that were loaded when they were last put in force.
        self._base = ThreadNumbers.in_force()

    def enter(self, asked: int | None, left: ThreadNumbers | None) -> None:
        """Puts a trial's numbers in force.

        Args:
            asked: what it asks for; ``None`` for the lane's own.
            left: those with which it has left, as it may have set some since; ``None`` if it begins.
        """
        if asked is not None:
            set_threads(asked)
        if left is not None and left != ThreadNumbers.in_force():
            left.put()

    def leave(self) -> ThreadNumbers:
        """Puts the lane's own number in force; returns those of the trial."""
        left = ThreadNumbers.in_force()
        if left != self._base:
            set_threads(self.own)
            _set_in_libraries(self.own)
            self._base = ThreadNumbers.in_force()
        return left


def _torch() -> Any:
    return sys.modules.get("torch")
