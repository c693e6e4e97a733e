"""The shared values of a host, as files in its folders: which lane writes one, and where.

A file appears whole: it is written under a temporary name and then renamed. The lane that loads a value holds a lock
meanwhile, which ends with its process, so that the next lane loads it if that one is killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fluid.shared_data.mapped_file import file_size, read_shared, write_shared
from fluid.shared_data.pickling import Pickled
from fluid.trainables.shared_place import SharedPlace

_FOLDER = "shared"
#: Share of the free host memory that one value may take; a larger one goes to disk.
_MEMORY_SHARE = 0.5


class SharedStore:
    """The shared values of the lane's host.

    Args:
        place: the host's folders.
    """

    def __init__(self, place: SharedPlace) -> None:
        self._folders = [os.path.join(folder, _FOLDER) for folder in place.folders]
        self._reserved_bytes = place.reserved_bytes

    def read(self, key: str) -> tuple[Any] | None:
        """Returns a value, in a tuple; ``None`` if it is not there."""
        for folder in self._folders:
            try:
                descriptor = os.open(os.path.join(folder, key), os.O_RDONLY)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                return (read_shared(descriptor),)
            finally:
                os.close(descriptor)
        return None

    @contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Waits until no other lane loads a value of this key, and keeps others from it."""
        lock = self._open_lock(key)
        try:
            if lock >= 0:
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            if lock >= 0:
                # A process that the loader has forked would hold the lock for as long as it runs.
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)

    def write(self, key: str, pickled: Pickled) -> bool:
        """Writes a value, to host memory if there is enough, else to disk; returns whether there was space."""
        size = file_size(pickled)
        for folder in self._folders:
            if folder != self._folders[-1] and not self._has_room(folder, size):
                continue
            with suppress(OSError):
                self._write(folder, key, pickled)
                return True
        return False

    def _write(self, folder: str, key: str, pickled: Pickled) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        draft = os.path.join(folder, f".{key}")
        with suppress(FileNotFoundError):
            os.unlink(draft)  # Of a lane that was killed while it wrote.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            write_shared(descriptor, pickled)
            os.rename(draft, os.path.join(folder, key))
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        finally:
            os.close(descriptor)

    def _open_lock(self, key: str) -> int:
        """Returns the descriptor of the lock's file; -1 if there is no space even for that."""
        for folder in self._folders:
            with suppress(OSError):
                os.makedirs(folder, mode=0o700, exist_ok=True)
                return os.open(os.path.join(folder, f".{key}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        return -1

    def _has_room(self, folder: str, size: int) -> bool:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            usage = shutil.disk_usage(folder)
        except OSError:
            return False
        # What another program has reserved beyond the size of the RAM disk is elsewhere.
        reserved = self._reserved_bytes if self._reserved_bytes <= usage.total else 0.0
        return size <= (usage.free - reserved) * _MEMORY_SHARE
