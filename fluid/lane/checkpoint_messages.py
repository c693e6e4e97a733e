"""What is told of checkpoints on a machine: from where trials were restored, which have moved, and were copied."""

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


class CheckpointPersisted(NamedTuple):
    """A host has copied a checkpoint to disk, or could not.

    Attributes:
        path: the copy's folder; that of the checkpoint if there is none.
        host: name of the machine.
        keep: whether the copy is to outlive the run.
        bytes: of such a copy.
        seconds: that this took.
        problem: why there is none, in one line; empty if there is.
    """

    trial_id: str
    path: str
    host: str
    keep: bool
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
