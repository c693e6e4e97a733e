"""What the engine asks of a backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from fluid.engine.events import Checkpoint, Failure, PausePurpose
from fluid.trainables.encoded_metrics import EncodedMetrics, IterationRun
from fluid.trialgroup import TrialState


@dataclass(frozen=True, slots=True)
class Command:
    """What a backend is to do. It carries commands out in the order given, per lane.

    Every command is answered before the engine gives the trial's lanes to another trial. A failure (TrialFailed) or
    the loss of the lane answers all commands about a trial there. Of a trial's several lanes, the first one answers for
    all, but every lane answers StopTrial for itself.
    """


@dataclass(frozen=True, slots=True)
class StartLane(Command):
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


@dataclass(frozen=True, slots=True)
class StopLane(Command):
    """End a lane, with its residents. There is no answer."""

    lane_id: int


@dataclass(frozen=True, slots=True)
class KillLane(Command):
    """Kill a lane's process and its process group at once (SIGKILL), whatever it does; answered by LaneLost.

    What the lane had reported before is still reported first.

    Attributes:
        reason: why, to be read after "lane 3"; LaneLost repeats it.
        at: when the engine decided it, seconds.
    """

    lane_id: int
    reason: str
    _: KW_ONLY
    at: float


@dataclass(frozen=True, slots=True)
class DumpStacks(Command):
    """Write the stacks of all threads of a trial's lanes to the trial's log, soon. There is no answer."""

    trial_id: str
    lane_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartTrial(Command):
    """Set a trial up, or restore it, and run it; answered by TrialStarted and IterationDone, or TrialFailed.

    A trial that reports that it has finished runs no further, however many iterations are left.

    Attributes:
        lane_ids: one per device of its width; the first is rank 0.
        iterations: how many to run without further commands.
        checkpoint: where to restore from; ``None`` to begin afresh.
        limit_bytes: as in LimitMemory, from the set-up on.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    _: KW_ONLY
    iterations: int
    checkpoint: Checkpoint | None = None
    limit_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class RunIteration(Command):
    """Run a resident trial further; answered by IterationDone, or TrialFailed.

    Attributes:
        lane_ids: where it runs. A wide trial that was stopped in all lanes but the first goes on there alone.
        iterations: how many to run; added to what it still has to run.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    iterations: int


@dataclass(frozen=True, slots=True)
class Pause(Command):
    """Pause a trial at the end of its current iteration; answered by TrialPaused. The trial stays resident.

    Iterations that the trial was told to run and has not begun are cancelled. The answer to a StopTrial that follows,
    or the loss of any of its lanes, may come instead of TrialPaused.

    Attributes:
        purpose: TrialPaused repeats it.
        next_lane_ids: for the purpose RESIZE, the lanes of the Resize that follows. A trial that can span several
            devices runs on while the new ones among them set it up. If that fails, a TrialFailed of the new lane says
            so, and the trial is paused all the same.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    _: KW_ONLY
    purpose: PausePurpose
    next_lane_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Save(Command):
    """Save a resident trial that does not run; answered by TrialSaved or TrialFailed, or refused: SavabilityChanged.

    Attributes:
        drop: whether the lane drops the trial then.
        durable: whether to disk at once, not to host memory.
        keep: whether the checkpoint is to outlive the run. It is then durable, and TrialNotKept may be the answer; the
            trial goes on either way.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    drop: bool = False
    durable: bool = False
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Persist(Command):
    """Copy a checkpoint from host memory to disk; answered by TrialSaved with ``copied``, also if its host is gone.

    The host that has it does so: no lane needs to be there.

    Attributes:
        checkpoint: of the trial, in memory, or, with ``keep``, on disk; it stays there.
        keep: whether the copy is to outlive the run; TrialNotKept may be the answer.
    """

    trial_id: str
    checkpoint: Checkpoint
    keep: bool = False


@dataclass(frozen=True, slots=True)
class StopTrial(Command):
    """Stop a trial at the end of its current iteration, or drop a resident one, and clean it up.

    Answered by TrialReleased from each of these lanes in which the trial still is.

    Attributes:
        keep: whether the first lane saves it before, for the checkpoint to outlive the run; it then reports TrialSaved
            or TrialNotKept first.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Resize(Command):
    """Bring a trial that does not run from one set of lanes to another; answered by ResizeDone, or TrialFailed.

    The lanes that it leaves clean up and do not answer. If one of a trial's lanes is lost, the others stop at the end
    of the last iteration until a Resize brings the trial to them.

    Attributes:
        lane_ids: the lanes that it is to run on; the old ones among them come first.
        old_lane_ids: the lanes that it runs on now.
        iterations: how many to run then.
        done: iterations done, as far as the engine knows; later ones are among ``iterations``.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    old_lane_ids: tuple[int, ...]
    _: KW_ONLY
    iterations: int
    done: int | None = None


@dataclass(frozen=True, slots=True)
class LimitMemory(Command):
    """Limit the device memory that a trial may take in its lane from the next iteration on. There is no answer.

    The limit holds until another one, or until the trial leaves the lane.

    Attributes:
        lane_ids: its only lane.
        limit_bytes: the most that it may take, its state and cached memory included; ``None`` for no limit.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    limit_bytes: float | None


@dataclass(frozen=True, slots=True)
class LimitRows(Command):
    """Let a lane fuse at most so many trials in one step from now on; 1 for one after another. There is no answer."""

    lane_id: int
    rows: int


@dataclass(frozen=True, slots=True)
class Call(Command):
    """Call a method of a trial in its lane, between two iterations if it runs; answered by TrialCalled.

    The lane carries out earlier commands about the trial first, iterations aside, and later ones after it.

    Attributes:
        lane_ids: rank 0's lane only.
    """

    trial_id: str
    lane_ids: tuple[int, ...]
    _: KW_ONLY
    call_id: int
    method: str
    payload: bytes


# -- for the journal and the submitter --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Notice(Command):
    """What the journal or the submitter is told; no backend sees it."""


@dataclass(frozen=True, slots=True)
class NoteResize(Notice):
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
    _: KW_ONLY
    at: float
    width: float
    device_ids: tuple[int, ...]
    seconds: float
    old_width: float | None = None
    begun_at: float | None = None
    gain: float | None = None
    stall_s: float | None = None
    left: int | None = None


@dataclass(frozen=True, slots=True)
class NoteDeviceLost(Notice):
    """A device was lost or removed.

    Attributes:
        reason: why the engine uses it no more, for people; empty if the backend lost it, or it was drained.
    """

    device_id: int
    at: float
    reason: str = ""


# -- for the submitter ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrialNotice(Notice):
    """What the submitter of a trial is told."""

    trial_id: str
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStart(TrialNotice):
    """The trial begins to run, or goes on after it was done or failed; not told if it only runs to be called."""

    at: float
    width: float
    device_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(TrialNotice):
    """The trial finished an iteration, or a run of several short ones, of which this tells the last.

    Attributes:
        rows: fused trials that did it in one step of so many seconds, this one included.
        run: all iterations of the run, this one included; ``None`` for one alone.
    """

    iteration: int
    metrics: EncodedMetrics
    seconds: float
    width: float
    device_ids: tuple[int, ...]
    at: float
    rows: int = 1
    run: IterationRun | None = None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEnd(TrialNotice):
    """The trial has ended; one that is DONE can be extended.

    Attributes:
        state: DONE, STOPPED or FAILED.
        failure: why it failed; ``None`` if it did not.
    """

    state: TrialState
    iteration: int
    at: float
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCall(TrialNotice):
    """A call was answered.

    Attributes:
        result: the pickled return value.
        failure: what it raised, or why it could not be called; ``None`` if it returned.
    """

    call_id: int
    result: bytes | None
    failure: Failure | None
    at: float
