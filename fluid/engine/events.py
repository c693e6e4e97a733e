"""What can happen to the engine. Every event carries its time; the engine reads no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median_low
from typing import Literal, NamedTuple

import msgspec

from fluid.devices.constraints import Constraint
from fluid.keeping import Kept
from fluid.resources import Device, MemoryNeed, Requires
from fluid.search_shape import Rung
from fluid.trainables.encoded_metrics import NO_METRICS, EncodedMetrics, IterationRun
from fluid.trainables.usage import NO_USAGE, Usage
from fluid.trial_fields import IterationTimeout
from fluid.trialgroup import TrialState
from fluid.wire import Frame

# -- what events speak of --------------------------------------------------------------------------------


class StartState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of another trial, its parent, from which a trial starts. Its iterations count on from there.

    Attributes:
        parent: the parent's id; of a trial of another session, as it is shown.
        at: iterations done by the state; ``None`` for the parent's newest one: if it runs, that after its iteration.
        checkpoint: the state of a trial of another session; ``None`` for a trial of this one.
        is_shared: whether the parent's iterations until then are this trial's, too: trials whose configs agree until
            then are one run.
    """

    parent: str
    at: int | None = None
    checkpoint: Checkpoint | None = None
    is_shared: bool = False


class TrialSpec(msgspec.Struct, frozen=True, omit_defaults=True):
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
        start: the state of another trial from which it starts; ``None`` if it begins afresh.
        is_shared_run: whether it is no trial of the submitter, but a run that several of these share.
    """

    trial_id: str
    budget: int
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
    start: StartState | None = None
    is_shared_run: bool = False

    def constraint(self) -> Constraint | None:
        """What the trial asks of its devices; ``None`` if nothing."""
        return Constraint.of(self.requires, self.devices, self.gang)

    @property
    def wanted_devices(self) -> str:
        """The devices that it asks for, in words."""
        return (self.constraint() or Constraint()).wanted(self.memory)


@dataclass(frozen=True, slots=True)
class GroupDeadline:
    """What it costs that a group ends late (docs/theory.md, section 15).

    Attributes:
        steps: pairs of seconds since the group was submitted, and what an end after that costs; both ascend. A cost of
            1 is that of a group without a deadline that waits for four times the first step's seconds. One deadline is
            one step of cost 1.
        on_miss: ``"late"`` if its trials run on after the last step, ``"stop"`` if they are stopped.
        passed: seconds that had passed since then when this session got the group; above 0 for one of an earlier
            session.
    """

    steps: tuple[tuple[float, float], ...]
    on_miss: Literal["late", "stop"] = "late"
    passed: float = 0.0

    @property
    def text(self) -> str:
        """In a few words: ``"2 h"``, ``"1 h (cost 1), 2 h (cost 3)"``, ``"2 h, then stops"``."""
        from fluid.sizing.goals import format_duration  # Lanes need it not.

        costs = [f" (cost {cost:g})" if len(self.steps) > 1 else "" for _, cost in self.steps]
        times = [f"{format_duration(at)}{cost}" for (at, _), cost in zip(self.steps, costs, strict=True)]
        return ", ".join([*times, *(["then stops"] if self.on_miss == "stop" else [])])

    def after(self, seconds: float) -> GroupDeadline:
        """The same for a session that gets the group so many seconds later."""
        return replace(self, passed=self.passed + seconds)


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """The terms on which a group is submitted.

    Attributes:
        owner: the groups of one owner are scheduled as one; ``None`` for an owner of its own.
        priority: its trials start before those of groups of a lower priority.
        preempt: whether running trials of groups of a lower priority are paused for it.
        expected_trials: trials that its search algorithm will submit in all; ``None`` if unknown.
        deadline: by when it is to have ended; ``None`` for no deadline.
        weight: how much its cost of ending late counts, or that of its waiting if it has no deadline.
    """

    owner: str | None = None
    priority: float = 1.0
    preempt: bool = False
    expected_trials: int | None = None
    deadline: GroupDeadline | None = None
    weight: float = 1.0

    @property
    def text(self) -> str:
        """Whose it is and how urgent, in a few words: ``"of ann, priority 10"``; empty if nothing was said."""
        parts = [] if self.owner is None else [f"of {self.owner}"]
        parts += [] if self.priority == PLAIN_TERMS.priority else [f"priority {self.priority:g}"]
        parts += ["preempts"] if self.preempt else []
        parts += [] if self.deadline is None else [f"deadline {self.deadline.text}"]
        return ", ".join([*parts, *([] if self.weight == PLAIN_TERMS.weight else [f"weight {self.weight:g}"])])


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
            ``"device"`` (it raised, its device answers no more), ``"metric"`` (it reported none), ``"stopped"``,
            ``"parted"`` (a shared run has asked for what its trials do not agree on), or ``"infeasible"`` (it raised
            :class:`fluid.Infeasible`, and has not failed).
        message, traceback: one line for people, and the traceback as text; empty if there is none.
        exception: the pickled exception; ``None`` if there is none.
        squeezed: whether other processes than its lane held notably more of a GPU, as memory ran out there, than when
            the lane began.
        site: of an exception that another try meets again, its type, message, place and iteration: two failures of one
            site are alike. Empty for what may pass, such as an ``OSError``, and where it is not known.
        is_form: whether the trainable's code has a form that Fluid cannot run, with any config.
    """

    kind: str
    message: str
    traceback: str = ""
    exception: bytes | None = field(default=None, repr=False)
    squeezed: bool = False
    site: str = field(default="", repr=False)
    is_form: bool = False


class Event(Frame, frozen=True):
    """Something that happened. What happens in a lane comes over its connection as one.

    Attributes:
        at: seconds, on the driver's clock.
    """

    at: float


class LaneEvent(Event, frozen=True):
    """Something that happened to a lane."""

    lane_id: int


class TrialEvent(Event, frozen=True):
    """Something that happened to a trial."""

    trial_id: str


class TrialLaneEvent(TrialEvent, frozen=True):
    """Something that happened to a trial in a lane."""

    lane_id: int


# -- from the submitter: groups and trials ---------------------------------------------------------------


class GroupSubmitted(Event, frozen=True):
    """A TrialGroup arrived."""

    group_id: str
    trials: tuple[TrialSpec, ...]
    terms: GroupTerms = PLAIN_TERMS


class TrialHistory(msgspec.Struct, frozen=True, omit_defaults=True):
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
    budget: int
    reported: int = 0
    checkpoint: Checkpoint | None = None
    ended: TrialState | None = None
    failures: int = 0
    paused: bool = False
    outcome: TrialState | None = None


class GroupRecovered(Event, frozen=True):
    """A TrialGroup of an earlier session goes on: trials that had not ended are queued, from their checkpoints.

    Attributes:
        forgotten: ids of its trials that were forgotten.
    """

    group_id: str
    trials: tuple[TrialHistory, ...]
    forgotten: tuple[str, ...] = ()
    terms: GroupTerms = PLAIN_TERMS


class TrialsAdded(Event, frozen=True):
    """Further trials of a group arrived."""

    group_id: str
    trials: tuple[TrialSpec, ...]


class BudgetExtended(TrialEvent, frozen=True):
    """A trial got ``iterations`` more; one that was done is queued again.

    Attributes:
        follow_up_iterations: iterations that later rungs may add after those, to this trial or to another.
    """

    iterations: int
    follow_up_iterations: int = 0


class RungReached(TrialEvent, frozen=True):
    """The submitter says that a trial has come to a rung, or to it again with another score.

    Attributes:
        rung: the rung, as it is known now.
        score: what trials are compared by: less is better, and not a number is the worst.
    """

    rung: Rung
    score: float


class PauseRequested(TrialEvent, frozen=True):
    """The user pauses a trial: it leaves its devices after its iteration, and waits to be resumed."""


#: Why a trial is held: see :class:`fluid.engine.records.TrialRecord`.
BY_USER, SET_ASIDE = "paused by the user", "set aside: no further iteration would end in time"
ELSEWHERE, OFFERED = "for another driver to run", "set aside: another driver may run it"


class TrialSetAside(TrialEvent, frozen=True):
    """A trial pauses after its iteration, is saved to disk, and starts no more; one that waits rests.

    Attributes:
        why: for people: :data:`SET_ASIDE` or :data:`OFFERED`.
    """

    why: str = SET_ASIDE


class ResumeRequested(TrialEvent, frozen=True):
    """The user resumes a paused trial; for one that is not paused, nothing changes."""


#: Outcomes that a submitter may give a trial that it stops. One that is PAUSED may come back as another trial.
OUTCOMES = (TrialState.DONE, TrialState.STOPPED, TrialState.FAILED, TrialState.PAUSED)


class StopRequested(TrialEvent, frozen=True):
    """The submitter wants a trial to run no further.

    Attributes:
        outcome: one of :data:`OUTCOMES`, which reports show; ``None`` for the state in which the trial ends.
        now: whether its lanes are killed; otherwise it ends its iteration first.
    """

    outcome: TrialState | None = None
    now: bool = False


class FailRequested(TrialEvent, frozen=True):
    """The submitter finds that a trial has failed: it is stopped after its iteration, and ends FAILED.

    Attributes:
        failure: why.
    """

    failure: Failure


class CallRequested(TrialEvent, frozen=True, kw_only=True):
    """The submitter wants a method of a trial's trainable called, between two iterations.

    Attributes:
        call_id: unique among the calls of this trial.
        method: its name.
        payload: the pickled arguments, which the engine only passes on.
    """

    call_id: int
    method: str
    payload: bytes


class RequestAnswered(TrialLaneEvent, frozen=True, kw_only=True):
    """The submitter answers a request.

    Attributes:
        lane_id: the lane that asked.
        request_id: the number of the request.
        payload: the answer, or, if ``failed``, the exception to raise in the trial; pickled.
    """

    request_id: int
    payload: bytes
    failed: bool = False


class TrialForgotten(TrialEvent, frozen=True):
    """The submitter needs a trial that has ended no more: its record is dropped, and its id stays taken."""


# -- from the other drivers of a shared folder -----------------------------------------------------------


class TrialMoved(TrialEvent, frozen=True):
    """A trial goes on from another state than the engine has, which is dropped, wherever the trial is.

    Attributes:
        history: how the trial stands.
        here: whether this driver runs it from now on, and no other one does.
    """

    history: TrialHistory
    here: bool


class TrialOffered(TrialEvent, frozen=True):
    """A trial that is set aside is for another driver to run: its state is to be on disk, also if memory has it."""


class IteratedElsewhere(TrialEvent, frozen=True):
    """Another driver has run a trial up to an iteration."""

    iteration: int


class EndedElsewhere(TrialEvent, frozen=True, kw_only=True):
    """A trial has ended in another driver.

    Attributes:
        state: DONE, STOPPED or FAILED.
        iteration: iterations done.
        by_itself: whether it said that it has no more to do.
        failure: why it failed; ``None`` if it has not.
    """

    state: TrialState
    iteration: int
    by_itself: bool = False
    failure: Failure | None = None


# -- devices: from the backend and the session -----------------------------------------------------------


class DeviceAdded(Event, frozen=True):
    """A device can be used."""

    device: Device


class DeviceLost(Event, frozen=True):
    """A device is lost, and every lane on it; ``reason`` is set if the engine gives it up."""

    device_id: int
    reason: str = ""


class DeviceDraining(Event, frozen=True):
    """A device goes soon: what it has is saved to disk; then, or at ``deadline`` in seconds, it is removed."""

    device_id: int
    deadline: float


class DeviceRetiring(Event, frozen=True):
    """A device is not needed: it takes no further trial, and is removed once the trials there have left."""

    device_id: int


class DeviceRetained(Event, frozen=True):
    """A device that retires is needed after all."""

    device_id: int


#: What the session says of devices that are not needed.
RETIREMENTS = (DeviceRetiring, DeviceRetained)


class SessionDraining(Event, frozen=True):
    """The session ends soon: nothing starts any more, and what runs is saved to disk by ``deadline``, in seconds."""

    deadline: float


# -- from the backend: lanes -----------------------------------------------------------------------------


class LaneReady(LaneEvent, frozen=True):
    """A lane that the engine started is warm.

    Attributes:
        own_bytes: device memory that it takes for itself, before it hosts a trial; 0 if unknown.
        seconds: that its start took, without what it had to wait for, such as MPS; infinite if unknown.
    """

    own_bytes: float = 0.0
    seconds: float = math.inf


class LaneMeasured(LaneEvent, frozen=True):
    """A warm lane takes more or less device memory for itself than it reported before.

    Attributes:
        own_bytes: device memory that it takes besides its trials' tensors, such as for a CUDA context; above 0.
    """

    own_bytes: float


class LaneSpent(LaneEvent, frozen=True):
    """A trial has changed a lane's process for good: no further trial is to run there.

    Attributes:
        reason: what it left behind, in one line.
    """

    reason: str


class LaneOutdated(LaneEvent, frozen=True):
    """Lanes that start on the lane's host from now on have modules loaded that this one would have to import."""


class CleanUpLasts(TrialLaneEvent, frozen=True):
    """The code of a trial has been cleaning up in a lane for a while, and still is.

    Attributes:
        since: when that began, seconds.
    """

    since: float


class LaneLost(LaneEvent, frozen=True):
    """A lane died, or could not be started.

    Attributes:
        culprit: the trial whose code ran when the lane died; ``None`` if none did, or it is unknown.
        blameless: whether no trial in the lane is to blame: something outside ended it.
        failed_position: which of its devices the lane could not use at its start, from 0; ``None`` if that is not why.
    """

    reason: str
    culprit: str | None = None
    blameless: bool = False
    failed_position: int | None = None


# -- from the backend: trials ----------------------------------------------------------------------------


class TrialStarted(TrialLaneEvent, frozen=True, kw_only=True):
    """A trial was set up, or restored, on its lanes.

    Attributes:
        iteration: iterations it has done; 0 if it was set up afresh.
        seconds: that this took.
        fusion_key: equal for trials that can train in one step; ``None`` if it cannot.
        restoring: from where it was restored, if it was and that was measured.
    """

    iteration: int
    seconds: float
    fusion_key: str | None = None
    restoring: Restoring | None = None


class TrialSetBack(TrialLaneEvent, frozen=True, kw_only=True):
    """A trial could not be restored from the checkpoint it was to start from; comes before the answer to the command.

    Attributes:
        checkpoint: an earlier one, from which it was restored instead; ``None`` if it begins afresh.
        reason: why, in one line.
        cannot_load: whether the trial's own code raised for every checkpoint that is not damaged.
    """

    checkpoint: Checkpoint | None
    reason: str
    cannot_load: bool = False


class FusionLimited(TrialLaneEvent, frozen=True, kw_only=True):
    """A lane has found that it can train at most so many trials like this one in one step.

    Attributes:
        rows: 1 if they cannot be fused; more if so many fit into the device's memory.
        reason: why, in one line.
    """

    rows: int
    reason: str


class IterationDone(TrialLaneEvent, frozen=True, kw_only=True):
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
        usage: what else it used, of a run nothing; the engine only passes it on.
    """

    iteration: int
    seconds: float
    metrics: EncodedMetrics = NO_METRICS
    memory: MemoryNeed | None = None
    finished: bool = False
    busy: float | None = None
    rows: int = 1
    settled: bool = True
    run: IterationRun | None = None
    usage: Usage = NO_USAGE

    @property
    def count(self) -> int:
        """Iterations that this tells of."""
        return 1 if self.run is None else len(self.run.at)

    @property
    def typical_seconds(self) -> float:
        """Wall time of the iteration, or the median of the run's."""
        return self.seconds if self.run is None else median_low(self.run.seconds)


class SavabilityChanged(TrialLaneEvent, frozen=True, kw_only=True):
    """A lane found that a trial's state can be saved from now on, or cannot.

    Attributes:
        can_save: whether it can.
        reason: why not, in one line; empty where that is no news to the submitter.
        refuses: whether this answers a Save, or a Resize that began with one: the trial is in that lane as before.
    """

    can_save: bool
    reason: str = ""
    refuses: bool = False


class PausePurpose(Enum):
    """Why the engine pauses a running trial."""

    PREEMPT = "PREEMPT"  #: The trial goes on later, here or elsewhere.
    RESIZE = "RESIZE"  #: A Resize follows at once.


class TrialPaused(TrialLaneEvent, frozen=True, kw_only=True):
    """A trial was paused between two iterations, and stays resident in its lane.

    Attributes:
        iteration: iterations it has done.
        purpose: that of the Pause that this answers.
    """

    iteration: int
    purpose: PausePurpose


class TrialSaved(TrialEvent, frozen=True):
    """A lane saved a trial, by its own schedule or in answer to a Save; or a host copied a checkpoint of it.

    Attributes:
        lane_id: the lane; ``None`` if a host answers.
        dropped: whether the lane dropped the trial then.
        seconds: that this took.
        copied: whether this answers a Persist; the checkpoint is in memory still if it could not be copied.
        kept: set if the checkpoint is to outlive the run.
    """

    lane_id: int | None
    checkpoint: Checkpoint
    dropped: bool = False
    seconds: float = 0.0
    copied: bool = False
    kept: Kept | None = None


class TrialForked(TrialEvent, frozen=True, kw_only=True):
    """The state from which a trial is to start was saved for it, in a folder of its own, or could not be.

    Attributes:
        trial_id: the trial that starts.
        parent: the trial whose state it is.
        lane_id: the parent's lane; ``None`` if a host has copied a checkpoint.
        checkpoint: where the state is; ``None`` if it could not be saved.
        seconds: that this took.
        problem: why it could not be, in one line; empty if it was.
        is_past: whether it could not as the parent is beyond the iteration wanted.
        cannot: whether the parent's state cannot be saved at all.
    """

    parent: str
    lane_id: int | None
    checkpoint: Checkpoint | None = None
    seconds: float = 0.0
    problem: str = ""
    is_past: bool = False
    cannot: bool = False


class TrialNotKept(TrialEvent, frozen=True, kw_only=True):
    """A checkpoint that was to outlive the run was not written, or was deleted; the trial goes on.

    Attributes:
        iteration: iterations done by the state.
        reason: why, in one line.
    """

    iteration: int
    reason: str


class CheckpointPlaced(TrialEvent, frozen=True):
    """A store has moved a checkpoint to memory or to disk.

    Attributes:
        checkpoint: where it is now.
    """

    checkpoint: Checkpoint


class StateMeasured(TrialLaneEvent, frozen=True):
    """A trial that does not run holds so many bytes in its lane, where the lane has given back what it could.

    Comes before the event that says that the trial does not run, or after it.
    """

    held_bytes: float


class ResizeDone(TrialEvent, frozen=True):
    """A trial runs at its new width.

    Attributes:
        seconds: without progress: one measurement of epsilon.
        lane_id: the new rank 0; ``None`` if the backend makes sure that the event is not out of date.
    """

    seconds: float
    lane_id: int | None = None


class TrialAsked(TrialLaneEvent, frozen=True, kw_only=True):
    """A trial's code asks the submitter, and waits in its lane for the answer.

    Attributes:
        request_id: number of the request, unique in the lane.
        payload: the request, pickled.
    """

    request_id: int
    payload: bytes


class TrialCalled(TrialLaneEvent, frozen=True, kw_only=True):
    """A method of a trial was called; the trial is as the method left it, even if that raised.

    Attributes:
        result, failure: the pickled return value; what the method raised, ``None`` if it returned.
    """

    call_id: int
    result: bytes | None = None
    failure: Failure | None = None


class TrialFailed(TrialLaneEvent, frozen=True):
    """A trial raised and has left its lane, which goes on."""

    failure: Failure


class TrialReleased(TrialLaneEvent, frozen=True):
    """A trial was cleaned up and left this lane; each lane of a trial in several reports it."""


# -- time ------------------------------------------------------------------------------------------------


class Tick(Event, frozen=True):
    """Time passed."""


class Alarm(Event, frozen=True):
    """The time has come that :attr:`fluid.policies.engine.EngineState.alarm_at` named; only deadlines are looked at."""
