"""Reads payloads, pickled trainables and configs, that a lane was sent in a message or that its host keeps in files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from fluid.lane.protocol import KeptPayload
from fluid.trainables.parted_pickle import load_from, load_pickled

_PAYLOADS = ".payloads"
#: How often to look for a payload that was lost, and seconds between two looks: ten seconds in all.
_LOOKS = 2000
_LOOK_S = 0.005


def payloads_in_memory(memory_folder: str) -> str:
    """Returns the folder for payloads in a session's folder in host memory."""
    return os.path.join(memory_folder, _PAYLOADS)


def payloads_on_disk(run_folder: str, name: str) -> str:
    """Returns the folder for payloads on disk.

    Args:
        run_folder: a run's; machines may share it.
        name: of the machine's folder in host memory.
    """
    return os.path.join(run_folder, f"{_PAYLOADS}-{name}")


def load_payload(payload: bytes | KeptPayload, folders: Sequence[str], tell_missing: Callable[[str], None]) -> Any:
    """Unpickles a payload.

    Args:
        payload: as it came in a message.
        folders: those in which the host keeps payloads.
        tell_missing: called with the name of one that is not there, as host memory was emptied: the driver sends it
            again.

    Raises:
        FileNotFoundError: it did not come within seconds.
    """
    if isinstance(payload, bytes):
        return load_pickled(payload)
    with _find(payload.name, folders, tell_missing) as file:
        return load_from(file)  # Arrays are read straight into their place, or mapped.


def _find(name: str, folders: Sequence[str], tell_missing: Callable[[str], None]) -> BinaryIO:
    file = _open(name, folders)
    if file is None:
        tell_missing(name)
        for _ in range(_LOOKS):
            if (file := _open(name, folders)) is not None:
                return file
            threading.Event().wait(_LOOK_S)
        raise FileNotFoundError(f"{name} is in none of {list(folders)}")
    return file


def _open(name: str, folders: Sequence[str]) -> BinaryIO | None:
    for folder in folders:
        try:
            return open(os.path.join(folder, name), "rb")
        except FileNotFoundError:
            continue
    return None
