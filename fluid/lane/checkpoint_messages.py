"""What is told of checkpoints on a machine: from where trials were restored, and which checkpoints have moved."""

from __future__ import annotations

from typing import Literal, NamedTuple


class RestoredFrom(NamedTuple):
    """From where a lane restored a trial.

    Attributes:
        source: ``"memory"``, of the lane's host; ``"disk"``; or ``"host"``, another one that sent it.
        seconds: that finding, reading and loading its checkpoint took.
        bytes: of the checkpoint's files.
    """

    source: Literal["memory", "disk", "host"]
    seconds: float
    bytes: int


class CheckpointMoved(NamedTuple):
    """A host has brought a checkpoint into its memory, or moved it to disk.

    Attributes:
        path: its folder now.
        in_memory: whether that is in host memory.
        host: name of the machine.
    """

    path: str
    in_memory: bool
    host: str
