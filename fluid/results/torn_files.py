"""Cuts the last, torn entry off a run folder's files, so that a session can go on behind the one before it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from fluid._logs import logger_of
from fluid.checksums import LineChecks, split_line
from fluid.results.folder_files import entry_of

_CHUNK = 1 << 16
_log = logger_of(__name__)


def cut_torn_line(path: Path) -> None:
    """Cuts a file of JSON lines back to its last whole entry: valid JSON, and a newline.

    What follows is half a line that was being written when the session was killed or its disk was full, or zeros,
    which some file systems leave after a power cut.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        size = file.seek(0, os.SEEK_END)
        keep = _line_start(file, size)
        if keep == size and size:
            last = _line_start(file, size - 1)
            file.seek(last)
            text = file.read(size - last)
            keep = size if not text.strip() or entry_of(text) is not None else last
        cut(file, keep, size)


def cut(file: IO[bytes], keep: int, size: int) -> None:
    """Cuts a file of ``size`` bytes back to ``keep``."""
    if keep < size:
        file.truncate(keep)
        name = os.path.basename(file.name)
        _log.warning("%s: its last entry was not whole, and was cut off (%d bytes)", name, size - keep)


def cut_file(path: Path, keep: int) -> None:
    """Cuts a file back to ``keep`` bytes; a file that is missing has none."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        cut(file, keep, file.seek(0, os.SEEK_END))


def tell_damage(path: Path, checks: LineChecks, end: int = 0) -> None:
    """Logs what is damaged of a file whose lines were read, and went on to the offset ``end`` at least."""
    if checks.damage:
        what, whose = ("line is", "it") if checks.damage == 1 else ("lines are", "they")
        text = "%s: %d %s damaged or missing, the first at line %d; what %s told is lost"
        _log.warning(text, path, checks.damage, what, checks.first, whose)
    if not checks.reaches(end):
        _log.warning("%s ends too early: its last lines are missing, and what they told is lost", path)


def end_of_lines(path: Path) -> int:
    """The offset of the next line of a file, for its checksum: that of the last line, and its length.

    Where the last line has no checksum, it is the size of the file, or what any other line says if that is more.
    """
    with path.open("rb") as file:
        end = size = file.seek(0, os.SEEK_END)
        start = _line_start(file, size - 1) if size else 0
        file.seek(start)
        offset, _ = split_line(file.read())
        if offset >= 0:
            return offset + size - start
        file.seek(0)
        for line in file:
            offset, _ = split_line(line)
            end = max(end, offset + len(line))
    return end


def _line_start(file: IO[bytes], end: int) -> int:
    """Where the line begins that holds the byte before ``end``: behind the last newline before that."""
    while end > 0:
        begin = max(0, end - _CHUNK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
