"""The number of CPU threads of a lane: of PyTorch, and of numeric libraries that use OpenMP and its like.

The lanes of a device divide the device's threads, so the driver tells a lane anew how many it has when others begin or
end to run trials there. A trial that asks for a number has that one while it runs.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

#: Read by OpenMP, MKL, OpenBLAS and NumExpr when they are loaded.
_OF_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
#: Read by PyTorch's compiler, and by joblib for ``n_jobs=-1``, which otherwise start a process for each core of the
#: machine: in each trial's process anew.
_OF_COMPILER = "TORCHINDUCTOR_COMPILE_THREADS"
_OF_POOLS = (_OF_COMPILER, "LOKY_MAX_CPU_COUNT")
VARIABLES = (*_OF_LIBRARIES, *_OF_POOLS)


def set_threads(threads: int) -> None:
    """Sets how many threads PyTorch, and numeric libraries that are loaded from now on, may use in this process.

    As many processes compile for PyTorch, if its compiler is first used from now on, unless users have set another
    number of them.
    """
    chosen = _chosen()
    for name in VARIABLES:
        if name not in chosen:
            os.environ[name] = str(threads)
    set_num_threads = getattr(_torch(), "set_num_threads", None)
    if set_num_threads is not None:  # PyTorch is loaded, and has read its environment already.
        set_num_threads(threads)
    compiler = sys.modules.get("torch._inductor.config")
    if compiler is not None and _OF_COMPILER not in chosen:
        compiler.compile_threads = threads  # type: ignore[attr-defined]


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
        #: Those of the trial in force; ``None`` if it does not ask for a number.
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

    def change(self, own: int) -> None:
        """Changes the lane's own number. A number that a trial's code has set stays in force."""
        if self._asked is None and self._is_as_set():
            set_threads(own)
        self._own = own

    def _is_as_set(self) -> bool:
        """Whether PyTorch has the number that it was given here, if it is loaded."""
        return _torch_threads() in (None, self._own if self._asked is None else self._asked)


def _torch_threads() -> int | None:
    get_num_threads = getattr(_torch(), "get_num_threads", None)
    return None if get_num_threads is None else int(get_num_threads())


def _torch() -> Any:
    return sys.modules.get("torch")
