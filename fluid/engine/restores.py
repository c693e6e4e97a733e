"""How trials were restored: from where, and how long it took."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: Where a state came from that a trial went on with: the device, on which it had stayed; the memory of the device's
#: host; a disk; or the memory of another host, over the network.
Source = Literal["device", "memory", "disk", "host"]


class Restoring(NamedTuple):
    """How a trial was restored.

    Attributes:
        source: from where.
        seconds: that reading and loading its checkpoint took, without the trial's set-up.
        bytes: of the checkpoint's files.
    """

    source: Source
    seconds: float
    bytes: int
