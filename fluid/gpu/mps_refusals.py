"""Remembers for a day on which GPUs MPS did not start, so that not every session waits for a start that fails.

Each GPU and driver version has one file in the user's cache folder; its age is that of the refusal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fluid._clock import wall_seconds
from fluid.gpu.nvml import driver_version

#: Seconds after which a refusal is forgotten.
_LASTS_S = 24 * 3600.0
_LONGEST_TEXT = 500


def recall_refusal(device: str) -> str:
    """Returns why MPS did not start on a GPU within the last day, as a clause; empty if that is not known.

    Args:
        device: UUID of the GPU.
    """
    path = _file(device)
    try:
        if path is None or wall_seconds() - path.stat().st_mtime > _LASTS_S:
            return ""
        why = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return f"MPS did not start on {device} within the last day, and packing='mps' tries again: {why}"


def remember_refusal(devices: Sequence[str], why: str) -> None:
    """Remembers that MPS did not start on GPUs, given by their UUIDs."""
    for path in filter(None, map(_file, devices)):
        with suppress(OSError):  # There may be no home folder to write to.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(why[:_LONGEST_TEXT], encoding="utf-8")


def forget_refusal(devices: Sequence[str]) -> None:
    """Forgets refusals, because MPS has started on these GPUs."""
    for path in filter(None, map(_file, devices)):
        with suppress(OSError):
            path.unlink()


def _file(device: str) -> Path | None:
    """The file of a GPU; ``None`` if the driver's version is unknown."""
    version = driver_version()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if version is None else Path(cache, "fluid", f"mps-refused-{version}-{device}")
