"""A file of a run folder that a session appends to: of each write all is there afterwards, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from fluid._private_files import open_descriptor
from fluid.session.torn_files import end_of_lines


class AppendedFile(FileIO):
    """Opens a file to append to, for its owner only. One session writes it, and one thread at a time.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        # Without a buffer: what a full disk refuses is not written later, behind the session's back.
        super().__init__(open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a")
        self._path = path
        #: Bytes of the file, and how much more the offset of the next line is; ``None`` before the first write.
        self._size: int | None = None
        self._shift: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the file, as it was when they were first asked for, and as was written since.

        So what is torn may be cut off until the first write.
        """
        if self._size is None:
            self._size = os.fstat(self.fileno()).st_size
        return self._size

    @property
    def is_cut(self) -> bool:
        """Whether another process has truncated it since the size was first asked for."""
        return self._size is not None and os.fstat(self.fileno()).st_size < self._size

    @property
    def next_offset(self) -> int:
        """The offset of the next line, for its checksum.

        It follows from that of the last line: where lines were lost or put in, it differs from the file's size.
        """
        if self._shift is None:
            self._shift = end_of_lines(self._path) - self.size
        return self.size + self._shift

    def append(self, data: bytes) -> None:
        """Writes data in one go; in several only where a signal comes between, or the disk is full.

        Raises:
            OSError: it cannot be written. What was written of it is cut off again.
        """
        self.append_parts((data,))

    def append_parts(self, parts: Iterable[bytes]) -> None:
        """Writes data that is made part by part: all of it, or nothing.

        Raises:
            OSError: it cannot be written. What was written of it is cut off again, as after any other error.
        """
        start = size = self.size
        try:
            for part in parts:
                written = self.write(part)
                while written < len(part):
                    written += self.write(part[written:])
                size += len(part)
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(self._path)
            with suppress(OSError):
                self.truncate(start)
            raise
        self._size = size
