"""A lane's own standard output or error: a file that its C libraries and child processes write to as well.

What the lane writes itself is told apart from that by its place in the file, so that the rest can be copied to the log
of the trial whose code ran meanwhile.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

#: Most bytes that are read at once.
_CHUNK = 1 << 20


class OwnOutput:
    """Writes to a lane's own output, by line, and reads what others have written there.

    Args:
        stream: the output. Of one that is no regular file nothing is read.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        #: The file, if it is one: opened at the first byte, and anew, as children share the position of the stream's
        #: own descriptor, which a trial may also turn to another file.
        self._path = _path_of(stream)
        self._file: int | None = None
        self._lock = threading.Lock()
        self._pending: list[str] = []
        self._seen = 0 if self._path is None else os.stat(self._path).st_size
        #: (begin, end) of what this process has written since, in bytes; what adjoins is one.
        self._spans: list[tuple[int, int]] = []

    def write(self, text: str) -> None:
        """Writes text, at the end of a line.

        Raises:
            OSError, ValueError: it cannot be written.
        """
        if self._path is None:
            self._stream.write(text)
            return
        self._pending.append(text)
        if "\n" in text:
            self.flush()

    def write_bytes(self, data: bytes) -> None:
        """Writes bytes at once; raises as :meth:`write`."""
        self.flush()
        if self._path is None:
            self._stream.buffer.write(data)
            self._stream.flush()
            return
        with self._lock:
            self._append(data)

    def flush(self) -> None:
        """Writes what is left of a line; raises as :meth:`write`."""
        if self._path is None:
            self._stream.flush()
            return
        if self._pending:
            with self._lock:
                text, self._pending = "".join(self._pending), []
                self._append(text.encode("utf-8", "backslashreplace"))

    def fileno(self) -> int:
        """The stream's descriptor, for child processes."""
        return self._stream.fileno()

    def pop_others(self) -> Iterator[bytes]:
        """Yields what others have written since the last call; nothing where it cannot be read."""
        if self._path is None:
            return
        with suppress(OSError), self._lock:
            size = os.stat(self._path).st_size
            if size == self._seen:
                return
            file = self._open()
            (position, self._seen), (spans, self._spans) = (self._seen, size), (self._spans, [])
            for begin, end in [*spans, (size, size)]:
                while position < begin:
                    data = os.pread(file, min(_CHUNK, begin - position), position)
                    if not data:
                        return  # The file was cut.
                    position += len(data)
                    yield data
                position = max(position, end)

    def begin_in_child(self) -> None:
        """Makes the copy of this in a process that a trial has forked one of its own."""
        self._lock = threading.Lock()
        self._pending = []

    def _open(self) -> int:
        if self._file is None:
            assert self._path is not None
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        return self._file

    def _append(self, data: bytes) -> None:
        file = self._open()
        while data:
            written = os.write(file, data)
            end = os.lseek(file, 0, os.SEEK_CUR)
            begin = end - written
            if self._spans and self._spans[-1][1] == begin:
                self._spans[-1] = (self._spans[-1][0], end)
            else:
                self._spans.append((begin, end))
            data = data[written:]


def _path_of(stream: TextIO) -> str | None:
    with suppress(OSError, ValueError):
        descriptor = stream.fileno()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            return path if os.path.exists(path) else None  # It may have been deleted.
    return None
