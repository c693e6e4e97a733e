"""What passes between the driver and a lane: frames (:mod:`fluid.wire`).

The driver gives a lane the engine's commands about its residents, the trials that it hosts, and the lane answers with
the engine's events. Here is what else they tell each other. An event of a lane has the time of its machine's clock, in
seconds, and a checkpoint of it names no host: the driver's pool, which knows both, fills them in.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from fluid.elastic.messages import LOOPBACK, ForMember, OfMember
from fluid.engine.commands import (
    Answer,
    Call,
    Fork,
    LimitMemory,
    LimitRows,
    Pause,
    RunIteration,
    Save,
    StartTrial,
    StopLane,
    StopTrial,
)
from fluid.engine.events import (
    FusionLimited,
    IterationDone,
    LaneMeasured,
    LaneReady,
    LaneSpent,
    SavabilityChanged,
    StateMeasured,
    TrialAsked,
    TrialCalled,
    TrialFailed,
    TrialForked,
    TrialNotKept,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialSetBack,
    TrialStarted,
)
from fluid.keeping import KeepRule, WorstKept
from fluid.lane.policy import DEFAULT_POLICY
from fluid.resources import MemoryNeed
from fluid.trainables.usage import NO_USAGE, Usage
from fluid.trial_fields import ANY_PROCESS, TrialProcess
from fluid.wire import Frame


class LaneOptions(NamedTuple):
    """The settings with which a lane starts.

    Attributes:
        lane_id: its number.
        kind: ``"gpu"`` or ``"cpu"``.
        visible: value of ``CUDA_VISIBLE_DEVICES``; empty hides every GPU, ``None`` leaves the variable unchanged.
        threads: threads that PyTorch and numeric libraries may use.
        cores: the CPU cores that it is pinned to; none for no pinning.
        address: at which other machines reach its machine.
        run_folder: folder for the trials' output, logs and checkpoints on disk.
        memory_folder: folder in host memory for checkpoints; empty for none.
        note: file that names the trial whose code runs, for the driver to read if the lane dies; empty for none.
        save_after: fewest seconds of unsaved work before the lane checkpoints a trial automatically.
        save_ratio: fewest seconds of unsaved work for that, as a multiple of the seconds that the last save took.
        idle_save_after: an idle trial is checkpointed earlier, so that another lane can continue it at once, if its
            iterations take at least this many seconds, and at least ``save_ratio`` times what its last save took.
        policy: which trial runs next if several have iterations left; see :mod:`fluid.lane.policy`.
        payload_folders: where the lane's host keeps payloads; see :class:`KeptPayload`; also for shared data.
        environment: variables that make the lane a client of MPS, whose clients on a GPU fail together; else empty.
        variables: environment variables that tell code in the lane about its device.
        bounded: whether the device's memory is limited and so must be measured on a CPU, too.
        session_key: proves to other machines that the lane is of the session; empty if there are none.
        session_folder: the run's folder on the driver's machine; empty if that is ``run_folder``.
        program: ``module:function`` to call with the connection in place of a lane; empty for a lane.
        echo: whether the lane's own output receives what trials print, too, for the driver to show.
        launched_at: when its host launched it, on the machine's clock, seconds.
        reserved_bytes: of host memory, which another program may take, as Ray's object store.
        authkey: the host's key of ``multiprocessing``, by which proxies of a manager of its process authenticate.
    """

    lane_id: int
    kind: str = "cpu"
    visible: str | None = ""
    threads: int = 1
    cores: tuple[int, ...] = ()
    address: str = LOOPBACK
    run_folder: str = "."
    memory_folder: str = ""
    note: str = ""
    save_after: float = 1.0
    save_ratio: float = 20.0
    idle_save_after: float = 0.1
    policy: str = DEFAULT_POLICY
    payload_folders: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    bounded: bool = False
    session_key: bytes = b""
    session_folder: str = ""
    program: str = ""
    echo: bool = False
    launched_at: float = -math.inf
    reserved_bytes: float = 0.0
    authkey: bytes = b""


class Membership(msgspec.Struct, frozen=True):
    """How a lane takes part in a trial that trains in several lanes.

    Attributes:
        epoch: number of this membership; every message from a member carries it, so that late ones are recognised.
        process_group: name for :func:`fluid.elastic.groups.make.make_group`.
        takes_over: whether it receives its state from another member, so that it need not restore a checkpoint.
    """

    epoch: int
    process_group: str
    takes_over: bool = False


# -- from the driver to a lane -------------------------------------------------------------------------------


class KeptPayload(msgspec.Struct, frozen=True):
    """Stands for the bytes of a large payload, which the lane's host keeps in a file of that name for its lanes."""

    name: str


class ShipTrainable(Frame, frozen=True):
    """A pickled trainable, sent once per lane, and the entries of ``sys.path`` that it needs.

    ``script`` is a pickled :class:`fluid.lane.process.script.Script`; empty where trials find nothing of the script's.
    """

    key: int
    payload: bytes | KeptPayload
    sys_path: tuple[str, ...]
    script: bytes = b""


class DropTrainable(Frame, frozen=True):
    """No further trial uses a trainable."""

    key: int


class SetUpTrial(Frame, frozen=True):
    """The command that starts a trial, with what the engine does not know of it. Replaces a resident of that id.

    As a member of an elastic trial (``membership``) the lane answers Prepared and waits.

    Attributes:
        key: of the trial's trainable.
        config: pickled.
        source: address of the server of the machine that has the checkpoint; ``None`` if it is the lane's own.
        process: what the trial asks of the lane's.
        keep: which checkpoints of the trial outlive the run; ``None`` if none do.
    """

    command: StartTrial
    key: int
    config: bytes | KeptPayload
    membership: Membership | None = None
    source: tuple[str, int] | None = None
    process: TrialProcess = ANY_PROCESS
    keep: KeepRule | None = None

    @property
    def trial_id(self) -> str:
        """The trial."""
        return self.command.trial_id


class AdoptResident(Frame, frozen=True):
    """Make an idle resident a member of an elastic trial, with the state it has; answered by Prepared."""

    trial_id: str
    membership: Membership


class ToMember(Frame, frozen=True):
    """One of the controller's messages of :mod:`fluid.elastic.messages`, for a member in the lane."""

    trial_id: str
    message: ForMember


class KeepBar(Frame, frozen=True):
    """What is worth keeping of a group's trials.

    Attributes:
        bar: what an iteration must pass for its checkpoint to outlive the run; ``None`` if any will do.
        room: bytes that are left of the quota for such checkpoints; ``None`` if there is no quota.
    """

    group: str
    bar: WorstKept | None
    room: int | None


#: All that a lane is told. It ends with a StopLane.
ToLane = (
    ShipTrainable
    | DropTrainable
    | SetUpTrial
    | RunIteration
    | Pause
    | Save
    | Fork
    | StopTrial
    | Call
    | LimitMemory
    | LimitRows
    | Answer
    | AdoptResident
    | ToMember
    | KeepBar
    | StopLane
)


# -- from a lane to the driver -------------------------------------------------------------------------------


class PayloadMissing(Frame, frozen=True):
    """A payload that the host kept is not there any more; the lane waits for it a few seconds."""

    name: str


class LaneWarming(Frame, frozen=True):
    """The lane begins to make its GPU ready; LaneReady or LaneUnusable follows, unless it hangs in the driver."""


class LaneUnusable(Frame, frozen=True):
    """The lane cannot use its device and ends; sent instead of LaneReady.

    Attributes:
        reason: the error, in one line.
        position: which of a gang's devices, from 0.
        may_pass: whether another process may be able to use it soon, as an MPS server was not ready.
    """

    reason: str
    position: int = 0
    may_pass: bool = False


class ModulesLoaded(Frame, frozen=True):
    """A trial has made the lane load modules that it did not have when it was started."""

    modules: tuple[str, ...]


class CleanUpBegun(Frame, frozen=True):
    """The code of a trial cleans up, and no iteration runs; with no trial, what is left of those of the lane."""

    trial_id: str


class FromMember(Frame, frozen=True):
    """One of a member's messages of :mod:`fluid.elastic.messages`; ``memory`` and ``usage`` as in IterationDone."""

    at: float
    trial_id: str
    epoch: int
    message: OfMember
    memory: MemoryNeed | None = None
    usage: Usage = NO_USAGE


class LaneLogged(Frame, frozen=True):
    """Log records of trials in the lane.

    Attributes:
        records: the attributes of each, pickled.
        dropped: how many more there were since the last message, which had no room.
    """

    records: tuple[bytes, ...]
    dropped: int = 0


#: What a lane sends of the engine's events.
LaneEvents = (
    LaneReady
    | LaneMeasured
    | LaneSpent
    | StateMeasured
    | TrialStarted
    | TrialSetBack
    | SavabilityChanged
    | IterationDone
    | FusionLimited
    | TrialPaused
    | TrialSaved
    | TrialForked
    | TrialNotKept
    | TrialReleased
    | TrialFailed
    | TrialCalled
    | TrialAsked
)
#: All that a lane tells.
FromLane = (
    LaneEvents | PayloadMissing | LaneWarming | LaneUnusable | ModulesLoaded | CleanUpBegun | FromMember | LaneLogged
)

# -- what hosts tell of checkpoints --------------------------------------------------------------------------


class CheckpointMoved(Frame, frozen=True):
    """A host has brought a checkpoint into its memory, or moved it to disk.

    Attributes:
        path: its folder now.
        in_memory: whether that is in host memory.
        host: name of the machine.
    """

    path: str
    in_memory: bool
    host: str


class CheckpointForked(Frame, frozen=True):
    """A host has made a checkpoint, of a trial, the state from which another one is to start, or could not.

    Attributes:
        trial_id: the trial that is to start.
        parent: the trial whose checkpoint it was.
        host: name of the machine.
        path: the folder of the one that was made; empty if there is none.
        in_memory: whether that is in host memory.
        seconds: that this took.
        problem: why there is none, in one line; empty if there is.
    """

    trial_id: str
    parent: str
    host: str
    path: str = ""
    in_memory: bool = False
    seconds: float = 0.0
    problem: str = ""


class CheckpointPersisted(Frame, frozen=True):
    """A host has copied a checkpoint to disk, or could not.

    Attributes:
        path: the copy's folder; that of the checkpoint if there is none.
        host: name of the machine.
        keep: whether the copy is to outlive the run.
        bytes: of such a copy.
        seconds: that this took.
        problem: why there is none, in one line; empty if there is.
    """

    trial_id: str
    path: str
    host: str
    keep: bool
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


#: What a host tells of checkpoints.
CheckpointReport = CheckpointMoved | CheckpointPersisted | CheckpointForked
