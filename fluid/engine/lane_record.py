"""The record of a lane: plain data that the state machine changes, and what a lane reports of itself."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from fluid.engine.events import Event, Failure


@dataclass(frozen=True, slots=True)
class Killing:
    """A lane ends soon: the engine has told the backend to kill it, or a trial has left its device unusable to it.

    Attributes:
        trial_id: the trial because of which.
        failure: what that trial is to blame for; ``None`` if it is stopped.
    """

    trial_id: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class LaneMeasured(Event):
    """A warm lane takes more or less device memory for itself than it reported before.

    Attributes:
        own_bytes: device memory that it takes besides its trials' tensors, such as for a CUDA context; above 0.
    """

    lane_id: int
    own_bytes: float


@dataclass(frozen=True, slots=True)
class StateMeasured(Event):
    """A trial that does not run holds so many bytes in its lane, where the lane has given back what it could.

    Comes before the event that says that the trial does not run, or after it.
    """

    trial_id: str
    lane_id: int
    held_bytes: float


@dataclass(frozen=True, slots=True)
class LaneSpent(Event):
    """A trial has changed a lane's process for good: no further trial is to run there.

    Attributes:
        reason: what it left behind, in one line.
    """

    lane_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class LaneOutdated(Event):
    """Lanes that start on the lane's host from now on have modules loaded that this one would have to import."""

    lane_id: int


@dataclass(slots=True)
class LaneRecord:
    """One lane.

    Attributes:
        device_id: its device; the first one of a gang's lane.
        others: further devices of a gang's lane, of the same host.
        ready: whether the lane has reported that it is warm.
        used: whether a trial's code may have run in it.
        shared: whether trials that may share a process are to run in it; ``False`` for one that is used by a trial that
            is to have a process of its own.
        spent: whether a trial has changed its process for good, so that no other one is to run there.
        holders: the trials that hold the lane, in order of arrival: one, or several that are fused or take turns; empty
            while it is idle.
        sharing_group: the group of trials that others may join here; ``None`` where it has at most one holder.
        rows: how many of its trials it was told to train in one step; ``None`` if nothing.
        step_at: when fused trials last reported a step, seconds.
        failed: trials that have raised there, one after another, since one last reported an iteration.
        trained_key: the profile key of the trial that last reported an iteration; ``None`` before the first.
        draining: trials that were told to leave and may still run here; no other trial is set up here until they have.
        dismissed: trials whose state the lane was told to drop, and has not reported to have dropped.
        residents: trials whose state the lane keeps though they do not run, least recently used first.
        reserved: bytes of device memory by trial, for residents and for trials about to leave.
        own_bytes: device memory that the lane takes for itself, such as for a CUDA context; what other lanes take where
            it was not measured.
        is_measured: whether that was measured.
        killing: set once the lane is known to end soon; ``None`` otherwise.
    """

    lane_id: int
    device_id: int
    others: tuple[int, ...] = ()
    ready: bool = False
    used: bool = False
    shared: bool = False
    spent: bool = False
    holders: dict[str, None] = field(default_factory=dict)
    sharing_group: str | None = None
    rows: int | None = None
    step_at: float = -math.inf
    failed: int = 0
    trained_key: str | None = None
    draining: set[str] = field(default_factory=set)
    dismissed: set[str] = field(default_factory=set)
    residents: OrderedDict[str, None] = field(default_factory=OrderedDict)
    reserved: dict[str, float] = field(default_factory=dict)
    own_bytes: float = 0.0
    is_measured: bool = False
    killing: Killing | None = None

    @property
    def device_ids(self) -> tuple[int, ...]:
        """All its devices."""
        return (self.device_id, *self.others)

    @property
    def usable(self) -> bool:
        """Whether the trials that hold the lane can be told to run."""
        return self.ready and not self.draining and self.killing is None

    @property
    def is_unused(self) -> bool:
        """Whether any trial can have it: none has run there, and none holds it."""
        return not (self.used or self.holders or self.others or self.spent or self.killing is not None)

    @property
    def is_over(self) -> bool:
        """Whether no trial is to run in it any more, and it holds nothing."""
        return (self.spent or (self.used and not self.shared)) and self.is_empty and not self.dismissed

    @property
    def is_empty(self) -> bool:
        """Whether the lane holds nothing that would be lost with it."""
        return not (self.holders or self.draining or self.residents or self.reserved)
