"""Reads JSON files, and writes them such that a reader finds the old content or the new, never a part."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from fluid._private_files import replacing
from fluid.checksums import checked_object, split_object


def write_json(path: str | os.PathLike[str], content: Mapping[str, object]) -> None:
    """Writes ``content``, which is not empty, to a file atomically, with its checksum.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
        ValueError: a number is infinite or NaN.
    """
    with replacing(path, private=False) as draft, draft.open("wb") as file:
        file.write(checked_object(json.dumps(content, indent=1, allow_nan=False)))
        file.flush()
        os.fsync(file.fileno())


def parse_json(data: bytes) -> Any:
    """The value of a JSON file, which may end with a checksum.

    Raises:
        ValueError: the file is not JSON, or its checksum is of another content.
    """
    content = split_object(data)
    if content is None:
        raise ValueError("its checksum is of another content; if you have changed the file, delete its entry crc")
    return json.loads(content.decode("utf-8"))
