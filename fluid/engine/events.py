"""What can happen to the engine. Every event carries its time; the engine reads no clock."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from statistics import median_low
from typing import Literal, NamedTuple

from fluid.devices.constraints import Constraint
from fluid.keeping import Kept
from fluid.resources import Device, MemoryNeed, Requires
from fluid.search_shape import Rung
from fluid.trainables.encoded_metrics import NO_METRICS, EncodedMetrics, IterationRun
from fluid.trial_fields import IterationTimeout
from fluid.trialgroup import TrialState

# -- what events speak of --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """A trial as the engine knows it: what matters for scheduling.

    Attributes:
        trial_id: unique within the session.
        budget: iterations to run.
        priority: trials of a higher priority start first.
        profile_key: trials of one key share measured overheads; a gang shares none with trials of one device.
        max_width: most devices; 1 for a trial that is not elastic.
        memory: device memory it needs, if known beforehand.
        can_save: whether it can be saved and restored, and so moved to another lane.
        retry_errors: whether it is tried again after it raised; after a lost lane or out of memory it always is.
        follow_up_iterations: iterations that later rungs may add after its budget, its critical path.
        iteration_timeout_s: when an iteration counts as hung: see :class:`fluid.trialgroup.Trial`.
        requires: what its devices must have; ``None`` if any will do.
        devices: the devices that the submitter asks for: see :class:`fluid.trialgroup.Trial`.
        gang: whether one lane holds all of these.
        keep_last: whether its newest checkpoint is to outlive the run.
        fusible: whether it can be fused with others like it.
        isolated: whether it runs in a lane that has run no other trial, and that ends with it.
        extends: whether its submitter may extend it once its budget is used up; ``None`` if unknown.
        config: texts of the values of its config by dotted name: they tell which trials may be like it.
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
    iteration_timeout_s: IterationTimeout = "auto"
    requires: Requires | None = None
    devices: float | None = None
    gang: bool = False
    keep_last: bool = False
    fusible: bool = False
    isolated: bool = False
    extends: bool | None = None
    config: tuple[tuple[str, str], ...] = ()

    def constraint(self) -> Constraint | None:
        """What the trial asks of its devices; ``None`` if nothing."""
        return Constraint.of(self.requires, self.devices, self.gang)

    @property
    def wanted_devices(self) -> str:
        """The devices that it asks for, in words."""
        return (self.constraint() or Constraint()).wanted(self.memory)


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """The terms on which a group is submitted.

    Attributes:
        owner: the groups of one owner are scheduled as one; ``None`` for an owner of its own.
        priority: its trials start before those of groups of a lower priority.
        preempt: whether running trials of groups of a lower priority are paused for it.
        expected_trials: trials that its search algorithm will submit in all; ``None`` if unknown.
    """

    owner: str | None = None
    priority: float = 1.0
    preempt: bool = False
    expected_trials: int | None = None

    @property
    def text(self) -> str:
        """Whose it is and how urgent, in a few words: ``"of ann, priority 10"``; empty if nothing was said."""
        parts = [] if self.owner is None else [f"of {self.owner}"]
        parts += [] if self.priority == PLAIN_TERMS.priority else [f"priority {self.priority:g}"]
        return ", ".join([*parts, *(["preempts"] if self.preempt else [])])


#: Those of a group of which nothing was said.
PLAIN_TERMS = GroupTerms()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a trial's state was saved.

    Attributes:
        iteration: iterations done when it was saved.
        path: file or folder, on ``host``, whose memory or disk holds it.
        in_memory: whether it is in host memory, and so lost with the machine.
    """

    iteration: int
    path: str
    host: str = "localhost"
    in_memory: bool = False


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


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trial could not go on, or a call of one of its methods failed.

    Attributes:
        kind: ``"error"`` (it raised), ``"out_of_memory"``, ``"lane_lost"``, ``"timeout"`` (no result in time, twice),
            ``"not_saved"`` (no space to save it as it left a lane), ``"no_device"`` (none is left that could run it),
            ``"device"`` (it raised, its device answers no more), ``"metric"`` (it reported none), or ``"stopped"``.
        message, traceback: one line for people, and the traceback as text; empty if there is none.
        exception: the pickled exception; ``None`` if there is none.
    """

    kind: str
    message: str
    traceback: str = ""
    exception: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        at: seconds, on the driver's clock.
    """

    at: float


# -- from the submitter: groups and trials ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupSubmitted(Event):
    """A TrialGroup arrived."""

    group_id: str
    trials: tuple[TrialSpec, ...]
    terms: GroupTerms = PLAIN_TERMS


@dataclass(frozen=True, slots=True)
class TrialHistory:
    """A trial as an earlier session left it.

    Attributes:
        trial: what was submitted.
        budget: iterations that the trial may run in all.
        reported: iterations reported so far.
        checkpoint: the newest one that can still be read.
        ended: DONE, STOPPED or FAILED; ``None`` if the trial had not ended.
        failures: times the trial failed and was queued again.
        paused: whether the user had paused it by hand.
        outcome: what the submitter said of it as it stopped it; ``None`` if it did not say.
    """

    trial: TrialSpec
    _: KW_ONLY
    budget: int
    reported: int = 0
    checkpoint: Checkpoint | None = None
    ended: TrialState | None = None
    failures: int = 0
    paused: bool = False
    outcome: TrialState | None = None


@dataclass(frozen=True, slots=True)
class GroupRecovered(Event):
    """A TrialGroup of an earlier session goes on: trials that had not ended are queued, from their checkpoints.

    Attributes:
        forgotten: ids of its trials that were forgotten.
    """

    group_id: str
    trials: tuple[TrialHistory, ...]
    forgotten: tuple[str, ...] = ()
    terms: GroupTerms = PLAIN_TERMS


@dataclass(frozen=True, slots=True)
class TrialsAdded(Event):
    """Further trials of a group arrived."""

    group_id: str
    trials: tuple[TrialSpec, ...]


@dataclass(frozen=True, slots=True)
class BudgetExtended(Event):
    """A trial got ``iterations`` more; one that was done is queued again.

    Attributes:
        follow_up_iterations: iterations that later rungs may add after those, to this trial or to another.
    """

    trial_id: str
    iterations: int
    _: KW_ONLY
    follow_up_iterations: int = 0


@dataclass(frozen=True, slots=True)
class RungReached(Event):
    """The submitter says that a trial has come to a rung, or to it again with another score.

    Attributes:
        rung: the rung, as it is known now.
        score: what trials are compared by: less is better, and not a number is the worst.
    """

    trial_id: str
    rung: Rung
    score: float


@dataclass(frozen=True, slots=True)
class PauseRequested(Event):
    """The user pauses a trial: it leaves its devices after its iteration, and waits to be resumed."""

    trial_id: str


#: Why a trial is held: see :class:`fluid.engine.records.TrialRecord`.
BY_USER, SET_ASIDE = "paused by the user", "set aside: no further iteration would end in time"


@dataclass(frozen=True, slots=True)
class TrialSetAside(Event):
    """A trial pauses after its iteration, is saved to disk, and starts no more; one that waits rests."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class ResumeRequested(Event):
    """The user resumes a paused trial; for one that is not paused, nothing changes."""

    trial_id: str


#: Outcomes that a submitter may give a trial that it stops. One that is PAUSED may come back as another trial.
OUTCOMES = (TrialState.DONE, TrialState.STOPPED, TrialState.FAILED, TrialState.PAUSED)


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """The submitter wants a trial to run no further.

    Attributes:
        outcome: one of :data:`OUTCOMES`, which reports show; ``None`` for the state in which the trial ends.
        now: whether its lanes are killed; otherwise it ends its iteration first.
    """

    trial_id: str
    outcome: TrialState | None = None
    now: bool = False


@dataclass(frozen=True, slots=True)
class FailRequested(Event):
    """The submitter finds that a trial has failed: it is stopped after its iteration, and ends FAILED.

    Attributes:
        failure: why.
    """

    trial_id: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class CallRequested(Event):
    """The submitter wants a method of a trial's trainable called, between two iterations.

    Attributes:
        call_id: unique among the calls of this trial.
        method: its name.
        payload: the pickled arguments, which the engine only passes on.
    """

    trial_id: str
    _: KW_ONLY
    call_id: int
    method: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class RequestAnswered(Event):
    """The submitter answers a request.

    Attributes:
        lane_id: the lane that asked.
        request_id: the number of the request.
        payload: the answer, or, if ``failed``, the exception to raise in the trial; pickled.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    request_id: int
    payload: bytes
    failed: bool = False


@dataclass(frozen=True, slots=True)
class TrialForgotten(Event):
    """The submitter needs a trial that has ended no more: its record is dropped, and its id stays taken."""

    trial_id: str


# -- devices: from the backend and the session -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceAdded(Event):
    """A device can be used."""

    device: Device


@dataclass(frozen=True, slots=True)
class DeviceLost(Event):
    """A device is lost, and every lane on it; ``reason`` is set if the engine gives it up."""

    device_id: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeviceDraining(Event):
    """A device goes soon: what it has is saved to disk; then, or at ``deadline`` in seconds, it is removed."""

    device_id: int
    deadline: float


@dataclass(frozen=True, slots=True)
class DeviceRetiring(Event):
    """A device is not needed: it takes no further trial, and is removed once the trials there have left."""

    device_id: int


@dataclass(frozen=True, slots=True)
class DeviceRetained(Event):
    """A device that retires is needed after all."""

    device_id: int


#: What the session says of devices that are not needed.
RETIREMENTS = (DeviceRetiring, DeviceRetained)


@dataclass(frozen=True, slots=True)
class SessionDraining(Event):
    """The session ends soon: nothing starts any more, and what runs is saved to disk by ``deadline``, in seconds."""

    deadline: float


# -- from the backend: lanes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LaneReady(Event):
    """A lane that the engine started is warm.

    Attributes:
        own_bytes: device memory that it takes for itself, before it hosts a trial; 0 if unknown.
        seconds: that its start took, without what it had to wait for, such as MPS; infinite if unknown.
    """

    lane_id: int
    own_bytes: float = 0.0
    seconds: float = field(default=math.inf, repr=False)


@dataclass(frozen=True, slots=True)
class LaneMeasured(Event):
    """A warm lane takes more or less device memory for itself than it reported before.

    Attributes:
        own_bytes: device memory that it takes besides its trials' tensors, such as for a CUDA context; above 0.
    """

    lane_id: int
    own_bytes: float


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


@dataclass(frozen=True, slots=True)
class CleanUpLasts(Event):
    """The code of a trial has been cleaning up in a lane for a while, and still is.

    Attributes:
        since: when that began, seconds.
    """

    trial_id: str
    lane_id: int
    since: float


@dataclass(frozen=True, slots=True)
class LaneLost(Event):
    """A lane died, or could not be started.

    Attributes:
        culprit: the trial whose code ran when the lane died; ``None`` if none did, or it is unknown.
        blameless: whether no trial in the lane is to blame: something outside ended it.
        failed_position: which of its devices the lane could not use at its start, from 0; ``None`` if that is not why.
    """

    lane_id: int
    reason: str
    _: KW_ONLY
    culprit: str | None = None
    blameless: bool = False
    failed_position: int | None = None


# -- from the backend: trials ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrialStarted(Event):
    """A trial was set up, or restored, on its lanes.

    Attributes:
        iteration: iterations it has done; 0 if it was set up afresh.
        seconds: that this took.
        fusion_key: equal for trials that can train in one step; ``None`` if it cannot.
        restoring: from where it was restored, if it was and that was measured.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    iteration: int
    seconds: float
    fusion_key: str | None = None
    restoring: Restoring | None = None


@dataclass(frozen=True, slots=True)
class TrialSetBack(Event):
    """A trial could not be restored from the checkpoint it was to start from; comes before the answer to the command.

    Attributes:
        checkpoint: an earlier one, from which it was restored instead; ``None`` if it begins afresh.
        reason: why, in one line.
        cannot_load: whether the trial's own code raised for every checkpoint that is not damaged.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    checkpoint: Checkpoint | None
    reason: str
    cannot_load: bool = False


@dataclass(frozen=True, slots=True)
class FusionLimited(Event):
    """A lane has found that it can train at most so many trials like this one in one step.

    Attributes:
        rows: 1 if they cannot be fused; more if so many fit into the device's memory.
        reason: why, in one line.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    rows: int
    reason: str


@dataclass(frozen=True, slots=True)
class IterationDone(Event):
    """A trial finished an iteration, or a run of several short ones, of which this tells the last.

    Attributes:
        iteration: its number, from 1. That of the iteration before if the trial found that none was left to do.
        seconds: wall time of this iteration.
        metrics: what the trial reported, which the engine only passes on.
        memory: peak device memory, if measured.
        finished: whether the trial has no more to do, whatever its budget.
        busy: share of the iteration in which it kept its device busy, if measured.
        rows: fused trials, this one included, that did it in one step; ``settled`` if it prepared nothing.
        run: all iterations of the run, this one included; ``None`` for one alone.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    iteration: int
    seconds: float
    metrics: EncodedMetrics = NO_METRICS
    memory: MemoryNeed | None = None
    finished: bool = False
    busy: float | None = None
    rows: int = 1
    settled: bool = True
    run: IterationRun | None = None

    @property
    def count(self) -> int:
        """Iterations that this tells of."""
        return 1 if self.run is None else len(self.run.at)

    @property
    def typical_seconds(self) -> float:
        """Wall time of the iteration, or the median of the run's."""
        return self.seconds if self.run is None else median_low(self.run.seconds)


@dataclass(frozen=True, slots=True)
class SavabilityChanged(Event):
    """A lane found that a trial's state can be saved from now on, or cannot.

    Attributes:
        can_save: whether it can.
        reason: why not, in one line; empty where that is no news to the submitter.
        refuses: whether this answers a Save, or a Resize that began with one: the trial is in that lane as before.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    can_save: bool
    reason: str = ""
    refuses: bool = False


class PausePurpose(Enum):
    """Why the engine pauses a running trial."""

    PREEMPT = "PREEMPT"  #: The trial goes on later, here or elsewhere.
    RESIZE = "RESIZE"  #: A Resize follows at once.


@dataclass(frozen=True, slots=True)
class TrialPaused(Event):
    """A trial was paused between two iterations, and stays resident in its lane.

    Attributes:
        iteration: iterations it has done.
        purpose: that of the Pause that this answers.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    iteration: int
    purpose: PausePurpose


@dataclass(frozen=True, slots=True)
class TrialSaved(Event):
    """A lane saved a trial, by its own schedule or in answer to a Save; or a host copied a checkpoint of it.

    Attributes:
        lane_id: the lane; ``None`` if a host answers.
        dropped: whether the lane dropped the trial then.
        seconds: that this took.
        copied: whether this answers a Persist; the checkpoint is in memory still if it could not be copied.
        kept: set if the checkpoint is to outlive the run.
    """

    trial_id: str
    lane_id: int | None
    checkpoint: Checkpoint
    _: KW_ONLY
    dropped: bool = False
    seconds: float = 0.0
    copied: bool = False
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class TrialNotKept(Event):
    """A checkpoint that was to outlive the run was not written, or was deleted; the trial goes on.

    Attributes:
        iteration: iterations done by the state.
        reason: why, in one line.
    """

    trial_id: str
    _: KW_ONLY
    iteration: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointPlaced(Event):
    """A store has moved a checkpoint to memory or to disk.

    Attributes:
        checkpoint: where it is now.
    """

    trial_id: str
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class StateMeasured(Event):
    """A trial that does not run holds so many bytes in its lane, where the lane has given back what it could.

    Comes before the event that says that the trial does not run, or after it.
    """

    trial_id: str
    lane_id: int
    held_bytes: float


@dataclass(frozen=True, slots=True)
class ResizeDone(Event):
    """A trial runs at its new width.

    Attributes:
        seconds: without progress: one measurement of epsilon.
        lane_id: the new rank 0; ``None`` if the backend makes sure that the event is not out of date.
    """

    trial_id: str
    seconds: float
    lane_id: int | None = None


@dataclass(frozen=True, slots=True)
class TrialAsked(Event):
    """A trial's code asks the submitter, and waits in its lane for the answer.

    Attributes:
        request_id: number of the request, unique in the lane.
        payload: the request, pickled.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    request_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class TrialCalled(Event):
    """A method of a trial was called; the trial is as the method left it, even if that raised.

    Attributes:
        result, failure: the pickled return value; what the method raised, ``None`` if it returned.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    call_id: int
    result: bytes | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class TrialFailed(Event):
    """A trial raised and has left its lane, which goes on."""

    trial_id: str
    lane_id: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class TrialReleased(Event):
    """A trial was cleaned up and left this lane; each lane of a trial in several reports it."""

    trial_id: str
    lane_id: int


# -- time ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Alarm(Event):
    """The time has come that :attr:`fluid.policies.engine.EngineState.alarm_at` named; only deadlines are looked at."""
