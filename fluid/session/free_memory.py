"""Gives memory that the C library holds free back to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress

#: Trials of which a step makes so much that is dropped with it that looking for free memory pays: it takes 2 ms.
MANY_TRIALS = 1000


def give_back(trials: int) -> None:
    """Gives free memory back after a step that made something of so many trials, if they are many.

    The C library keeps what lies between blocks that are in use. Does nothing where it is not glibc.
    """
    if trials >= MANY_TRIALS:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
