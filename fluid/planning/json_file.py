"""Writes JSON files such that a reader finds the old content or the new, never a part."""

from __future__ import annotations

import json
import os

from fluid._private_files import replacing


def write_json(path: str | os.PathLike[str], content: object) -> None:
    """Writes ``content`` to a file atomically.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
        ValueError: a number is infinite or NaN.
    """
    with replacing(path, private=False) as draft, draft.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
