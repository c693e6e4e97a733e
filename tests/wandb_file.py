"""Reads the file of an offline run of Weights & Biases, which is a log of protocol buffers in LevelDB's format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waiting import eventually

_BLOCK, _FILE_HEADER, _HEADER = 1 << 15, 7, 7
_LAST = (1, 4)


def records(folder: Path) -> Iterator[Any]:
    """The records of a run's folder."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("*.wandb")
    data, at, parts = path.read_bytes(), _FILE_HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + _HEADER + length > len(data):
            return  # It is being written.
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in _LAST:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


class OfflineRun:
    """One run.

    Attributes:
        run: what was told of it at its start.
        history: the logged values of each step.
        summary: the summary.
        config: the config.
        exit_code: with which it ended; ``None`` if it has not.
    """

    def __init__(self, folder: Path) -> None:
        self.run: Any = None
        self.history: dict[int, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.exit_code: int | None = None
        for record in records(folder):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                self.config |= _values(record.run.config.update)
            elif kind == "config":
                self.config |= _values(record.config.update)
            elif kind == "history":
                self.history[record.history.step.num] = _values(record.history.item)
            elif kind == "summary":
                self.summary |= _values(record.summary.update)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code


def offline_runs(folder: Path) -> dict[str, list[OfflineRun]]:
    """The offline runs below a folder, by name; several if a session was resumed. Waits until each has ended."""
    found: dict[str, list[OfflineRun]] = {}
    for path in sorted((folder / "wandb").glob("offline-run-*")):
        # Wandb's own process writes the file, and may be behind.
        run = eventually(lambda path=path: read if (read := OfflineRun(path)).exit_code is not None else None)
        found.setdefault(run.run.display_name, []).append(run)
    return found


def _values(items: Any) -> dict[str, Any]:
    found = {}
    for item in items:
        name = "/".join(item.nested_key) or item.key
        found[name] = json.loads(item.value_json)
    return {name: value for name, value in found.items() if not name.startswith("_")}
