"""How much host memory the checkpoints of a session take on this machine: one file, which all its processes change.

A lane reserves room before it writes a checkpoint there, and gives back what it deletes. The file is locked for the few
microseconds of a change; the lock ends with its process. What a killed lane had reserved is counted until the host
counts the checkpoints anew.

Lanes also tell their host, by a pipe with a name, when little room is left, and how long restores took. Nothing waits
for that: where no host reads, or the pipe is full, it is not told.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

_FILE, _PIPE = ".ledger", ".wishes"
_RECORD = struct.Struct("<qqq")
#: Most bytes that are read from the pipe at once.
_MOST = 1 << 16


class MemoryUse(NamedTuple):
    """What the ledger says.

    Attributes:
        used: bytes of the checkpoints in host memory, and of what is reserved.
        limit: most bytes that they may take.
        full_at: bytes above which the host moves checkpoints to disk, so that room is left for the next ones.
    """

    used: int = 0
    limit: int = 0
    full_at: int = 0


class RestoreSample(NamedTuple):
    """How long reading and loading a checkpoint took in a lane: of so many bytes, from memory or else from disk."""

    in_memory: bool
    bytes: int
    seconds: float


class MemoryLedger:
    """The ledger of a session's folder in host memory.

    Args:
        folder: the folder; empty if there is none, which has no room.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._descriptor = -1

    def create(self, limit: int, full_at: int) -> None:
        """Makes the ledger and the pipe, if they are not there, and sets the limits.

        Raises:
            OSError: host memory is full.
        """
        self._descriptor = os.open(os.path.join(self._folder, _FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(FileExistsError):
            os.mkfifo(os.path.join(self._folder, _PIPE), 0o600)
        self._change(lambda use: use._replace(limit=limit, full_at=full_at))

    def read(self) -> MemoryUse:
        """Returns what it says; no room if it is not there."""
        if not self._opened():
            return MemoryUse()
        return self._read()

    def reserve(self, size: int) -> bool:
        """Reserves room, if there is enough; returns whether it did."""
        if not self._opened():
            return False
        before, after = self._change(
            lambda use: use._replace(used=use.used + size) if use.used + size <= use.limit else None
        )
        if after.used > after.full_at or (size and before == after):
            self.tell(None)
        return before != after or not size

    def correct(self, change: int) -> bool:
        """Counts bytes that are there though not reserved, or that have gone; returns whether all have room."""
        if not self._opened():
            return False
        _, after = self._change(lambda use: use._replace(used=max(0, use.used + change)))
        if change > 0 and after.used > after.full_at:
            self.tell(None)
        return after.used <= after.limit

    def recount(self, count: Callable[[], int]) -> MemoryUse:
        """Sets the bytes used to what a function counts, while nothing else changes; returns what it says then."""
        if not self._opened():
            return MemoryUse()
        return self._change(lambda use: use._replace(used=count()))[1]

    def limit(self, limit: int, full_at: int) -> MemoryUse:
        """Sets the limits; returns what it says then."""
        if not self._opened():
            return MemoryUse()
        return self._change(lambda use: use._replace(limit=limit, full_at=full_at))[1]

    # -- from lanes to their host ----------------------------------------------------------------------------

    def tell(self, sample: RestoreSample | None) -> None:
        """Tells the host how long a restore took, or, with ``None``, that little room is left."""
        text = "\n" if sample is None else f"{int(sample.in_memory)} {sample.bytes} {sample.seconds!r}\n"
        with suppress(OSError):  # No host reads it, or it is full: the host then has enough to do.
            descriptor = os.open(os.path.join(self._folder, _PIPE), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)

    def open_pipe(self) -> int:
        """Opens the pipe for the host; returns a descriptor that is readable when a lane has told something.

        Raises:
            OSError: the ledger was not made.
        """
        # For writing, too: else it would be at its end whenever no lane has it open.
        return os.open(os.path.join(self._folder, _PIPE), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    @staticmethod
    def read_pipe(descriptor: int) -> list[RestoreSample]:
        """Returns the samples that lanes have sent, without waiting."""
        samples = []
        try:
            data = os.read(descriptor, _MOST)
        except BlockingIOError:
            return []
        for line in data.split(b"\n"):
            with suppress(ValueError):
                in_memory, size, seconds = line.split()  # The first and the last line may be parts.
                samples.append(RestoreSample(in_memory == b"1", int(size), float(seconds)))
        return samples

    def close(self) -> None:
        """Closes the ledger."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _opened(self) -> bool:
        if self._descriptor < 0 and self._folder:
            with suppress(OSError):  # No host keeps checkpoints in memory.
                self._descriptor = os.open(os.path.join(self._folder, _FILE), os.O_RDWR | os.O_CLOEXEC)
        return self._descriptor >= 0

    def _read(self) -> MemoryUse:
        data = os.pread(self._descriptor, _RECORD.size, 0)
        return MemoryUse(*_RECORD.unpack(data)) if len(data) == _RECORD.size else MemoryUse()

    def _change(self, changed: Callable[[MemoryUse], MemoryUse | None]) -> tuple[MemoryUse, MemoryUse]:
        """Changes what it says, unless the function returns ``None``; returns what it said before, and says then."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            before = self._read()
            after = changed(before) or before
            if after != before:
                os.pwrite(self._descriptor, _RECORD.pack(*after), 0)
            return before, after
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
