"""Pickles of trainables of which large parts lie beside the pickle, in the same bytes, where a lane maps them.

The pickle comes first. The parts come after it, the first one at the very end; each is named, in the pickle, by its
distance from the end. The bytes of a pickle without parts are those of the pickle alone, as any other.
"""

from __future__ import annotations

import io
import os
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, NamedTuple

#: Parts begin at multiples of it: a cache line, and what Arrow asks for.
ALIGNMENT = 64


class TrainablePart(NamedTuple):
    """A part beside a pickle.

    Attributes:
        source: what holds the bytes: ``bytes``, or a file, which lanes map.
        offset: where the part begins, bytes.
        length: bytes of the part.
    """

    source: bytes | PartFile
    offset: int
    length: int


class PartFile:
    """An open file with parts, which stay readable when it is deleted.

    Attributes:
        descriptor: open for reading for as long as this object lives.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)


class PartWriter:
    """Gathers the parts of a pickle that is being written."""

    def __init__(self) -> None:
        self._parts: list[list[memoryview]] = []
        self._length = 0

    def add(self, pieces: Iterable[memoryview]) -> tuple[int, int]:
        """Adds a part.

        Args:
            pieces: its bytes.

        Returns:
            The distance of its first byte from the end, and its length, bytes.
        """
        part = list(pieces)
        length = sum(piece.nbytes for piece in part)
        part.append(memoryview(bytes(-length % ALIGNMENT)))
        self._parts.append(part)
        self._length += length + part[-1].nbytes
        return self._length, length

    def join(self, pickled: bytes) -> bytes:
        """Returns a pickle with its parts."""
        if not self._parts:
            return pickled
        padding = bytes(-len(pickled) % ALIGNMENT)
        return b"".join([pickled, padding, *(piece for part in reversed(self._parts) for piece in part)])


class _PartUnpickler(pickle.Unpickler):
    """Makes what stands for a part; the pickle names the function that makes it, and the part's place."""

    def __init__(self, file: BinaryIO, data: bytes | None = None) -> None:
        super().__init__(file)
        self._file = file
        self._source: bytes | PartFile | None = data

    def persistent_load(self, pid: tuple[Callable[[TrainablePart], Any], int, int]) -> Any:
        make, from_end, length = pid
        if self._source is None:
            self._source = PartFile(self._file.fileno())
        source = self._source
        size = len(source) if isinstance(source, bytes) else os.fstat(source.descriptor).st_size
        return make(TrainablePart(source, size - from_end, length))


def load_pickled(data: bytes) -> Any:
    """Unpickles a trainable from bytes."""
    return _PartUnpickler(io.BytesIO(data), data).load()


def load_from(file: BinaryIO) -> Any:
    """Unpickles a trainable or a config from a file, of which a lane maps the parts."""
    return _PartUnpickler(file).load()
