"""What the engine asks of a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fluid.engine.events import Checkpoint, Failure


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do. A backend carries commands out in the order given, per lane.

    Every question is answered before the trial's lanes are given to somebody else. A failure (TrialFailed) or the
    loss of the lane answers all that was asked of a trial there. Where a trial runs in several lanes, the first one
    answers for all of them, but every lane answers StopTrial for itself.
    """


@dataclass(frozen=True, slots=True)
class StartLane(Command):
    """Start a warm worker process bound to a device; answered by LaneReady or LaneLost."""

    lane_id: int
    device_id: int


@dataclass(frozen=True, slots=True)
class StopLane(Command):
    """End a lane. It is not answered; its residents are gone."""

    lane_id: int


@dataclass(frozen=True, slots=True)
class StartTrial(Command):
    """Set a trial up, or restore it, and run it; answered by TrialStarted and IterationDone, or TrialFailed.

    A trial that says it has finished runs no further, whatever it was asked for.

    Attributes:
        lane_ids: one per device of its width, the first is rank 0.
        iterations: how many to run on end.
        checkpoint: where to restore from; ``None`` to begin afresh.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    iterations: int
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class RunIteration(Command):
    """Run a resident trial further; answered by IterationDone, or TrialFailed.

    Attributes:
        lane_ids: where it runs. A trial that ran wide and was then stopped in all lanes but the first goes on there
            alone.
        iterations: how many to run on end; added to what it still has to run.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    iterations: int


@dataclass(frozen=True, slots=True)
class Pause(Command):
    """Stop a trial at the end of its current iteration; answered by TrialPaused. It stays resident.

    It forgets the iterations it still had to run. A StopTrial that follows may be answered in its stead.
    """

    trial_id: str
    lane_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save(Command):
    """Save a resident trial that does not run; answered by TrialSaved or TrialFailed.

    Attributes:
        drop: whether it leaves the lane thereby.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    drop: bool = False


@dataclass(frozen=True, slots=True)
class StopTrial(Command):
    """Stop a trial at the end of its current iteration, or let a resident one go, and clean it up.

    Answered by TrialReleased from each of these lanes in which the trial still is.
    """

    trial_id: str
    lane_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resize(Command):
    """Bring a trial that does not run from one set of lanes to another; answered by ResizeDone, or TrialFailed.

    Lanes it leaves are cleaned up thereby, and do not answer for themselves.

    Attributes:
        lane_ids: the lanes it is to run on; those of the old ones that stay come first.
        old_lane_ids: the lanes it runs on now.
        iterations: how many to run then.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    old_lane_ids: tuple[int, ...]
    iterations: int


@dataclass(frozen=True, slots=True)
class Report(Command):
    """Tell whoever submitted the trial about a finished iteration."""

    trial_id: str
    group_id: str
    iteration: int
    metrics: Any
    seconds: float
    width: float
    device_ids: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True)
class ReportEnd(Command):
    """Tell whoever submitted the trial that it ended for now.

    Attributes:
        state: ``"DONE"``, ``"STOPPED"`` or ``"FAILED"``.
        failure: why it failed.
    """

    trial_id: str
    group_id: str
    state: str
    iteration: int
    at: float
    failure: Failure | None = None
