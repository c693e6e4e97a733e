"""One run folder, one session: the lock that a session holds on its folder while it runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from fluid._logs import logger_of
from fluid._private_files import open_descriptor
from fluid.errors import InvalidFieldError
from fluid.results.folder_files import LOCK

#: Errors of file systems that have no locks.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_log = logger_of(__name__)
#: Locks of this process. A forked child must not keep the folder locked after its parent has ended.
_held: set[FolderLock] = set()


class FolderLock:
    """Holds a run folder for one session, until :meth:`release` or the end of the process, however it ends.

    Args:
        folder: the run folder; it exists.

    Raises:
        InvalidFieldError: another session holds the folder, in this process or another.
        OSError: the lock's file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        # flock(2) locks belong to the open file: a second session of this process is refused too.
        self._file = open_descriptor(folder / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._file)
            os.close(self._file)
            reason = f"is in use: {holder} runs there; use another folder, or end that session first"
            raise InvalidFieldError("run_dir", str(folder), reason) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(self._file)
                raise
            _log.warning("%s cannot be locked (%s): do not run two sessions there", folder, error.strerror)
        _held.add(self)
        # The file says who holds it. On a full disk it says nothing, and the lock holds all the same.
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def release(self) -> None:
        """Gives the folder free. Releasing twice is harmless."""
        if self in _held:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # A child that is being forked may not have closed it yet.
            self._forget()

    def _forget(self) -> None:
        _held.remove(self)
        os.close(self._file)


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
