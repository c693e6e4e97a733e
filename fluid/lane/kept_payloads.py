"""Reads payloads, pickled trainables and configs, that a lane was sent in a message or that its host keeps in files."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any, BinaryIO

from fluid.lane.messages import KeptPayload

_PAYLOADS = ".payloads"


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


def load_payload(payload: bytes | KeptPayload, folders: Sequence[str]) -> Any:
    """Unpickles a payload.

    Args:
        payload: as it came in a message.
        folders: those in which the host keeps payloads.

    Raises:
        FileNotFoundError: the host does not keep it.
    """
    if isinstance(payload, bytes):
        return pickle.loads(payload)
    with _open(payload.name, folders) as file:
        return pickle.load(file)  # Arrays are read straight into their place.


def _open(name: str, folders: Sequence[str]) -> BinaryIO:
    for folder in folders:
        try:
            return open(os.path.join(folder, name), "rb")
        except FileNotFoundError:
            continue
    raise FileNotFoundError(f"{name} is in none of {list(folders)}")
