"""What the engine remembers about trials, lanes and groups. Plain data; the state machine changes it."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

from fluid.engine.events import Checkpoint, Failure, TrialSpec
from fluid.resources import MemoryNeed
from fluid.trialgroup import TrialState

#: Transitions of a trial that are kept for error messages.
STORY_LENGTH = 20


class Stage(Enum):
    """How far a resize has come."""

    #: New lanes are not ready yet; the trial runs on where it was.
    WARMING = "WARMING"
    #: It was told to pause and has not answered.
    PAUSING = "PAUSING"
    #: It was told to move and has not arrived.
    MOVING = "MOVING"


@dataclass(slots=True)
class Move:
    """A resize under way.

    Attributes:
        old_lanes: the lanes it leaves, rank 0 first.
        old_devices: their devices.
        old_width: the width it had.
        ghost: row that keeps the devices it leaves, until it has arrived.
        old_need: the device memory with which it was placed there.
        stage: how far it has come.
        called_off: whether it stays where it was, once it has answered the Pause that is in flight.
        after_loss: whether it goes on in the lanes that are left of those it had.
    """

    old_lanes: tuple[int, ...]
    old_devices: tuple[int, ...]
    old_width: float
    old_devices_row: int
    old_need: MemoryNeed | None = None
    stage: Stage = Stage.WARMING
    called_off: bool = False
    after_loss: bool = False


@dataclass(slots=True)
class PendingCall:
    """A call of a trial's method that has not been answered.

    Attributes:
        after: iterations that had been reported when it was asked for, and must be done before it is made.
        before: the budget the trial had then: what was added to it later is run after the call.
        lane_id: lane that was told to make it; ``None`` while it waits.
        losses: lanes that died and may have done so because of it.
    """

    call_id: int
    method: str
    payload: bytes
    after: int
    before: int
    lane_id: int | None = None
    losses: int = 0


@dataclass(slots=True, eq=False)
class TrialRecord:
    """One trial.

    Attributes:
        row: the number by which placement and planners know it.
        budget: iterations it may run in all.
        done: iterations done, by the state it would go on from.
        reported: greatest iteration passed on; a trial set back to a checkpoint repeats some silently.
        width: width given or to be given.
        lanes: lanes it runs on or is to run on, rank 0 first; empty unless it holds devices.
        launched: whether its lanes were told to set it up or go on.
        asked: iteration up to which its lanes were told to run.
        move: the resize under way; ``None`` unless RESIZING.
        releasing: lanes that were told to stop it and have not answered.
        former: lanes that it lost and went on without; what they had reported may still be on its way.
        resident: lane that holds its state while it does not run; ``None`` if none does.
        home: device of that lane.
        saving: whether that lane was told to save it and let it go, and has not answered.
        checkpoint: newest one.
        durable: newest one that outlives its host's memory.
        current: whether the newest one is the state it is in: nothing was done, and no call answered, since.
        failures: times it failed and was queued again.
        failure: the last one.
        confined: most devices it is given since it could not be set up on further ones; ``None`` if it never was so.
        neighbours: most trials on its device, itself included, after it ran out of memory or killed its lane;
            ``None`` if it never did.
        exhausted: whether it said that it has no more to do.
        given_up: whether its state was let go for want of room though it could not be saved.
        pace: seconds per iteration at width 1 and speed 1, as last observed; ``None`` before the first.
        alone: seconds per iteration alone on one device, as seen of late; ``None`` where it never was.
        disturbed: whether co-residency changed since its iteration began, so that its seconds say nothing.
        calls: of its methods, in the order asked for; those that a lane was told to make come first.
        suspending: whether it was told to pause, to make way for others, and has not answered.
        successor: row of the trial that is to have its device then; ``None`` if those that are there are to.
        follow_up_iterations: iterations that may be asked for once its budget is used up, of it or of others.
        woken: whether it was done, and is not any more only because its state is needed for a call.
        outcome: what came of it, as whoever stopped it has it; ``None`` if that was not said.
        story: its latest transitions, for error messages.
    """

    spec: TrialSpec
    row: int
    group_id: str
    budget: int
    state: TrialState = TrialState.QUEUED
    done: int = 0
    reported: int = 0
    width: float = 1.0
    lanes: tuple[int, ...] = ()
    launched: bool = False
    asked: int = 0
    move: Move | None = None
    releasing: set[int] = field(default_factory=set)
    former: set[int] = field(default_factory=set)
    resident: int | None = None
    home: int | None = None
    saving: bool = False
    checkpoint: Checkpoint | None = None
    durable: Checkpoint | None = None
    current: bool = False
    failures: int = 0
    failure: Failure | None = None
    confined: int | None = None
    neighbours: int | None = None
    exhausted: bool = False
    given_up: bool = False
    pace: float | None = None
    alone: float | None = None
    disturbed: bool = True
    calls: list[PendingCall] = field(default_factory=list)
    preempting: bool = False
    successor: int | None = None
    follow_up_iterations: int = 0
    woken: bool = False
    outcome: str | None = None
    story: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def trial_id(self) -> str:
        """The trial's id."""
        return self.spec.trial_id

    @property
    def iterations_left(self) -> int:
        """Iterations of its budget not done yet."""
        return max(0, self.budget - self.done)

    @property
    def limit(self) -> int:
        """Iteration up to which its lanes may be told to run."""
        for call in self.calls:
            if call.lane_id is None:
                return min(self.budget, call.before)
        return self.budget

    @property
    def max_width(self) -> int:
        """Most devices it is able to use."""
        return self.spec.max_width if self.confined is None else min(self.spec.max_width, self.confined)

    @property
    def stopping(self) -> bool:
        """Whether its lanes were told to stop it."""
        return bool(self.releasing)

    @property
    def pinned(self) -> bool:
        """Whether it can only go on in the lane that holds its state."""
        return self.resident is not None and not self.spec.can_save

    @property
    def hosts(self) -> tuple[int, ...]:
        """The lanes that were told about it and may run it now."""
        if not self.launched:
            return ()
        if self.move is None:
            return self.lanes
        if self.move.stage is Stage.MOVING:
            return tuple(dict.fromkeys((*self.lanes, *self.move.old_lanes)))
        return self.move.old_lanes

    @property
    def stays_in(self) -> tuple[int, ...]:
        """The hosts that it does not leave of its own accord, when it has moved."""
        return self.lanes if self.move is not None and self.move.stage is Stage.MOVING else self.hosts

    @property
    def restart_at(self) -> int:
        """Iterations done by the state it would go on from if its lane's were gone."""
        return self.checkpoint.iteration if self.checkpoint is not None else 0


@dataclass(slots=True)
class LaneRecord:
    """One lane.

    Attributes:
        ready: whether it has said so.
        trial_id: the trial that holds it; ``None`` while it is idle.
        draining: trial that was told to leave it and may still run there; nobody else runs in it until then.
        residents: trials whose state it keeps though they do not run, least recently used first.
        reserved: bytes of device memory by trial, for residents and for those about to leave.
        own_bytes: device memory that it takes for itself, such as for a CUDA context.
    """

    lane_id: int
    device_id: int
    ready: bool = False
    trial_id: str | None = None
    draining: str | None = None
    residents: OrderedDict[str, None] = field(default_factory=OrderedDict)
    reserved: dict[str, float] = field(default_factory=dict)
    own_bytes: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether the trial that holds it can be told to run."""
        return self.ready and self.draining is None

    @property
    def is_empty(self) -> bool:
        """Whether nothing would be lost with it."""
        return self.trial_id is None and self.draining is None and not self.residents and not self.reserved


@dataclass(slots=True)
class GroupRecord:
    """One TrialGroup.

    Attributes:
        trial_ids: its trials in order of arrival, as keys.
        open: trials that have not ended.
        past: number of trials that were forgotten, by what came of them.
        past_iterations: done by all that were forgotten.
    """

    group_id: str
    trial_ids: dict[str, None] = field(default_factory=dict)
    open: int = 0
    past: Counter[str] = field(default_factory=Counter)
    past_iterations: int = 0
