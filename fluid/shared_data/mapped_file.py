"""The file of a shared value, which every lane maps.

It holds the length of a header, 8 bytes, little-endian; the header, as JSON; the pickle; and the buffers. The header
has the offset and length of the pickle and of each buffer, in bytes, counted from the end of the header.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fluid.shared_data.pickling import Pickled
from fluid.trainables.parted_pickle import ALIGNMENT as _ALIGNMENT

_LENGTH_BYTES = 8
#: A private map of a large file needs no memory unless it is written to. Python 3.10 does not name the flag.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


class _Part(NamedTuple):
    """Bytes of a file, and whether they may be written to in memory."""

    offset: int
    length: int
    is_writable: bool


def file_size(pickled: Pickled) -> int:
    """Returns the size of the file of a pickled value, bytes; may be a little too large."""
    parts = (pickled.pickle, *pickled.buffers)
    return sum(part.nbytes + _ALIGNMENT for part in parts) + len(_header(pickled)) + _ALIGNMENT


def write_shared(descriptor: int, pickled: Pickled) -> None:
    """Writes a pickled value to an empty file.

    Raises:
        OSError: there is no space.
    """
    for piece in pieces_of(pickled):
        _write(descriptor, piece)


def pieces_of(pickled: Pickled) -> Iterator[memoryview]:
    """Returns the bytes of the file of a pickled value, piece by piece."""
    header = _header(pickled)
    yield memoryview(header.ljust(_aligned(len(header)), b"\0"))
    written = 0
    for part, data in zip(_layout(pickled), (pickled.pickle, *pickled.buffers), strict=True):
        yield memoryview(bytes(part.offset - written))
        yield data
        written = part.offset + part.length


def read_shared(descriptor: int, start: int = 0) -> Any:
    """Maps a file, and unpickles its value.

    Arrays and tables are views of memory that all processes share and none can write to. PyTorch has no read-only
    tensors: the pages of one that a process writes to become that process's own.

    Args:
        descriptor: of the file, open for reading; may be closed afterwards.
        start: where in the file the value begins, a multiple of 64 bytes.
    """
    shared = memoryview(mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))

    def private() -> memoryview:
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        return memoryview(mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))[start:]

    return _unpickle(shared[start:], private)


def read_copied(data: memoryview) -> Any:
    """Unpickles a value from the bytes of its file; arrays are views of them, and tensors have a copy.

    Args:
        data: the bytes, from the value's first on.
    """
    return _unpickle(data.toreadonly(), lambda: memoryview(bytearray(data)))


def _unpickle(shared: memoryview, make_private: Callable[[], memoryview]) -> Any:
    length = int.from_bytes(shared[:_LENGTH_BYTES], "little")
    parts = [_Part(*part) for part in json.loads(bytes(shared[_LENGTH_BYTES : _LENGTH_BYTES + length]))]
    private = make_private() if any(part.is_writable for part in parts) else shared
    begin = _aligned(_LENGTH_BYTES + length)
    pickled, *buffers = (
        (private if part.is_writable else shared)[begin + part.offset : begin + part.offset + part.length]
        for part in parts
    )
    return pickle.loads(pickled, buffers=buffers)


def _header(pickled: Pickled) -> bytes:
    text = json.dumps(list(_layout(pickled))).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _layout(pickled: Pickled) -> Iterator[_Part]:
    offset = 0
    data = zip((pickled.pickle, *pickled.buffers), (False, *pickled.is_writable), strict=True)
    for part, is_writable in data:
        yield _Part(offset, part.nbytes, is_writable)
        offset = _aligned(offset + part.nbytes)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]  # It writes 2 GiB at most.
