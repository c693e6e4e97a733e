"""The results of a day: a file of JSON lines that only grows, so that a process killed at any moment loses nothing.

There are three kinds of records::

    {"machine": {...}, "date": "2026-11-27"}                       the program began
    {"stage": "sweeps", "figure": "off", "value": ..., "at_s": 3.1}  a stage found a figure
    {"stage": "sweeps", "status": "begun" | "done" | ..., "seconds": 80.2, "date": ..., "output": ...}
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The file's name.
FILE = "gpu_day.jsonl"
#: The status of a stage that was never ended: it, or the program, was killed.
BEGUN = "begun"
#: The status of a stage that came to its end.
DONE = "done"
#: Significant digits of figures.
_DIGITS = 5


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds a record, after a new line if a killed process has left half of one."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        is_whole = size == 0 or os.pread(file, 1, size - 1) == b"\n"
        os.write(file, f"{'' if is_whole else chr(10)}{json.dumps(record, default=str)}\n".encode())
    finally:
        os.close(file)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Returns the records, without lines of which a killed process wrote only a part."""
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


@dataclass
class Day:
    """What the records of one machine come to.

    Attributes:
        machine: as in the newest record of a machine; those before it count if they have the same.
        date: of that record.
        stages: by name: ``status``, ``seconds``, ``date``, ``output`` of one that failed, and ``figures`` by name, of
            the last time that it was begun.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Day:
        """Reads a file; a day without stages if there is none."""
        day = cls()
        for record in read(path):
            if "machine" in record:
                if day.machine != record["machine"]:
                    day.stages.clear()
                day.machine, day.date = record["machine"], record["date"]
            elif record.get("status") == BEGUN:
                day.stages[record["stage"]] = {**record, "figures": {}}
            elif stage := day.stages.get(record.get("stage", "")):
                if "figure" in record:
                    stage["figures"][record["figure"]] = record["value"]
                    stage["seconds"] = record["at_s"]
                else:
                    stage.update(record)
        return day

    def status(self, name: str) -> str | None:
        """The status of a stage; ``None`` if it was never begun."""
        found: str | None = self.stages.get(name, {}).get("status")
        return found


class Figures:
    """The figures of a stage, each of which is in the file as soon as it is known.

    Args:
        path: the file.
        stage: name of the stage.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self.values: dict[str, Any] = {}
        self.path, self._stage = path, stage
        self._begun = time.monotonic()

    def __setitem__(self, name: str, value: Any) -> None:
        self.values[name] = value = _rounded(value)
        at_s = round(time.monotonic() - self._begun, 2)
        append(self.path, {"stage": self._stage, "figure": name, "value": value, "at_s": at_s})

    def attempt(self, name: str, measure: Callable[[], Any]) -> Any:
        """Records what a measurement returns, and returns it; or records its error, so that the stage goes on."""
        try:
            found = measure()
        except Exception as error:
            self[name] = f"{type(error).__name__}: {error}"[:500]
            return None
        self[name] = found
        return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(name): _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
