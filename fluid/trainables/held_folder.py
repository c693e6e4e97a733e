"""A folder with a checkpoint that the code of a trial may still read."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress


class HeldFolder:
    """Holds a checkpoint's folder by a lock: until it is let go, lanes neither move nor delete the folder.

    Args:
        folder: of a checkpoint.
    """

    def __init__(self, folder: str) -> None:
        self._descriptor: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # A disk without locks, on which checkpoints do not move.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def let_go(self) -> None:
        """Lets the folder go; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
