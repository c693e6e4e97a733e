"""Notes about the GPU driver in the user's cache folder, so that not every session finds the same out again.

Each note is a small file, whose name has the version of the driver: a new driver has no notes. Nothing is noted where
the version is unknown, there is no cache folder, as for a user of a container without a home, or it cannot be written
to.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from fluid._clock import wall_seconds
from fluid.gpu.nvml import driver_version

_LONGEST_TEXT = 500


def read_note(kind: str, about: str = "", *, lasts_s: float | None = None) -> str:
    """Returns the text of a note; empty if there is none.

    Args:
        kind: what it says, part of the file's name.
        about: what it is about, such as the UUID of a GPU.
        lasts_s: seconds after which a note does not count any more; ``None`` for ever.
    """
    path = _path(kind, about)
    try:
        if path is None or (lasts_s is not None and wall_seconds() - path.stat().st_mtime > lasts_s):
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def write_note(kind: str, text: str, about: str = "") -> None:
    """Writes a note in place of an earlier one; at most 500 characters of it."""
    path = _path(kind, about)
    if path is not None:
        with suppress(OSError):  # There may be no home folder to write to.
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.{os.getpid()}")
            new.write_text(text[:_LONGEST_TEXT], encoding="utf-8")
            new.replace(path)  # Other processes may be reading it.


def delete_note(kind: str, about: str = "") -> None:
    """Deletes a note, if there is one."""
    path = _path(kind, about)
    if path is not None:
        with suppress(OSError):
            path.unlink()


def _path(kind: str, about: str) -> Path | None:
    """The file of a note; ``None`` if the driver's version is unknown, or there is no cache folder."""
    version = driver_version()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = "-".join(filter(None, (kind, version, re.sub(r"[^\w.+-]+", "-", about))))
    # Without a home, expanduser() leaves the "~", which would be a folder where the program runs.
    return Path(cache, "fluid", name) if version is not None and os.path.isabs(cache) else None
