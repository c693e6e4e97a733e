"""The lock that a session holds on its run folder while it runs: one folder, one session."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from fluid._clock import MonotonicClock
from fluid._logs import logger_of
from fluid._private_files import open_descriptor
from fluid.errors import InvalidFieldError
from fluid.results.run_files import LOCKED

#: Errors of file systems that have no locks.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
#: Seconds for which readers may hold a file at most, and between two tries meanwhile.
_READERS_S, _LOOK_S = 0.3, 0.01
#: How often a folder is locked anew that is not the one that was locked.
_TRIES = 10

_log = logger_of(__name__)
#: Locks of this process. A forked child must not keep the folder locked after its parent has ended.
_held: set[FolderLock] = set()


class InUseError(InvalidFieldError):
    """Another session runs in the folder, or has written there."""


class FolderLock:
    """Holds a run folder for one session, until :meth:`release` or the end of the process, however it ends.

    The lock is on two files, so that another session stays out also where one of them was deleted.

    Args:
        folder: the run folder; it exists.

    Raises:
        InUseError: another session holds the folder, in this process or another.
        OSError: a lock's file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._files: list[int] = []
        try:
            for _ in range(_TRIES):
                if self._locks(folder):
                    break
                self._close()  # While it waited, another program has replaced the run there.
            else:
                raise InUseError("run_dir", str(folder), "is replaced again and again by other programs")
        except BaseException:
            self._close()
            raise
        _held.add(self)
        # The first file says who holds it. On a full disk it says nothing, and the lock holds all the same.
        with suppress(OSError):
            os.ftruncate(self._files[0], 0)
            os.pwrite(self._files[0], json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _locks(self, folder: Path) -> bool:
        """Locks the files; returns whether they still are those of the folder."""
        for name in LOCKED:
            self._files.append(open_descriptor(folder / name, os.O_RDWR | os.O_CREAT))
            self._lock(folder, self._files[-1])
        try:
            found = [os.stat(folder / name) for name in LOCKED]
        except FileNotFoundError:
            return False
        return all(map(os.path.samestat, found, map(os.fstat, self._files)))

    def _lock(self, folder: Path, file: int) -> None:
        # flock(2) locks belong to the open file: a second session of this process is refused too.
        clock = MonotonicClock()
        until = clock.now() + _READERS_S
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if clock.now() < until:  # A reader may have just looked whether it is locked.
                    threading.Event().wait(_LOOK_S)
                    continue
                reason = (
                    f"is in use: {_holder(self._files[0])} runs there; use another folder, or end that session first"
                )
                raise InUseError("run_dir", str(folder), reason) from None
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                if file == self._files[0]:
                    _log.warning("%s cannot be locked (%s): do not run two sessions there", folder, error.strerror)
                return

    def release(self) -> None:
        """Gives the folder free. Releasing twice is harmless."""
        if self in _held:
            for file in self._files:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # A child that is being forked may not have closed it yet.
            self._forget()

    def _forget(self) -> None:
        _held.remove(self)
        self._close()

    def _close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()


def _holder(file: int) -> str:
    try:
        content = json.loads(os.pread(file, 4096, 0))
        pid, host = int(content["pid"]), str(content["host"])
    except (ValueError, KeyError, TypeError, OSError):  # It is only being written, or could not be.
        return "the session of another process"
    where = "" if host == socket.gethostname() else f" on {host}"
    return f"the session of {'this process' if pid == os.getpid() and not where else f'process {pid}'}{where}"


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_forget_all)
