"""A file in shared memory that names the trial whose code a lane runs: the culprit if the lane dies."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress

from fluid._private_files import make_folder

_LENGTH = struct.Struct("<H")
_BYTES = 4096


class RunningTrialNote:
    """The lane's end of the note.

    Args:
        path: the file, best on a RAM disk; empty for no note. Without space for it there is none either.
    """

    def __init__(self, path: str) -> None:
        self._text: str | None = None
        self._map: mmap.mmap | None = None
        if path:
            with suppress(OSError):  # The RAM disk is full, or was emptied: a lane does without a note.
                self._map = _map(path)

    def write(self, trial_id: str | None) -> None:
        """Names the trial whose code runs now; ``None`` for none."""
        if trial_id == self._text or self._map is None:
            return
        text = (trial_id or "").encode("utf-8", "surrogatepass")[: _BYTES - _LENGTH.size]
        self._map[: _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text
        self._text = trial_id


def _map(path: str) -> mmap.mmap:
    make_folder(os.path.dirname(path))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _BYTES)  # To write to a page that a full RAM disk cannot give is fatal.
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)


def read_running_trial(path: str) -> str | None:
    """Returns the trial that the note at ``path`` names; ``None`` if it names none or does not exist."""
    try:
        with open(path, "rb") as file:
            data = file.read(_BYTES)
    except OSError:
        return None
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    return data[_LENGTH.size : _LENGTH.size + length].decode("utf-8", "surrogatepass") or None
