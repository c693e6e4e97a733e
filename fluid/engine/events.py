"""What can happen to the engine. Every event carries its time; the engine reads no clock."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from fluid.resources import Device, MemoryNeed

#: What may have come of a trial in its submitter's eyes. One that is paused comes back as another trial, or never.
OUTCOMES = ("DONE", "STOPPED", "FAILED", "PAUSED")


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """A trial as the engine knows it: all that matters for scheduling, and nothing else.

    Attributes:
        trial_id: unique within the session.
        budget: iterations to run.
        priority: a higher one starts first.
        profile_key: trials of one key share measured overheads.
        max_width: most devices; 1 for a trial that is not elastic.
        memory: device memory it needs, if known beforehand.
        can_save: whether it can be saved and restored, and so be moved to another lane.
        retry_errors: whether it is tried again after it raised. Lost lanes and memory that ran out never depend on it.
        follow_up_iterations: iterations that later rungs may add after its budget, its critical path.
    """

    trial_id: str
    budget: int
    _: KW_ONLY
    priority: float = 1.0
    profile_key: str = "default"
    max_width: int = 1
    memory: MemoryNeed | None = None
    can_save: bool = True
    retry_errors: bool = True
    follow_up_iterations: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a trial's state was saved.

    Attributes:
        iteration: iterations done when it was saved.
        path: file or folder, on ``host``.
        host: the machine whose memory or disk holds it.
        in_memory: whether it is in host memory, and so gone if the machine is.
    """

    iteration: int
    path: str
    host: str = "localhost"
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trial could not go on, or a call of one of its methods came to nothing.

    Attributes:
        kind: ``"error"`` (the trial raised), ``"out_of_memory"``, ``"lane_lost"``, or ``"stopped"`` for a call of a
            trial that was stopped.
        message: one line for people.
        traceback: the traceback as text, empty where there is none.
        exception: what was raised, pickled; ``None`` where nothing was, or it cannot be pickled.
    """

    kind: str
    message: str
    traceback: str = ""
    exception: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        at: seconds, on the clock of whoever reports it.
    """

    at: float


# -- from whoever submits trials --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupSubmitted(Event):
    """A TrialGroup arrived."""

    group_id: str
    trials: tuple[TrialSpec, ...]


@dataclass(frozen=True, slots=True)
class TrialHistory:
    """A trial as an earlier session left it.

    Attributes:
        trial: what was submitted.
        budget: iterations it may run in all.
        reported: iterations passed on so far.
        checkpoint: newest one that can still be read.
        ended: ``"DONE"``, ``"STOPPED"`` or ``"FAILED"``; ``None`` if it had not ended.
        failures: times it failed and was queued again.
    """

    trial: TrialSpec
    _: KW_ONLY
    budget: int
    reported: int = 0
    checkpoint: Checkpoint | None = None
    ended: str | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True)
class GroupRecovered(Event):
    """A TrialGroup of an earlier session goes on: trials that had not ended are queued, from their checkpoints.

    Attributes:
        forgotten: ids of its trials that were forgotten.
    """

    group_id: str
    trials: tuple[TrialHistory, ...]
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrialAdded(Event):
    """A trial joined a group that is there."""

    group_id: str
    trial: TrialSpec


@dataclass(frozen=True, slots=True)
class BudgetExtended(Event):
    """A trial got ``iterations`` more; one that was done runs again.

    Attributes:
        follow_up_iterations: iterations that may be asked for after those, of it or of others that wait for it.
    """

    trial_id: str
    iterations: int
    _: KW_ONLY
    follow_up_iterations: int = 0


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """A trial shall run no further.

    Attributes:
        outcome: what came of it in the submitter's eyes, one of :data:`OUTCOMES`; ``None`` for the state it ends in.
    """

    trial_id: str
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class CallRequested(Event):
    """A method of a trial's trainable is to be called, between two iterations.

    Attributes:
        call_id: unique among the calls of this trial.
        method: its name.
        payload: the arguments, as the submitter and the lane understand them.
    """

    trial_id: str
    _: KW_ONLY
    call_id: int
    method: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class TrialForgotten(Event):
    """A trial that has ended will not be asked for again: nothing of it is kept but that its id is taken."""

    trial_id: str


# -- from the backend ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceAdded(Event):
    """A device can be used."""

    device: Device


@dataclass(frozen=True, slots=True)
class DeviceLost(Event):
    """A device is gone, and every lane on it."""

    device_id: int


@dataclass(frozen=True, slots=True)
class LaneReady(Event):
    """A lane the engine asked for is warm.

    Attributes:
        own_bytes: device memory that it takes for itself, before it hosts a trial; 0 where that is not known.
    """

    lane_id: int
    own_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneLost(Event):
    """A lane died, or could not be started.

    Attributes:
        culprit: the trial whose code ran when it died; ``None`` where none did or it is unknown.
        blameless: whether no trial in it is to blame: it was ended because of something outside it.
    """

    lane_id: int
    reason: str
    _: KW_ONLY
    culprit: str | None = None
    blameless: bool = False


@dataclass(frozen=True, slots=True)
class TrialStarted(Event):
    """A trial was set up, or restored, on its lanes.

    Attributes:
        iteration: iterations it has done, 0 for one set up afresh.
        seconds: what that took.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    iteration: int
    seconds: float


@dataclass(frozen=True, slots=True)
class IterationDone(Event):
    """A trial finished an iteration.

    Attributes:
        iteration: its number, from 1. That of the iteration before, where the trial found that none was left to do.
        seconds: wall time of this iteration.
        metrics: what the trial reported; the engine only passes it on.
        memory: peak device memory, if measured.
        finished: the trial says that it has no more to do, whatever its budget.
        busy: share of the iteration in which it kept its device busy, if measured.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    iteration: int
    seconds: float
    metrics: Any = None
    memory: MemoryNeed | None = None
    finished: bool = False
    busy: float | None = None


@dataclass(frozen=True, slots=True)
class TrialPaused(Event):
    """A trial stopped between two iterations, as asked, and stays resident in its lane."""

    trial_id: str
    lane_id: int
    _: KW_ONLY
    iteration: int


@dataclass(frozen=True, slots=True)
class TrialSaved(Event):
    """A trial was saved, of the lane's own accord or as asked.

    Attributes:
        dropped: whether it left the lane thereby.
        seconds: what it took.
    """

    trial_id: str
    lane_id: int
    checkpoint: Checkpoint
    _: KW_ONLY
    dropped: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialReleased(Event):
    """A trial was cleaned up and left this lane. Every lane it ran in says so for itself."""

    trial_id: str
    lane_id: int


@dataclass(frozen=True, slots=True)
class ResizeDone(Event):
    """A trial runs at its new width.

    Attributes:
        seconds: for how long it made no progress: one measurement of epsilon.
        lane_id: the new rank 0; ``None`` if whoever reports it makes sure that it is not out of date.
    """

    trial_id: str
    seconds: float
    lane_id: int | None = None


@dataclass(frozen=True, slots=True)
class TrialFailed(Event):
    """A trial raised; it has left its lane, the lane goes on."""

    trial_id: str
    lane_id: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class TrialCalled(Event):
    """A method of a trial was called; the trial is as the method left it, also where that raised.

    Attributes:
        result: what the method returned, as the submitter and the lane understand it.
        failure: what it raised; ``None`` if it returned.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    call_id: int
    result: bytes | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed."""
