"""The messages between the driver and the host on another node: named tuples, pickled in batches.

A host also sends :class:`fluid.backends.base.LaneDying`, :class:`fluid.backends.base.LaneExited`,
:class:`fluid.backends.base.LaneSuperseded`, :class:`fluid.backends.base.LaneText`, and
:class:`fluid.lane.protocol.CheckpointMoved` and
:class:`fluid.lane.protocol.CheckpointPersisted`.
"""

from __future__ import annotations

from typing import NamedTuple

from fluid.backends.base import DeviceBinding, Sharing

# -- from the driver to a host --------------------------------------------------------------------------------


class LaunchLane(NamedTuple):
    """Fork a lane, with a connection to the driver of its own; ``echo`` says whether to send what its trials print."""

    lane_id: int
    binding: DeviceBinding
    echo: bool = False


class EndLane(NamedTuple):
    """Kill a lane."""

    lane_id: int


class DumpLane(NamedTuple):
    """Have the stacks of a lane's threads written to the log of a trial."""

    lane_id: int
    trial_id: str


class PreloadModules(NamedTuple):
    """Load modules before the next lane is forked; late: as soon as no lane waits for it."""

    modules: tuple[str, ...]
    late: bool = False


class StorePayload(NamedTuple):
    """Keep a payload for the lanes: a part of it, in order. The last one is answered by PayloadStored.

    Attributes:
        number: of the transfer.
        name: the payload's.
        size: of the whole payload, bytes.
        offset: where the part begins.
        data: the part.
    """

    number: int
    name: str
    size: int
    offset: int
    data: bytes


class DropPayload(NamedTuple):
    """Delete a payload, or the part of one that has arrived."""

    name: str


class ValueTrials(NamedTuple):
    """What the checkpoints of trials are worth, by trial: (probability of a restore, whether it is pinned)."""

    values: dict[str, tuple[float, bool]]


class ForgetTrial(NamedTuple):
    """Delete the checkpoints of a trial; with ``keep_newest``, the newest outlives the run."""

    trial_id: str
    keep_newest: bool


class PersistCheckpoint(NamedTuple):
    """Copy a checkpoint to disk, with ``keep`` to where it outlives the run; answered by CheckpointPersisted."""

    trial_id: str
    path: str
    keep: bool


class DiscardKept(NamedTuple):
    """Remove a checkpoint from those that outlive the run; with ``demote``, its trial may be restored from it."""

    path: str
    demote: bool


class BringCheckpoint(NamedTuple):
    """Bring a checkpoint, written to ``path``, into the host's memory; ``source`` as in StartResident."""

    trial_id: str
    path: str
    source: tuple[str, int] | None


class EndHost(NamedTuple):
    """The session is over: end every lane, clear the folders, and end."""


# -- from a host to the driver ---------------------------------------------------------------------------------


class HostStarted(NamedTuple):
    """The first message of a host: where it serves the checkpoints of its machine."""

    checkpoints_at: tuple[str, int]


class SharingChanged(NamedTuple):
    """How lanes that are started now share a GPU; sent in the beginning, and when it changes."""

    sharing: Sharing


class PayloadStored(NamedTuple):
    """A payload has arrived; whether the host keeps it."""

    number: int
    name: str
    is_kept: bool
