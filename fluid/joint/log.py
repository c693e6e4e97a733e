"""The log of a shared folder: entries that many processes append, on many machines, in one order for all of them.

An entry is a file, whose name is its number. It is written under another name first and then linked, which fails where
the number is taken: of two members that append at once, one is first, and the other reads that entry and takes the next
number. So an entry is whole from the moment it is there, and no member waits for a lock. No clock is read, and no time
of a file: what a file system may tell late does not matter.

On NFS a client may remember for a while that a name was not there. Opening the folder makes it ask the server again
(close-to-open consistency), which each reading does first.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fluid._clock import nap
from fluid._private_files import FILE_MODE, make_folder
from fluid.errors import FluidError

#: The folder of the log, in the shared one.
LOG = "log"
_HEAD = b"fluid 1 %08x\n"
_HEAD_BYTES = len(_HEAD % 0)
#: Times that an operation is tried which the file system refuses, and seconds from the first time to the second.
_TRIES, _PAUSE_S = 8, 0.05
#: Seconds for which an entry may be there and not be found.
_HIDDEN_S = 60.0
_ADVICE = "fluid doctor --shared says what several drivers need"
#: What a file system may answer where nothing is wrong for good: a file handle that it has to look up again, a server
#: that does not answer.
_PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY)


T = TypeVar("T")


class LogError(FluidError):
    """The log cannot be read or written any more: it is damaged, was deleted, or the file system has no hard links."""


class SharedLog:
    """The log of a shared folder, as one process reads and appends to it. For one thread.

    Example:
        >>> from fluid.joint.log import SharedLog
        >>> ours, theirs = SharedLog("shared", "a"), SharedLog("shared", "b")
        >>> list(ours.append(b"first")), list(theirs.append(b"second"))
        ([(0, b'first')], [(0, b'first'), (1, b'second')])
        >>> ours.read()
        [(1, b'second')]

    Args:
        folder: the shared folder.
        writer: tells the entries of this process from all others'.
        make: whether the folder is made if it does not exist, as it is by default.

    Attributes:
        next: the number of the first entry that was not read.
        appended: how many entries this process has appended, or tried to.
    """

    def __init__(self, folder: str | Path, writer: str, *, make: bool = True) -> None:
        self._folder = Path(folder) / LOG
        if make:
            make_folder(self._folder)
        self._writer = writer
        self.appended = 0
        self.next = 0

    def read(self) -> list[tuple[int, bytes]]:
        """Returns the entries that are new, by number, in order.

        Raises:
            LogError: one is damaged, or the log was deleted.
        """
        return list(self._new())

    def append(self, content: bytes) -> Iterator[tuple[int, bytes]]:
        """Appends an entry; gives the entries before it that are new, and last the entry itself.

        Args:
            content: of the entry; one that the process has not written before, as it tells its own entries by that.

        Raises:
            LogError: the file system refuses the entry for good, or the log was deleted.
        """
        draft = self._folder / f".{self._writer}.{self.appended}"
        self.appended += 1
        whole = _HEAD % zlib.crc32(content) + content
        try:
            _patiently(lambda: _write(draft, whole), f"{self._folder} cannot be written to")
            hidden_s, waits_s = 0.0, 0.0
            while True:
                before = self.next
                for number, found in self._new():
                    yield number, found
                    if found == content:  # An answer that says so may be lost on the way.
                        return
                if self.next == before:
                    # The next number was taken, and its entry is not seen yet; at first it is not known to be taken.
                    if hidden_s > _HIDDEN_S:
                        raise LogError(f"{self._folder / _name(self.next)} exists, and cannot be found: {_ADVICE}")
                    nap(waits_s)
                    hidden_s, waits_s = hidden_s + waits_s, min(1.0, 2.0 * waits_s)
                else:
                    hidden_s, waits_s = 0.0, 0.0
                try:
                    _patiently(lambda: self._link(draft), f"{self._folder} takes no entry: {_ADVICE}", FileExistsError)
                except FileExistsError:
                    waits_s = waits_s or _PAUSE_S / 10
        finally:
            with suppress(OSError):
                os.unlink(draft)

    def _link(self, draft: Path) -> None:
        try:
            os.link(draft, self._folder / _name(self.next))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                reason = f"{self._folder} is on a file system without hard links ({error.strerror})"
                raise LogError(f"{reason}; {_ADVICE}") from error
            raise

    def _new(self) -> Iterator[tuple[int, bytes]]:
        folder = _patiently(lambda: os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY), f"{self._folder} is gone")
        try:
            while True:
                try:
                    problem = f"{self._folder / _name(self.next)} cannot be read"
                    content = _patiently(lambda: _read(_name(self.next), folder), problem, FileNotFoundError)
                except FileNotFoundError:
                    return
                self.next += 1
                yield self.next - 1, content
        finally:
            os.close(folder)


def _name(number: int) -> str:
    return f"{number:08d}"


def _write(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)  # A member that sees the entry's name sees all of it.
    finally:
        os.close(file)


def _read(name: str, folder: int) -> bytes:
    file = os.open(name, os.O_RDONLY, dir_fd=folder)
    try:
        parts = []
        while part := os.read(file, 1 << 20):
            parts.append(part)
    finally:
        os.close(file)
    whole = b"".join(parts)
    content = whole[_HEAD_BYTES:]
    if whole[:_HEAD_BYTES] != _HEAD % zlib.crc32(content):
        raise OSError(errno.EIO, "it is damaged")
    return content


def _patiently(work: Callable[[], T], problem: str, *answers: type[OSError]) -> T:
    """Does what a file system may refuse for a moment; raises an error that is an answer as it is."""
    for tried in range(_TRIES):
        if tried:
            nap(_PAUSE_S * 2.0 ** (tried - 1))
        try:
            return work()
        except answers:
            raise
        except OSError as error:
            last = error
            if error.errno not in _PASSING:
                break
    raise LogError(f"{problem}: {last.strerror}") from last
