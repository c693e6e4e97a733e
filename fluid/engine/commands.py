"""What the engine asks of a backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from fluid.engine.events import (
    Checkpoint,
    Failure,
    PausePurpose,
)
from fluid.trainables.encoded_metrics import EncodedMetrics, IterationRun
from fluid.trainables.usage import NO_USAGE, Usage
from fluid.trialgroup import TrialState
from fluid.wire import Frame


class Command(Frame, frozen=True):
    """What a backend is to do. It carries commands out in the order given, per lane.

    Every command is answered before the engine gives the trial's lanes to another trial. A failure (TrialFailed) or
    the loss of the lane answers all commands about a trial there. Of a trial's several lanes, the first one answers for
    all, but every lane answers StopTrial for itself.
    """


class TrialCommand(Command, frozen=True):
    """What the lanes of a trial are to do.

    Attributes:
        lane_ids: where the trial is or is to be, one per device of its width; the first is rank 0.
    """

    trial_id: str
    lane_ids: tuple[int, ...]


# -- to the backend: lanes -------------------------------------------------------------------------------


class StartLane(Command, frozen=True):
    """Start a warm worker process bound to a device; answered by LaneReady or LaneLost.

    Attributes:
        others: further devices of a lane that runs gangs, of the same host; all are visible to it.
    """

    lane_id: int
    device_id: int
    others: tuple[int, ...] = ()

    @property
    def device_ids(self) -> tuple[int, ...]:
        """All its devices."""
        return (self.device_id, *self.others)


class StopLane(Command, frozen=True):
    """End a lane, with its residents. There is no answer."""

    lane_id: int


class KillLane(Command, frozen=True):
    """Kill a lane's process and its process group at once (SIGKILL), whatever it does; answered by LaneLost.

    What the lane had reported before is still reported first.

    Attributes:
        reason: why, to be read after "lane 3"; LaneLost repeats it.
        at: when the engine decided it, seconds.
    """

    lane_id: int
    reason: str
    at: float


class LimitMemory(TrialCommand, frozen=True):
    """Limit the device memory that a trial may take in its lane from the next iteration on. There is no answer.

    The limit holds until another one, or until the trial leaves the lane.

    Attributes:
        lane_ids: its only lane.
        limit_bytes: the most that it may take, its state and cached memory included; ``None`` for no limit.
    """

    limit_bytes: float | None


class DumpStacks(TrialCommand, frozen=True):
    """Write the stacks of all threads of a trial's lanes to the trial's log, soon. There is no answer."""


# -- to the backend: trials ------------------------------------------------------------------------------


class StartTrial(TrialCommand, frozen=True, kw_only=True):
    """Set a trial up, or restore it, and run it; answered by TrialStarted and IterationDone, or TrialFailed.

    A trial that reports that it has finished runs no further, however many iterations are left.

    Attributes:
        lane_ids: one per device of its width; the first is rank 0.
        iterations: how many to run without further commands.
        checkpoint: where to restore from; ``None`` to begin afresh.
        limit_bytes: as in LimitMemory, from the set-up on.
        must_restore: whether the trial is never to begin afresh, as it starts from another trial's state: it fails
            where no checkpoint of its own can be read.
    """

    iterations: int
    checkpoint: Checkpoint | None = None
    limit_bytes: float | None = None
    must_restore: bool = False


class RunIteration(TrialCommand, frozen=True):
    """Run a resident trial further; answered by IterationDone, or TrialFailed.

    Attributes:
        lane_ids: where it runs. A wide trial that was stopped in all lanes but the first goes on there alone.
        iterations: how many to run; added to what it still has to run.
    """

    iterations: int


class Pause(TrialCommand, frozen=True, kw_only=True):
    """Pause a trial at the end of its current iteration; answered by TrialPaused. The trial stays resident.

    Iterations that the trial was told to run and has not begun are cancelled. The answer to a StopTrial that follows,
    or the loss of any of its lanes, may come instead of TrialPaused.

    Attributes:
        purpose: TrialPaused repeats it.
        next_lane_ids: for the purpose RESIZE, the lanes of the Resize that follows. A trial that can span several
            devices runs on while the new ones among them set it up. If that fails, a TrialFailed of the new lane says
            so, and the trial is paused all the same.
    """

    purpose: PausePurpose
    next_lane_ids: tuple[int, ...] = ()


class Save(TrialCommand, frozen=True):
    """Save a resident trial that does not run; answered by TrialSaved or TrialFailed, or refused: SavabilityChanged.

    Attributes:
        drop: whether the lane drops the trial then.
        durable: whether to disk at once, not to host memory.
        keep: whether the checkpoint is to outlive the run. It is then durable, and TrialNotKept may be the answer; the
            trial goes on either way.
    """

    drop: bool = False
    durable: bool = False
    keep: bool = False


class Fork(TrialCommand, frozen=True, kw_only=True):
    """Save a trial's state for another one to start from; answered by TrialForked. The trial goes on meanwhile.

    The lane makes a checkpoint in the other trial's folder, and copies what the trial's code has written to files to
    the other's own folder. It does so between two iterations, once so many are done, and answers nothing if the trial
    leaves it before.

    Attributes:
        lane_ids: the lane that has the trial's state, or rank 0's.
        child: the trial that is to start from it.
        at: iterations done by the state; ``None`` for the one that the trial is in. One before that is refused.
    """

    child: str
    at: int | None


class ForkSaved(Command, frozen=True):
    """Copy a checkpoint for a trial to start from; answered by TrialForked. The host that has it does so.

    Attributes:
        trial_id: the trial that is to start from it.
        parent: the trial that it is of; its files are copied, too, if it is of this session.
        checkpoint: of the parent; it stays where it is.
    """

    trial_id: str
    parent: str
    checkpoint: Checkpoint


class Persist(Command, frozen=True):
    """Copy a checkpoint from host memory to disk; answered by TrialSaved with ``copied``, also if its host is gone.

    The host that has it does so: no lane needs to be there.

    Attributes:
        checkpoint: of the trial, in memory, or, with ``keep``, on disk; it stays there.
        keep: whether the copy is to outlive the run; TrialNotKept may be the answer.
    """

    trial_id: str
    checkpoint: Checkpoint
    keep: bool = False


class Resize(TrialCommand, frozen=True):
    """Bring a trial that does not run from one set of lanes to another; answered by ResizeDone, or TrialFailed.

    The lanes that it leaves clean up and do not answer. If one of a trial's lanes is lost, the others stop at the end
    of the last iteration until a Resize brings the trial to them.

    Attributes:
        lane_ids: the lanes that it is to run on; the old ones among them come first.
        old_lane_ids: the lanes that it runs on now.
        iterations: how many to run then.
        done: iterations done, as far as the engine knows; later ones are among ``iterations``.
    """

    old_lane_ids: tuple[int, ...]
    iterations: int
    done: int | None = None


class LimitRows(Command, frozen=True):
    """Let a lane fuse at most so many trials in one step from now on; 1 for one after another. There is no answer."""

    lane_id: int
    rows: int


class Call(TrialCommand, frozen=True, kw_only=True):
    """Call a method of a trial in its lane, between two iterations if it runs; answered by TrialCalled.

    The lane carries out earlier commands about the trial first, iterations aside, and later ones after it.

    Attributes:
        lane_ids: rank 0's lane only.
    """

    call_id: int
    method: str
    payload: bytes


class Answer(Command, frozen=True):
    """Give a lane the answer to a request of a trial there. There is no answer to this.

    Attributes:
        payload: as of the :class:`RequestAnswered`; ``None`` if the trial has ended, so that its requests are refused.
    """

    trial_id: str
    lane_id: int
    request_id: int
    payload: bytes | None
    failed: bool = False


class StopTrial(TrialCommand, frozen=True):
    """Stop a trial at the end of its current iteration, or drop a resident one, and clean it up.

    Answered by TrialReleased from each of these lanes in which the trial still is.

    Attributes:
        keep: whether the first lane saves it before, for the checkpoint to outlive the run; it then reports TrialSaved
            or TrialNotKept first.
    """

    keep: bool = False


# -- to the stores of hosts: checkpoints -----------------------------------------------------------------


class CheckpointValue(NamedTuple):
    """What the newest checkpoint of a trial is worth to keep in memory.

    Attributes:
        returns: probability that the trial is restored from it, from 0 to 1.
        pinned: whether it stays in memory as long as others that are not pinned can go.
    """

    returns: float
    pinned: bool = False


class ValueCheckpoints(Command, frozen=True):
    """Tell the store of every host what checkpoints are worth. Those of trials that were never named have 0.5.

    Attributes:
        values: by trial, where they have changed.
    """

    values: Mapping[str, CheckpointValue]


class PrefetchCheckpoint(Command, frozen=True):
    """Bring a checkpoint into the memory of a host, in the background; answered by CheckpointPlaced if it is there.

    Attributes:
        host: name of the machine whose lanes are to find it in memory.
    """

    trial_id: str
    checkpoint: Checkpoint
    host: str


# -- to the submitter ------------------------------------------------------------------------------------


class Notice(Command, frozen=True):
    """What the journal or the submitter is told; no backend sees it."""


class TrialNotice(Notice, frozen=True):
    """What the submitter of a trial is told."""

    trial_id: str
    group_id: str


class ReportStart(TrialNotice, frozen=True, kw_only=True):
    """The trial begins to run, or goes on after it was done or failed; not told if it only runs to be called."""

    at: float
    width: float
    device_ids: tuple[int, ...]


class Report(TrialNotice, frozen=True, kw_only=True):
    """The trial finished an iteration, or a run of several short ones, of which this tells the last.

    Attributes:
        rows: fused trials that did it in one step of so many seconds, this one included.
        run: all iterations of the run, this one included; ``None`` for one alone.
        usage: what else it used, of a run nothing.
        source: the trial that ran it, if another one did for all whose configs agree until then; empty for itself.
    """

    iteration: int
    metrics: EncodedMetrics
    seconds: float
    width: float
    device_ids: tuple[int, ...]
    at: float
    rows: int = 1
    run: IterationRun | None = None
    usage: Usage = NO_USAGE
    source: str = ""

    @property
    def iterations(self) -> Iterator[tuple[int, float, float, EncodedMetrics]]:
        """Each iteration: its number, when it ended, its seconds, and what the trial reported."""
        run = self.run
        if run is None:
            return iter([(self.iteration, self.at, self.seconds, self.metrics)])
        return zip(range(self.iteration + 1 - len(run.at), self.iteration + 1), *run, strict=True)

    @property
    def count(self) -> int:
        """Iterations that this tells of."""
        return 1 if self.run is None else len(self.run.at)


class ReportSetBack(TrialNotice, frozen=True, kw_only=True):
    """The trial goes on from an earlier state than that of its newest checkpoint, which is damaged or gone.

    Attributes:
        lost: iterations done by the state that is lost.
        checkpoint: the one that it goes on from; ``None`` if it begins afresh.
        reason: why, in one line.
        cannot_load: whether the trial's own code raised for every checkpoint that is not damaged; Fluid then moves it
            no more.
    """

    at: float
    lost: int
    checkpoint: Checkpoint | None
    reason: str
    cannot_load: bool


class ReportUnsavable(TrialNotice, frozen=True, kw_only=True):
    """The trial's state cannot be saved: Fluid moves the trial no more, and it begins again if its process dies.

    Attributes:
        reason: why, in one line.
    """

    at: float
    reason: str


class ReportCall(TrialNotice, frozen=True, kw_only=True):
    """A call was answered.

    Attributes:
        result: the pickled return value.
        failure: what it raised, or why it could not be called; ``None`` if it returned.
    """

    call_id: int
    result: bytes | None
    failure: Failure | None
    at: float


class ReportRequest(TrialNotice, frozen=True, kw_only=True):
    """The trial asks its submitter, who is to answer with a :class:`RequestAnswered`."""

    lane_id: int
    request_id: int
    payload: bytes


class ReportEnd(TrialNotice, frozen=True, kw_only=True):
    """The trial has ended; one that is DONE can be extended.

    Attributes:
        state: DONE, STOPPED, INFEASIBLE or FAILED.
        failure: why it failed, or is infeasible; ``None`` otherwise.
    """

    state: TrialState
    iteration: int
    at: float
    failure: Failure | None = None


# -- to the journal --------------------------------------------------------------------------------------


class NoteTrial(Notice, frozen=True):
    """Something rare happened to a trial.

    Attributes:
        text: for people.
    """

    trial_id: str
    at: float
    text: str


class NoteQueued(Notice, frozen=True):
    """A trial that had a device, or had ended, waits again.

    Attributes:
        iteration: iterations done by the state that it will go on from.
        why: for people.
        kind: the kind of failure that sent it back (:class:`fluid.engine.events.Failure`); ``None`` if none did.
        failures: failures counted so far.
    """

    trial_id: str
    at: float
    iteration: int
    why: str
    kind: str | None = None
    failures: int = 0


class WaitReason(str, Enum):
    """Why the engine could not start a queued trial."""

    #: No device has an open slot, or too few devices are idle for the trial's width.
    DEVICES = "DEVICES"
    #: A device has an open slot, and too little free memory.
    MEMORY = "MEMORY"
    #: The trial's state cannot be saved, and another trial runs in the lane that keeps it.
    LANE = "LANE"
    #: No device, free or taken, is as the trial requires: it waits until such a one comes.
    REQUIREMENTS = "REQUIREMENTS"


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Device memory, in bytes, as placement saw it.

    Attributes:
        free: bytes that one more trial could have had.
        usable: bytes that trials may fill in all.
    """

    device_id: int
    free: float
    usable: float


class NoteWaiting(Notice, frozen=True):
    """Trials of one line wait. Trials of a line are alike to placement: they wait for the same.

    Written when trials join a line, and when its reason or width changes. A trial is in the line that it joined last.

    Attributes:
        line: number of the line.
        trial_ids: the trials that join it now.
        width: the width that the trials of the line wait for.
        reason: why the first of the line could not start.
        need_bytes: device memory that each needs; ``None`` if unknown.
        memory: for the reason MEMORY, the devices with an open slot, at most four, those with the most memory first.
        wanted: for the reason REQUIREMENTS, the devices that they wait for, in words.
    """

    line: int
    at: float
    trial_ids: tuple[str, ...]
    width: float
    reason: WaitReason
    need_bytes: float | None = None
    memory: tuple[FreeMemory, ...] = ()
    wanted: str | None = None


class NotePlaced(Notice, frozen=True):
    """A trial got devices and lanes, and starts there as soon as the lanes are ready.

    Attributes:
        iteration: iterations done by the state that it goes on from; 0 if it begins afresh.
        resident: whether one of these lanes keeps that state.
        alpha: packing overhead of its profile key, if it may share its device; ``None`` if not.
        predicted_s: seconds per iteration, alone on a device of speed 1, as its config tells them; ``None`` if that was
            not predicted, or the trial was observed by itself.
        cohort: the profile key of its cohort; ``None`` if its key is not parted.
        takes_turns: whether it runs an iteration in turn with other trials of its lane, and is not fused with them.
    """

    trial_id: str
    at: float
    width: float
    device_ids: tuple[int, ...]
    lane_ids: tuple[int, ...]
    iteration: int = 0
    resident: bool = False
    alpha: float | None = None
    predicted_s: float | None = None
    cohort: str | None = None
    takes_turns: bool = False


class NotePaused(Notice, frozen=True):
    """A trial that the user paused holds no device any more, and waits for none until it is resumed.

    Attributes:
        iteration: iterations done by the state that it will go on from.
        why: for people.
        kind: the kind of failure after which it rests; ``None`` if there was none.
        failures: failures counted so far.
    """

    trial_id: str
    at: float
    iteration: int
    why: str
    kind: str | None = None
    failures: int = 0


class NotePreempted(Notice, frozen=True):
    """A running trial was told to pause after its iteration.

    Attributes:
        successor: the trial that takes its device over; ``None`` if too many trials shared the device.
        co_residents: trials on its device, itself included.
        urgent_group: group of the successor, if it preempts trials of groups of a lower priority.
    """

    trial_id: str
    at: float
    successor: str | None
    co_residents: int
    urgent_group: str | None = None


class NoteResize(Notice, frozen=True):
    """A trial runs at another width.

    Attributes:
        seconds: without progress until then.
        old_width: the width before.
        begun_at: when the engine decided on it.
        gain: predicted seconds by which the trial ends earlier; negative if it made room for others. ``None`` if the
            engine did not choose: a lane was lost.
        stall_s: predicted seconds that trials stood still for it: its own pause and that of each trial beside it.
        left: iterations that it had left when it was decided on, the one in flight apart; ``None`` if unknown.
    """

    trial_id: str
    at: float
    width: float
    device_ids: tuple[int, ...]
    seconds: float
    old_width: float | None = None
    begun_at: float | None = None
    gain: float | None = None
    stall_s: float | None = None
    left: int | None = None


class NoteMeasured(Notice, frozen=True):
    """Measurements changed how far trials of a profile key are packed or widened, or gave its first pace.

    Attributes:
        model: the device model on which that was measured; ``None`` if unknown. Widths hold for all models.
        seconds: per iteration, alone on one device of speed 1; ``None`` if unknown.
        packing: c, the packing limit.
        width: d, the width limit.
        rows: most trials that are fused on a device; 1 if none are.
        fused_gain: how many times the iterations per second of one trial alone so many do, as far as measured.
    """

    profile_key: str
    at: float
    seconds: float | None
    packing: int
    width: int
    alpha: float
    beta: float
    model: str | None = None
    rows: int = 1
    fused_gain: float = 1.0


class NoteLateness(Notice, frozen=True):
    """How a group stands with regard to its deadline, as that came to be known, or has changed much.

    Attributes:
        due_s: seconds until the first step that is still ahead; until the last one, below 0, if that has passed.
        odds: probability that it ends by then, in the present order.
        earliest_s: expected seconds until it ends if it gets devices before all others; ``None`` while that is unknown.
        can_be_met: whether it then ends in time; ``None`` where it is too close to say.
        missed: whether its last step has passed.
    """

    group_id: str
    at: float
    due_s: float
    odds: float
    earliest_s: float | None
    can_be_met: bool | None
    missed: bool = False


class NoteHung(Notice, frozen=True):
    """A trial has given no result for long; its stacks were dumped.

    Attributes:
        seconds: without a result until then.
        limit: seconds without a result after which its lanes are killed; ``None`` if they are not.
        killed: whether its lanes are killed now.
    """

    trial_id: str
    at: float
    seconds: float
    limit: float | None
    killed: bool = False


class NoteDrained(Notice, frozen=True):
    """A drain has ended: everything was saved, or its deadline has come, or the device was lost.

    Attributes:
        device_id: the device, which is removed; ``None`` for the session.
        unsaved: ids of the trials that lose progress if what was drained goes now.
    """

    at: float
    device_id: int | None
    unsaved: tuple[str, ...]


class NoteDeviceLost(Notice, frozen=True):
    """A device was lost or removed.

    Attributes:
        reason: why the engine uses it no more, for people; empty if the backend lost it, or it was drained.
    """

    device_id: int
    at: float
    reason: str = ""
