"""What the engine asks of a backend."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
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
    _: KW_ONLY
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

    It forgets the iterations it still had to run. A StopTrial that follows may be answered in its stead. The loss of
    any of its lanes answers it, too.

    Attributes:
        then: the lanes of the Resize that is to follow. A trial that can span several devices runs on while it is set
            up in those that are new, unless it has nothing more to run. Where that fails, TrialFailed from there
            says so, and the trial is paused all the same.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    then: tuple[int, ...] = ()


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

    Lanes it leaves are cleaned up thereby, and do not answer for themselves. Where one of several lanes of a trial is
    lost, those that are left stand still at the end of the last iteration, and go on by a Resize that brings the
    trial to them.

    Attributes:
        lane_ids: the lanes it is to run on; those of the old ones that stay come first.
        old_lane_ids: the lanes it runs on now.
        iterations: how many to run then.
        done: iterations done, as far as the engine knows; any that it has not heard of are among ``iterations``.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    old_lane_ids: tuple[int, ...]
    _: KW_ONLY
    iterations: int
    done: int | None = None


@dataclass(frozen=True, slots=True)
class Call(Command):
    """Call a method of a trial that is in a lane, between two iterations of it if it runs; answered by TrialCalled.

    What was asked of the trial before comes first, but for iterations; what is asked later comes later.

    Attributes:
        lane_ids: rank 0's lane alone.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    _: KW_ONLY
    call_id: int
    method: str
    payload: bytes


# -- for others than the backend ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Notice(Command):
    """Something to tell, or to write down; no backend sees it."""


@dataclass(frozen=True, slots=True)
class NoteResize(Notice):
    """Write down that a trial runs at another width.

    Attributes:
        seconds: for how long it made no progress until then.
    """

    trial_id: str
    _: KW_ONLY
    at: float
    width: float
    device_ids: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class NoteDeviceLost(Notice):
    """Write down that a device is gone, or given up."""

    device_id: int
    at: float


# -- for whoever submitted the trial -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrialNotice(Notice):
    """Something to tell whoever submitted a trial."""

    trial_id: str
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStart(TrialNotice):
    """The trial begins to run, or goes on after it was done or failed. Not told of one that runs to be called only."""

    at: float
    width: float
    device_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(TrialNotice):
    """Tell whoever submitted the trial about a finished iteration."""

    iteration: int
    metrics: Any
    seconds: float
    width: float
    device_ids: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEnd(TrialNotice):
    """Tell whoever submitted the trial that it ended for now.

    Attributes:
        state: ``"DONE"``, ``"STOPPED"`` or ``"FAILED"``.
        failure: why it failed.
    """

    state: str
    iteration: int
    at: float
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCall(TrialNotice):
    """What came of a call.

    Attributes:
        result: what the method returned.
        failure: what it raised, or why it could not be called; ``None`` if it returned.
    """

    call_id: int
    result: bytes | None
    failure: Failure | None
    at: float
