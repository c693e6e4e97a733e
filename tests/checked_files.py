"""Changes the files of a run folder as Fluid would have written them: with checksums that are right, or none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from fluid.checksums import checked_lines, split_object
from fluid.results.run_files import ENDS, SESSION

_CHECKSUM = re.compile(rb', "crc": "[^"]*"\}\s*\Z')


def checked(lines: Iterable[bytes], offset: int = 0) -> bytes:
    """Lines as they are written at a byte of a file, in place of the checksums that they have, if any."""
    return checked_lines((_CHECKSUM.sub(b"}", line).rstrip(b"\n").decode() for line in lines), offset)


def without_checksums(folder: Path) -> Path:
    """Makes a run folder as an older Fluid has left it, but for ``payloads.pkl``; returns it."""
    for path in folder.glob("*.jsonl"):
        path.write_bytes(b"".join(_CHECKSUM.sub(b"}\n", line) for line in path.read_bytes().splitlines(keepends=True)))
    for path in folder.glob("*.json"):
        path.write_bytes(split_object(path.read_bytes()) or b"")
    facts = json.loads((folder / SESSION).read_bytes())
    facts.pop(ENDS, None)
    (folder / SESSION).write_text(json.dumps({**facts, "format": 1}))
    return folder


def append_checked(path: Path, text: str) -> bytes:
    """Appends a line to a file; returns it."""
    line = checked([text.encode()], path.stat().st_size)
    with path.open("ab") as file:
        file.write(line)
    return line


def write_checked(path: Path, lines: Iterable[str | bytes]) -> None:
    """Writes a file of JSON lines anew."""
    path.write_bytes(checked(line.encode() if isinstance(line, str) else line for line in lines))
