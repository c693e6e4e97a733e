"""Remembers for a day on which GPUs MPS did not start, so that not every session waits for a start that fails."""

from __future__ import annotations

from collections.abc import Sequence

from fluid.gpu.driver_notes import delete_note, read_note, write_note

_KIND = "mps-refused"
#: Seconds after which a refusal is forgotten.
_LASTS_S = 24 * 3600.0


def recall_refusal(device: str) -> str:
    """Returns why MPS did not start on a GPU within the last day, as a clause; empty if that is not known.

    Args:
        device: UUID of the GPU.
    """
    why = read_note(_KIND, device, lasts_s=_LASTS_S)
    return why and f"MPS did not start on {device} within the last day, and packing='mps' tries again: {why}"


def remember_refusal(devices: Sequence[str], why: str) -> None:
    """Remembers that MPS did not start on GPUs, given by their UUIDs."""
    for device in devices:
        write_note(_KIND, why, device)


def forget_refusal(devices: Sequence[str]) -> None:
    """Forgets refusals, because MPS has started on these GPUs."""
    for device in devices:
        delete_note(_KIND, device)
