"""Faults of files: what a crash leaves of a session's files, and checkpoints that are damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Entries of the journal that answer no request of the submitter: a crash may lose the last of them.
_INTERNAL = ("IterationReported", "TrialSaved", "ProfileSaved", "NoteResize")


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Returns the entry of a line of a session's files; ``None`` if the line is not whole."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def damage_checkpoint(draws: random.Random, *places: Path) -> bool:
    """Damages the newest checkpoint of a trial: a byte changes, the end is missing, a file, or all of it."""
    trials: dict[str, list[Path]] = {}
    for place in places:
        for state in place.glob("**/state"):
            if state.parent.name[:1].isdecimal():
                name = state.parent.parent.name
                trials.setdefault(state.parents[2].name if name == "checkpoints" else name, []).append(state.parent)
    if not trials:
        return False
    newest = max(trials[draws.choice(sorted(trials))], key=lambda path: path.name)
    files = sorted(path for path in newest.glob("**/*") if path.is_file())
    way = draws.choice(["flip", "flip", "truncate", "empty", "delete_file", "delete"])
    with suppress(OSError):
        if way == "delete" or not files:
            shutil.rmtree(newest)
            return True
        file = draws.choice(files)
        if way == "delete_file":
            file.unlink()
            return True
        # Not in place: a reader may hold the file, and a disk that fails gives the same to all.
        content = bytearray(file.read_bytes())
        if not content:
            return False
        at = draws.randrange(len(content))
        if way == "flip":
            content[at] ^= 1 << draws.randrange(8)
        file.write_bytes(content[:0] if way == "empty" else content[:at] if way == "truncate" else content)
        return True
    return False


def tear(kind: str, draws: random.Random, run: Path) -> bool:
    """Leaves a file of a session whose driver is dead as a crash in the middle of a write does.

    Whole entries that the driver had written stay, but for the last one of the journal if it tells of nothing that the
    submitter was promised: that line may be cut.
    """
    file = run / {
        "torn_results": "results.jsonl", "torn_journal": "journal.jsonl", "torn_trials": "trials.jsonl",
        "torn_payloads": "payloads.pkl",
    }[kind]  # fmt: skip
    try:
        content = file.read_bytes()
    except OSError:
        return False
    if not content:
        return False
    if kind == "torn_journal" and draws.random() < 0.6:
        lines = content.splitlines(keepends=True)
        if _is_internal(lines[-1], run):
            os.truncate(file, len(content) - draws.randint(1, len(lines[-1]) - 1))
            return True
    if kind == "torn_results" and _cut_untold(draws, run, content):
        return True
    last = content.splitlines(keepends=True)[-1] if kind != "torn_payloads" else content[-draws.randint(2, 400) :]
    half = last[: draws.randint(1, max(1, len(last) - 2))]
    garbage = bytes(draws.randrange(1, 256) for _ in range(draws.randint(1, 40))).replace(b"\n", b"?")
    tail = draws.choice([half, half, garbage, bytes(draws.randint(1, 4096))])
    with file.open("ab") as stream:
        stream.write(tail)
    return True


def _is_internal(line: bytes, run: Path) -> bool:
    """Whether a line of the journal may be lost: the results that it tells of are in results.jsonl."""
    entry = entry_of(line)
    if entry is None or entry.get("what") not in _INTERNAL:
        return False
    if entry["what"] != "IterationReported":
        return True
    known = {(result.get("trial"), result.get("iteration")) for result in results(run)}
    return (entry.get("trial_id"), entry.get("iteration")) in known


def _cut_untold(draws: random.Random, run: Path, content: bytes) -> bool:
    """Cuts the last line of results.jsonl, and all of the journal's that tells of it, if no driver has told of it."""
    lines = content.splitlines(keepends=True)
    journal = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    entry, entries = entry_of(lines[-1]), [entry_of(line) or {} for line in journal]
    if entry is None or "trial" not in entry or not entries:
        return False
    trial, iteration = entry["trial"], entry["iteration"]

    def tells(entry: dict[str, Any]) -> bool:
        what = entry.get("what"), entry.get("trial_id"), entry.get("iteration")
        return what == ("IterationReported", trial, iteration)

    for path in run.parents[1].glob("told-*.jsonl"):
        for told in map(json.loads, path.read_text().splitlines()):
            if (told.get("trial"), told.get("iteration")) == (trial, iteration):
                return False
    if any(tells(entry) for entry in entries[:-1]):
        return False
    if tells(entries[-1]):
        os.truncate(run / "journal.jsonl", sum(map(len, journal[:-1])))
    os.truncate(run / "results.jsonl", len(content) - draws.randint(1, len(lines[-1]) - 1))
    return True


def results(run: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of results.jsonl."""
    return entries_of(run / "results.jsonl")


def entries_of(file: Path, first: int = 0, end: int | None = None) -> list[dict[str, Any]]:
    """Returns the entries of whole lines of a file, of those from the first on and before the end."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError:
        return []
    return [entry for entry in map(entry_of, lines[first:end]) if entry is not None]
