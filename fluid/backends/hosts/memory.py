"""A session's folder in host memory: which processes use it, and how it is cleared when none does.

Each process that uses such a folder holds a lock there, which ends with the process. So the next session recognises
what killed processes left behind, and clears it. Locks, because numbers of processes are used again, and mean something
else in another container with the same RAM disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from fluid._clock import MonotonicClock, wall_seconds
from fluid._logs import logger_of
from fluid.lane.checkpoints.paths import path_now
from fluid.lane.checkpoints.store import persist_checkpoints
from fluid.processes.memory_left import memory_left
from fluid.processes.own_folders import require_own
from fluid.processes.session_mark import kill_marked

# -- host memory ---------------------------------------------------------------------------------


#: Where the folders are.
RAM_DISK = "/dev/shm"
#: What their names begin with.
_PREFIX = "fluid-"
#: Locked by every process that uses the folder; holds what is needed to clear it.
_LOCK = ".session"
#: Share of the memory that is left, on the RAM disk and on the machine, that checkpoints may take.
MEMORY_SHARE = 0.85
#: Seconds between two checks whether others have left.
_LOOK_S = 0.01
#: Seconds for which checkpoints stay whose run folder is not at its place.
_MISSING_S = 7 * 86400.0
_STAYS = (
    "%s in host memory holds checkpoints of the run folder %s, which was deleted or moved, or whose disk is not "
    "mounted; a session that is resumed there finds them. They are deleted %.1f days from now; delete them if you need "
    "none"
)
_log = logger_of(__name__)


def enter(folder: str, run_folder: str, mark: str = "", *, temporary: bool) -> int:
    """Begins to use a folder, and makes it if need be.

    Args:
        folder: on the RAM disk; only this user may read it.
        run_folder: the run's folder on disk, to which checkpoints go when no process uses this one any more.
        mark: the session's, by which processes that it left behind are found; see
            :mod:`fluid.processes.session_mark`. Empty for none.
        temporary: whether both are deleted then.

    Returns:
        The descriptor of the lock, for reading: trials have it, too, and what they write to any descriptor by accident
        must not spoil it. Close it to stop using the folder.

    Raises:
        OSError: the folder cannot be made, or another user owns it.
    """
    while True:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        require_own(folder)
        path = os.path.join(folder, _LOCK)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # Another session has just swept the empty folder.
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(OSError):
            if os.stat(path).st_ino == os.fstat(lock).st_ino:
                break
        os.close(lock)  # Another process was just clearing it.
    try:
        if os.fstat(lock).st_size == 0:
            facts = {"run_folder": run_folder, "inode": _inode(run_folder), "mark": mark, "temporary": temporary}
            writer = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                os.pwrite(writer, json.dumps(facts).encode(), 0)
            finally:
                os.close(writer)
    except OSError:  # The RAM disk is full.
        if is_last(lock):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        raise
    return lock


def free_bytes(folder: str) -> int:
    """Returns what is free where a folder is; 0 for an empty name, which stands for no folder."""
    return shutil.disk_usage(folder).free if folder else 0


def checkpoint_bytes(folder: str, taken: int = 0, reserved: float = 0.0) -> int:
    """Returns how much checkpoints may take in a session's folder, all lanes of the machine together.

    Args:
        folder: the folder; an empty name stands for no folder.
        taken: bytes that they take now, and which so are not free.
        reserved: bytes of shared memory that another program has reserved, as Ray's object store, and may not use yet.
            What exceeds the RAM disk is not there: Ray then keeps its store on disk.
    """
    if not folder:
        return 0
    disk = shutil.disk_usage(folder)
    left = memory_left()
    free = disk.free if left is None else min(disk.free, left)
    return int(MEMORY_SHARE * max(0.0, free + taken - (reserved if reserved <= disk.total else 0.0)))


def is_last(lock: int, patience: float = 0.0) -> bool:
    """Whether no other process uses the folder of this lock; none can begin to until it is closed.

    Args:
        lock: as :func:`enter` returned it.
        patience: seconds to wait for processes that are ending.
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


def settle(folder: str, lock: int, run: int = -1) -> None:
    """Empties a folder that no other process uses: its checkpoints move to the run folder, as far as there is room.

    Those of a run folder that is not at its place stay for a week: it may have been moved, its disk may not be mounted,
    or this container may not see it. Those of one that is known to be deleted go.

    Args:
        folder: on the RAM disk.
        lock: its lock, for which :func:`is_last` is true.
        run: a descriptor of the run folder (:func:`fluid.lane.checkpoints.paths.open_folder`), if this process has one.
    """
    left = json.loads(os.pread(lock, 1 << 16, 0))
    run_folder: str | None = left["run_folder"]
    try:
        if run >= 0:
            run_folder = path_now(run)
        elif (inode := left.get("inode")) is not None and os.stat(left["run_folder"]).st_ino != inode:
            raise FileNotFoundError(run_folder)  # Another folder is in its place. Earlier versions did not write it.
    except OSError:
        age = wall_seconds() - _written_at(folder)
        if not left["temporary"] and age < _MISSING_S:
            _log.warning(_STAYS, folder, run_folder, (_MISSING_S - age) / 86400)
            return
        run_folder = None
    if run_folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        persist_checkpoints(folder, run_folder, temporary=left["temporary"])


def reclaim(folder: str, run_folder: str, patience: float) -> None:
    """Moves what a session has left in a folder of this user's to its run folder, wherever that is by now.

    Args:
        folder: where the session's checkpoints were in host memory; it need not exist.
        run_folder: the run's folder on disk.
        patience: seconds to wait for the session's processes, which do the same as they end.
    """
    with suppress(OSError, ValueError):
        if os.path.dirname(folder) != RAM_DISK or not os.path.basename(folder).startswith(_PREFIX):
            return
        require_own(folder)
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
        try:
            if is_last(lock, patience):
                persist_checkpoints(folder, run_folder, temporary=False)
        finally:
            os.close(lock)


def reclaim_of(run_folder: str, patience: float) -> None:
    """Moves what any session of a run folder has left on this machine to that; arguments: see :func:`reclaim`."""
    for name in _names():
        folder = os.path.join(RAM_DISK, name)
        with suppress(OSError, ValueError, KeyError):
            if json.loads(Path(folder, _LOCK).read_bytes())["run_folder"] == run_folder:
                reclaim(folder, run_folder, patience)


def drop_of(run_folder: str, inode: int) -> None:
    """Deletes what sessions of a run folder that is deleted have left on this machine.

    Else the next run of that name would take the checkpoints for its own as it is resumed.

    Args:
        run_folder: where the folder was, without links.
        inode: its number in its file system.
    """
    for name in _names():
        folder = os.path.join(RAM_DISK, name)
        with suppress(OSError, ValueError, KeyError):
            left = json.loads(Path(folder, _LOCK).read_bytes())
            if left.get("inode") != inode or os.path.realpath(left["run_folder"]) != run_folder:
                continue
            require_own(folder)
            lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
            try:
                if is_last(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _names() -> list[str]:
    try:
        return [name for name in os.listdir(RAM_DISK) if name.startswith(_PREFIX)]
    except OSError:
        return []


def sweep() -> None:
    """Clears what earlier sessions of this user left in host memory, and kills the processes that they left."""
    for name in _names():
        with suppress(OSError, ValueError, KeyError):
            _sweep(os.path.join(RAM_DISK, name))


def _sweep(folder: str) -> None:
    require_own(folder)
    try:
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        os.rmdir(folder)  # Its session was killed before it used the folder.
        return
    try:
        if is_last(lock):
            if os.fstat(lock).st_size == 0:  # The same, or the RAM disk was full.
                shutil.rmtree(folder, ignore_errors=True)
                return
            left = json.loads(os.pread(lock, 1 << 16, 0))
            if left.get("mark"):  # Not written by earlier versions.
                kill_marked(left["mark"])
            settle(folder, lock)
    finally:
        os.close(lock)


def _inode(folder: str) -> int | None:
    """The number of a folder in its file system; ``None`` if there is no such folder."""
    try:
        return os.stat(folder).st_ino
    except OSError:
        return None


def _written_at(folder: str) -> float:
    """When the newest checkpoint in a session's folder was written, seconds since 1970."""
    times = [os.stat(parent).st_mtime for parent, _, _ in os.walk(folder)]
    return max(times, default=0.0)
