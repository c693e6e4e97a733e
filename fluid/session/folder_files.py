"""The files of a run folder: their names, how they are read, and how a crash's last, torn entry is cut off."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from fluid.errors import InvalidFieldError
from fluid.trialgroup import Search

SESSION = "session.json"
JOURNAL = "journal.jsonl"
RESULTS = "results.jsonl"
TRIALS = "trials.jsonl"
PAYLOADS = "payloads.pkl"
PROFILE = "profile.json"
#: Version of the folder's files; the journal's entries have a version of their own.
FORMAT = 1

_CHUNK = 1 << 16
_log = logging.getLogger(__name__)


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        start, end: its first byte, and the byte behind its newline.
        entry: its JSON object; ``None`` if it has none.
    """

    start: int
    end: int
    entry: dict[str, Any] | None


def is_used(folder: Path) -> bool:
    """Whether a session has written to the folder."""
    names = (SESSION, JOURNAL, RESULTS, TRIALS, PAYLOADS)
    return any((folder / name).is_file() and (folder / name).stat().st_size for name in names)


def read_facts(folder: Path) -> dict[str, Any]:
    """The content of ``session.json``; empty if it is missing or damaged."""
    try:
        content = json.loads((folder / SESSION).read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def why_unreadable(facts: Mapping[str, Any]) -> str | None:
    """Why this version of Fluid cannot read a folder with these facts; ``None`` if it can."""
    written = facts.get("format")
    if not isinstance(written, int) or written <= FORMAT:
        return None
    return f"is of Fluid {facts.get('fluid', '?')}, format {written}; this Fluid reads formats up to {FORMAT}"


def json_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[Line]:
    """Gives the lines of a file of JSON objects from byte ``start`` to ``end``; none if the file is missing."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        for text in file:
            if end is not None and start >= end:
                return
            yield Line(start, start + len(text), _entry(text))
            start += len(text)


def read_search(entry: Mapping[str, Any]) -> Search | None:
    """The search in a group's line of ``trials.jsonl``; ``None`` if it has none, or one that cannot be read."""
    fields = {name: entry.get(name) for name in ("metric", "mode", "trials")}
    if not entry.keys() & fields.keys():
        return None
    try:
        return Search(**fields)
    except InvalidFieldError:
        return None


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
            keep = size if not text.strip() or _entry(text) is not None else last
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


def _entry(text: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(text.decode("utf-8"))  # Of bytes, json would guess the encoding.
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
