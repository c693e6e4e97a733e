"""A session's folder in host memory: who uses it, and what becomes of one that nobody uses any more.

Everybody who uses such a folder holds a lock there, which goes with the process, however that ends. So what killed
processes left behind is recognised, and cleared away, by whoever comes next. A lock, because numbers of processes are
used again, and mean something else in another container that has the same RAM disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import threading
from contextlib import suppress

from fluid._clock import MonotonicClock
from fluid.lane.checkpoint_store import persist_checkpoints

#: Where the folders are.
RAM_DISK = "/dev/shm"
#: What their names begin with.
_PREFIX = "fluid-"
#: Locked by all who use the folder; holds what is needed to clear it away.
_LOCK = ".session"
#: Share of what is free on the RAM disk that checkpoints may take, all lanes of a machine together.
MEMORY_SHARE = 0.5
#: Seconds between two looks whether others have left.
_LOOK_S = 0.01


def enter(folder: str, run_folder: str, *, temporary: bool) -> int:
    """Begins to use a folder, which is made if need be.

    Args:
        folder: on the RAM disk; nobody else may read it.
        run_folder: the run's folder on disk, to which checkpoints go once nobody uses this one.
        temporary: whether nobody needs either of them then.

    Returns:
        The descriptor of the lock. To close it is to use the folder no more.

    Raises:
        OSError: there can be no such folder, or it is somebody else's.
    """
    while True:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _require_own(folder)
        path = os.path.join(folder, _LOCK)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(OSError):
            if os.stat(path).st_ino == os.fstat(lock).st_ino:
                break
        os.close(lock)  # Somebody was just clearing it away.
    if os.fstat(lock).st_size == 0:
        os.pwrite(lock, json.dumps({"run_folder": run_folder, "temporary": temporary}).encode(), 0)
    return lock


def free_bytes(folder: str) -> int:
    """Returns what is free where a folder is; 0 for an empty name, which stands for no folder."""
    return shutil.disk_usage(folder).free if folder else 0


def checkpoint_bytes(folder: str) -> float:
    """Returns how much checkpoints may take in a session's folder, all lanes of the machine together."""
    return free_bytes(folder) * MEMORY_SHARE


def is_last(lock: int, patience: float = 0.0) -> bool:
    """Whether nobody else uses the folder of this lock; nobody can begin to until it is closed.

    Args:
        lock: as :func:`enter` returned it.
        patience: seconds that others, who are ending, have to leave.
    """
    clock = MonotonicClock()
    deadline = clock.now() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if clock.now() >= deadline:
                return False
            threading.Event().wait(_LOOK_S)
        else:
            return True


def sweep() -> None:
    """Clears away what sessions of this user left in host memory that nobody uses any more."""
    try:
        names = os.listdir(RAM_DISK)
    except OSError:
        return
    for name in names:
        if name.startswith(_PREFIX):
            with suppress(OSError, ValueError, KeyError):
                _sweep(os.path.join(RAM_DISK, name))


def _sweep(folder: str) -> None:
    _require_own(folder)
    lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
    try:
        if is_last(lock):
            left = json.loads(os.pread(lock, 1 << 16, 0))
            persist_checkpoints(folder, left["run_folder"], temporary=left["temporary"])
    finally:
        os.close(lock)


def _require_own(folder: str) -> None:
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is not a folder of this user")
