"""A folder of this machine as a storage of Ray Tune that reads and writes at a rate, as one over a network."""

from __future__ import annotations

import time
from typing import Any

import pyarrow.fs
from fsspec.implementations.local import LocalFileSystem


class ThrottledFile:
    """A file whose reads and writes take as long as their bytes take at a rate.

    Args:
        file: the file.
        rate: bytes per second.
    """

    def __init__(self, file: Any, rate: float) -> None:
        self._file, self._rate = file, rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        """Reads so many bytes."""
        data: bytes = self._file.read(size)
        time.sleep(len(data) / self._rate)
        return data

    def write(self, data: Any) -> int:
        """Writes bytes."""
        time.sleep(len(data) / self._rate)
        return int(self._file.write(data))


class ThrottledFiles(LocalFileSystem):
    """The files of this machine, each of them throttled."""

    cachable = False
    protocol = "throttled"

    def __init__(self, rate: float = 1e8, **options: Any) -> None:
        super().__init__(**options)
        self.rate = rate

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        return ThrottledFile(super()._open(path, mode, block_size, **options), self.rate)


def throttled_storage(rate: float) -> pyarrow.fs.FileSystem:
    """Returns the file system, for ``storage_filesystem`` of ``tune.run``."""
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(ThrottledFiles(rate)))
