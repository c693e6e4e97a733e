"""Writes JSON files such that a reader finds the old content or the new, never a part."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path


def write_json(path: str | os.PathLike[str], content: object) -> None:
    """Writes ``content`` to a file atomically.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
        ValueError: a number is infinite or NaN.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
