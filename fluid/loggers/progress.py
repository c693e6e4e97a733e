"""What each logger has stored of a session, in a file of the run folder, so that a resumed session goes on there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluid._logs import without_secrets
from fluid.checksums import LineChecks, checked_lines
from fluid.results.folder_files import json_lines
from fluid.results.torn_files import cut_torn_line, tell_damage
from fluid.session.folder.files import AppendedFile

LOGGERS = "loggers.jsonl"


@dataclass(slots=True)
class LoggerProgress:
    """What one logger has stored.

    Attributes:
        results: the number of lines of ``results.jsonl``.
        ends: how the trials ended of whose end it was told, by their ids.
    """

    results: int = 0
    ends: dict[str, str] = field(default_factory=dict)


def read_progress(run_dir: Path) -> dict[str, LoggerProgress]:
    """What the loggers of earlier sessions have stored, by their keys. Cuts a torn last line off."""
    cut_torn_line(run_dir / LOGGERS)
    found: dict[str, LoggerProgress] = {}
    checks = LineChecks()
    for line in json_lines(run_dir / LOGGERS, checks=checks):
        entry = line.entry or {}
        results, ends = entry.get("results"), entry.get("ends")
        if isinstance(results, int) and isinstance(ends, dict):
            # An older Fluid wrote destinations as they were.
            stored = found.setdefault(without_secrets(str(entry.get("logger"))), LoggerProgress())
            stored.results = results
            stored.ends.update(ends)
    tell_damage(run_dir / LOGGERS, checks)
    return found


class LoggerProgressFile:
    """Appends to the file."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOGGERS

    def append(self, key: str, results: int, ends: dict[str, str]) -> None:
        """Notes how far a logger has come, and the ends that it was told since the last call."""
        entry: dict[str, Any] = {"logger": key, "results": results, "ends": ends}
        with AppendedFile(self._path) as file:
            file.append(checked_lines([json.dumps(entry)], file.next_offset))
