"""The number of CPU threads of a lane: of PyTorch, and of numeric libraries that use OpenMP and its like.

The lanes of a device divide the device's threads, so the driver tells a lane anew how many it has when others begin or
end to run trials there. A trial that asks for a number has that one while it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

#: Read by OpenMP, MKL, OpenBLAS and NumExpr when they are loaded.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def set_threads(threads: int) -> None:
    """Sets how many threads PyTorch, and numeric libraries that are loaded from now on, may use in this process."""
    for name in _VARIABLES:
        os.environ[name] = str(threads)
    set_num_threads = getattr(_torch(), "set_num_threads", None)
    if set_num_threads is not None:  # PyTorch is loaded, and has read its environment already.
        set_num_threads(threads)


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

    def leave(self) -> None:
        """Puts the lane's own number in force."""
        if self._asked is not None:
            self._asked = None
            set_threads(self._own)

    def change(self, own: int) -> None:
        """Changes the lane's own number. A number that a trial's code has set stays in force."""
        get_num_threads = getattr(_torch(), "get_num_threads", None)
        is_own = get_num_threads is None or get_num_threads() == self._own
        if self._asked is None and is_own:
            set_threads(own)
        self._own = own


def _torch() -> Any:
    return sys.modules.get("torch")
