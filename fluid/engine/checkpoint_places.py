"""Where checkpoints are: what the engine tells the stores of hosts, and what it hears from them.

Each host keeps the checkpoints of its lanes in its memory as far as there is room, and the others on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fluid.engine.commands import Command
from fluid.engine.events import Checkpoint, Event


class CheckpointValue(NamedTuple):
    """What the newest checkpoint of a trial is worth to keep in memory.

    Attributes:
        returns: probability that the trial is restored from it, from 0 to 1.
        pinned: whether it stays in memory as long as others that are not pinned can go.
    """

    returns: float
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ValueCheckpoints(Command):
    """Tell the store of every host what checkpoints are worth. Those of trials that were never named have 0.5.

    Attributes:
        values: by trial, where they have changed.
    """

    values: Mapping[str, CheckpointValue]


@dataclass(frozen=True, slots=True)
class PrefetchCheckpoint(Command):
    """Bring a checkpoint into the memory of a host, in the background; answered by CheckpointPlaced if it is there.

    Attributes:
        host: name of the machine whose lanes are to find it in memory.
    """

    trial_id: str
    checkpoint: Checkpoint
    host: str


@dataclass(frozen=True, slots=True)
class CheckpointPlaced(Event):
    """A store has moved a checkpoint to memory or to disk.

    Attributes:
        checkpoint: where it is now.
    """

    trial_id: str
    checkpoint: Checkpoint
