"""The limit of open files: many systems set a low one that a process may raise itself, up to a hard one."""

from __future__ import annotations

import resource
from contextlib import suppress


def allow_open_files(count: int) -> None:
    """Raises the soft limit of this process's open files to the hard one, if it is below ``count``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        with suppress(OSError, ValueError):  # A sandbox may forbid it: lanes that start without a descriptor say so.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
