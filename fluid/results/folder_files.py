"""The files of a run folder: their names, and how one that may be damaged is read."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fluid.checksums import DAMAGED, LineChecks, parse_text, split_line, split_object
from fluid.errors import InvalidFieldError
from fluid.keeping import finite_number
from fluid.search_shape import SearchShape
from fluid.trialgroup import Search

SESSION = "session.json"
JOURNAL = "journal.jsonl"
RESULTS = "results.jsonl"
TRIALS = "trials.jsonl"
PAYLOADS = "payloads.pkl"
PROFILE = "profile.json"
FORECASTS = "forecasts.jsonl"
LOCK = "session.lock"
#: The files that a session holds locked while it runs.
LOCKED = (LOCK, JOURNAL)
#: Version of the folder's files; the journal's entries have a version of their own. Version 1 had no checksums.
FORMAT = 2
#: Where ``session.json`` says how far the other files went when it was written.
ENDS = "bytes"


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        start, end: its first byte, and the byte behind its newline.
        entry: its JSON object; ``None`` if it has none, or is damaged, repeated or out of order.
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
        content = facts_in((folder / SESSION).read_bytes())
    except FileNotFoundError:
        return {}
    return content or {}


def facts_in(data: bytes) -> dict[str, Any] | None:
    """The object that ``session.json`` holds; ``None`` if the file is damaged."""
    content = split_object(data)
    try:
        facts = None if content is None else json.loads(content.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict):
        return None
    facts.pop("crc", None)  # Of a file that another program has written anew.
    return facts


def ends_in(facts: Mapping[str, Any]) -> dict[str, int]:
    """Where the files ended when these facts were written, by name: the offset of the next line, or bytes."""
    found = facts.get(ENDS)
    return {name: end for name, end in found.items() if type(end) is int} if isinstance(found, dict) else {}


def price_in(facts: Mapping[str, Any]) -> float | None:
    """US dollars for a device-hour, as ``session.json`` has it; ``None`` if it has none."""
    return amount_in(facts, "price_per_device_hour")


def amount_in(facts: Mapping[str, Any], name: str) -> float | None:
    """A number of at least 0 among the facts of a session; ``None`` if it has none of this name."""
    value = finite_number(facts.get(name))
    return value if value is not None and value >= 0.0 else None


def why_unreadable(facts: Mapping[str, Any]) -> str | None:
    """Why this version of Fluid cannot read a folder with these facts; ``None`` if it can."""
    written = facts.get("format")
    if not isinstance(written, int) or written <= FORMAT:
        return None
    return f"is of Fluid {facts.get('fluid', '?')}, format {written}; this Fluid reads formats up to {FORMAT}"


def is_locked(folder: Path) -> bool:
    """Whether a session runs in the folder: whether one of :data:`LOCKED` is locked, by whatever process.

    A file that may not be opened is looked for in the kernel's list of locks, by its number alone: on some file systems
    the list names another device. So a session may be taken to run that has ended, but not the reverse.
    """
    return any(_is_locked(folder / name) for name in LOCKED)


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        return _is_listed(path)
    except OSError:
        return False
    try:
        # It is shared with other readers, and given up at once: a session that begins at this moment tries again.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)  # A child that another thread forks meanwhile has the file open, too.
    except BlockingIOError:
        return True
    except OSError:
        return False  # A file system without locks.
    finally:
        os.close(file)
    return False


def _is_listed(path: Path) -> bool:
    try:
        number, listed = str(path.stat().st_ino), Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, ValueError):
        return False
    fields = [line.split() for line in listed.splitlines() if "->" not in line]
    return any(field.rpartition(":")[2] == number for line in fields for field in line if field.count(":") == 2)


def json_lines(path: Path, start: int = 0, end: int | None = None, checks: LineChecks | None = None) -> Iterator[Line]:
    """Gives the lines of a file of JSON objects from byte ``start`` to ``end``; none if the file is missing.

    Args:
        path: the file.
        start, end: bytes; ``None`` for the end of the file.
        checks: is told of all lines, for a caller who wants to know what is damaged.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    checks = checks or LineChecks(start)
    with file:
        file.seek(start)
        for line in file:
            if end is not None and start >= end:
                return
            text = checks.take(line)
            entry = None if text is None else _object_in(text)
            if text is not None and entry is None:
                checks.refuse()
            yield Line(start, start + len(line), entry)
            start += len(line)


def read_search(entry: Mapping[str, Any]) -> Search | None:
    """The search in a group's line of ``trials.jsonl``; ``None`` if it has none, or one that cannot be read."""
    fields = {name: entry.get(name) for name in ("metric", "mode", "trials")}
    if not entry.keys() & fields.keys():
        return None
    try:
        besides = tuple((metric, mode) for metric, mode in entry.get("besides", ()))
        seconds = entry.get("time_budget_s")
        shape = None if entry.get("shape") is None else SearchShape(**entry["shape"])
        return Search(
            **fields,
            extends=entry.get("extends", True),
            besides=besides,
            time_budget_s=seconds,
            shape=shape,
            keeps_best=entry.get("keeps_best", False),
        )
    except (InvalidFieldError, TypeError, ValueError):
        return None


def entry_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line by itself; ``None`` if it has none, or is damaged."""
    offset, text = split_line(line)
    return None if offset == DAMAGED else _object_in(text)


def _object_in(text: bytes) -> dict[str, Any] | None:
    try:
        entry = parse_text(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
