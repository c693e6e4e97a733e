"""Messages between the driver and a lane about checkpoints that outlive the run; see :mod:`fluid.lane.messages`."""

from __future__ import annotations

from typing import NamedTuple

from fluid.keeping import WorstKept


class KeepBar(NamedTuple):
    """What is worth keeping of a group's trials.

    Attributes:
        bar: what an iteration must pass for its checkpoint to outlive the run; ``None`` if any will do.
        room: bytes that are left of the quota for such checkpoints; ``None`` if there is no quota.
    """

    group: str
    bar: WorstKept | None
    room: int | None


class ResidentNotKept(NamedTuple):
    """A checkpoint that was to outlive the run was not written; ``reason`` is one line."""

    at: float
    trial_id: str
    iteration: int
    reason: str
