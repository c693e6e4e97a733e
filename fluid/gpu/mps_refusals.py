"""Remembers on which GPUs MPS did not start, so that not every session waits for a start that fails.

A refusal is remembered for a day. A start that took too long may succeed the next time, as the machine was busy, so the
first one is remembered for minutes; a second one in a row, within a day, counts as a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence

from fluid.gpu.driver_notes import delete_note, read_note, write_note
from fluid.gpu.mps_control import MpsError, MpsTimeoutError

_REFUSED, _TIMED_OUT = "mps-refused", "mps-timed-out"
#: Seconds after which a refusal is forgotten, and after which MPS is tried again after one start that took too long.
_LASTS_S = 24 * 3600.0
_TIMEOUT_LASTS_S = 600.0


def recall_refusal(device: str) -> str:
    """Returns why MPS is not to be tried on a GPU now, as a clause; empty if it can be.

    Args:
        device: UUID of the GPU.
    """
    minutes = f"{_TIMEOUT_LASTS_S / 60.0:.0f} minutes"
    for kind, lasts_s, when in ((_REFUSED, _LASTS_S, "day"), (_TIMED_OUT, _TIMEOUT_LASTS_S, minutes)):
        if why := read_note(kind, device, lasts_s=lasts_s):
            return f"MPS did not start on {device} within the last {when}, and packing='mps' tries again: {why}"
    return ""


def remember_refusal(devices: Sequence[str], error: MpsError) -> None:
    """Remembers that MPS did not start on GPUs.

    Args:
        devices: their UUIDs.
        error: why; whether it may start the next time follows from the class.
    """
    for device in devices:
        if isinstance(error, MpsTimeoutError) and not read_note(_TIMED_OUT, device, lasts_s=_LASTS_S):
            write_note(_TIMED_OUT, str(error), device)
        else:
            delete_note(_TIMED_OUT, device)
            write_note(_REFUSED, str(error), device)


def forget_refusal(devices: Sequence[str]) -> None:
    """Forgets refusals, because MPS has started on these GPUs."""
    for device in devices:
        delete_note(_REFUSED, device)
        delete_note(_TIMED_OUT, device)
