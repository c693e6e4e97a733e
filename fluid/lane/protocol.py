"""The messages between the driver and a lane: named tuples, pickled in batches.

Tuples, because thousands of them pass per second and pickle several times faster than dataclasses. The driver tells a
lane what to do with its residents, the trials that it hosts: ``RunResident``, ``PauseResident`` ... The lane reports
back: ``ResidentIterated`` ... Trials are identified by their id; times are seconds on the clock of the lane's machine.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fluid.elastic.messages import LOOPBACK
from fluid.keeping import KeepRule, Kept, WorstKept
from fluid.lane.policy import DEFAULT_POLICY
from fluid.trainables.encoded_metrics import EncodedMetrics, IterationRun
from fluid.trial_fields import ANY_PROCESS, TrialProcess

# -- checkpoint messages -------------------------------------------------------------------------
#
# What is told of checkpoints on a machine: from where trials were restored, which have moved, and were copied.


class RestoredFrom(NamedTuple):
    """From where a lane restored a trial.

    Attributes:
        source: ``"memory"``, of the lane's host; ``"disk"``; or ``"host"``, another one that sent it.
        seconds: that finding, reading and loading its checkpoint took.
        bytes: of the checkpoint's files.
    """

    source: Literal["memory", "disk", "host"]
    seconds: float
    bytes: int


class CheckpointMoved(NamedTuple):
    """A host has brought a checkpoint into its memory, or moved it to disk.

    Attributes:
        path: its folder now.
        in_memory: whether that is in host memory.
        host: name of the machine.
    """

    path: str
    in_memory: bool
    host: str


class CheckpointPersisted(NamedTuple):
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


# -- messages ------------------------------------------------------------------------------------


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


class Membership(NamedTuple):
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


class KeptPayload(NamedTuple):
    """Stands for the bytes of a large payload, which the lane's host keeps in a file of that name for its lanes."""

    name: str


class ShipTrainable(NamedTuple):
    """A pickled trainable, sent once per lane, and the entries of ``sys.path`` that it needs.

    ``script`` is a pickled :class:`fluid.lane.process.script.Script`; empty where trials find nothing of the script's.
    """

    key: int
    payload: bytes | KeptPayload
    sys_path: tuple[str, ...]
    script: bytes = b""


class DropTrainable(NamedTuple):
    """No further trial uses a trainable."""

    key: int


class StartResident(NamedTuple):
    """Set a trial up, or restore it from a checkpoint's path, and run it. Replaces a resident of that id.

    ``source`` is the address of the server of the machine that has the checkpoint, if it is not the lane's; ``process``
    what the trial asks of the lane's; ``keep`` tells which checkpoints outlive the run; ``limit_bytes`` is as in
    LimitResident. As a member of an elastic trial (``membership``) it answers Prepared and waits.
    """

    trial_id: str
    key: int
    config: bytes | KeptPayload
    iterations: int
    checkpoint: str | None = None
    iteration: int = 0
    membership: Membership | None = None
    source: tuple[str, int] | None = None
    process: TrialProcess = ANY_PROCESS
    keep: KeepRule | None = None
    limit_bytes: float | None = None


class RunResident(NamedTuple):
    """Run a resident for that many more iterations."""

    trial_id: str
    iterations: int


class PauseResident(NamedTuple):
    """Stop running a resident, and keep it. With ``may_move`` another lane may continue it later."""

    trial_id: str
    may_move: bool = False


class SaveResident(NamedTuple):
    """Save a resident, to disk at once if ``durable``; with ``drop``, release it afterwards.

    With ``keep`` the checkpoint outlives the run, and the answer may be ResidentNotKept.
    """

    trial_id: str
    drop: bool
    durable: bool = False
    keep: bool = False


class ReleaseResident(NamedTuple):
    """Clean a resident up and release it; with ``keep``, save it first so that the checkpoint outlives the run."""

    trial_id: str
    keep: bool = False


class CallResident(NamedTuple):
    """Call a method of a resident; ``payload`` comes from :func:`fluid.trainables.pickling.dump_arguments`."""

    trial_id: str
    call_id: int
    method: str
    payload: bytes


class AdoptResident(NamedTuple):
    """Make an idle resident a member of an elastic trial, with the state it has; answered by Prepared."""

    trial_id: str
    membership: Membership


class ToMember(NamedTuple):
    """One of the controller's messages of :mod:`fluid.elastic.messages`, for a member in the lane."""

    trial_id: str
    message: Any


class AnswerResident(NamedTuple):
    """The answer to a ResidentAsked: pickled, or, if ``failed``, an exception; ``None`` if the trial has ended."""

    trial_id: str
    request_id: int
    payload: bytes | None
    failed: bool = False


class Shutdown(NamedTuple):
    """Release all residents, and end."""


# -- from a lane to the driver -------------------------------------------------------------------------------


class PayloadMissing(NamedTuple):
    """A payload that the host kept is not there any more; the lane waits for it a few seconds."""

    at: float
    name: str


class LaneWarm(NamedTuple):
    """The lane is ready for trials, ``seconds`` after its host launched it.

    ``own_bytes`` is the device memory of its context; 0 where not measured.
    """

    at: float
    pid: int
    own_bytes: float = 0.0
    seconds: float = math.inf


class ResidentSetBack(NamedTuple):
    """A trial could not be restored from the checkpoint named; comes before the answer to its StartResident.

    Attributes:
        iteration: iterations done by the state that it has instead.
        path: the checkpoint of that state; ``None`` if it begins afresh.
        in_memory: whether that checkpoint is in host memory.
        reason: why, in one line.
        cannot_load: whether its own code raised for every checkpoint that is not damaged.
    """

    at: float
    trial_id: str
    iteration: int
    path: str | None
    in_memory: bool
    reason: str
    cannot_load: bool


class ResidentStarted(NamedTuple):
    """A trial was set up or restored.

    ``fusion_key`` is a digest of what trials must have in common to train in one step; ``None`` if this one cannot.
    ``restored`` is ``None`` if it began afresh.
    """

    at: float
    trial_id: str
    iteration: int
    seconds: float
    fusion_key: str | None = None
    restored: RestoredFrom | None = None


class ResidentIterated(NamedTuple):
    """A trial finished an iteration, or, if ``metrics`` is ``None``, had none left to run.

    ``memory`` is (persistent, ephemeral) bytes, and ``busy`` the share that a meter of
    :mod:`fluid.lane.device.busy` measured. ``rows`` trials, this one included, trained in one step, which took
    ``seconds``; all of them report it with the same ``at``. ``settled`` is false for a step that also traced its
    programs: its seconds say nothing of later ones. ``run`` has all iterations of a run of short ones that are told
    together, of which this is the last.
    """

    at: float
    trial_id: str
    iteration: int
    seconds: float
    metrics: EncodedMetrics | None
    memory: tuple[float, float] | None
    finished: bool
    busy: float | None = None
    rows: int = 1
    settled: bool = True
    run: IterationRun | None = None


class ResidentPaused(NamedTuple):
    """A trial has stopped running for now; ``may_move`` as in the PauseResident that this answers."""

    at: float
    trial_id: str
    iteration: int
    may_move: bool


class ResidentSaved(NamedTuple):
    """A trial was saved; ``kept`` is set if the checkpoint outlives the run."""

    at: float
    trial_id: str
    iteration: int
    path: str
    in_memory: bool
    dropped: bool
    seconds: float
    kept: Kept | None = None


class CleanUpBegun(NamedTuple):
    """The code of a trial cleans up, and no iteration runs; with no trial, what is left of those of the lane."""

    at: float
    trial_id: str


class ResidentReleased(NamedTuple):
    """A trial has left the lane."""

    at: float
    trial_id: str


class Raised(NamedTuple):
    """An exception that a trial's code raised.

    Attributes:
        kind: ``"error"``, ``"out_of_memory"``, ``"not_saved"`` for a trial that was to leave the lane and could not
            be saved for want of space, or ``"device"`` for an exception after which the device answers no more.
        message: one line for people.
        traceback: as text.
        exception: pickled.
    """

    kind: str
    message: str
    traceback: str
    exception: bytes | None


class ResidentFailed(NamedTuple):
    """A trial raised and has left the lane; see :class:`Raised`."""

    at: float
    trial_id: str
    kind: str
    message: str
    traceback: str
    exception: bytes | None


class ResidentCalled(NamedTuple):
    """The result of a call: ``result`` is what the method returned, pickled, unless it raised."""

    at: float
    trial_id: str
    call_id: int
    result: bytes | None
    raised: Raised | None


class ResidentAsked(NamedTuple):
    """A trial's code asks its submitter, in the middle of an iteration, and waits for the AnswerResident."""

    at: float
    trial_id: str
    request_id: int
    payload: bytes


class FromMember(NamedTuple):
    """One of a member's messages of :mod:`fluid.elastic.messages`; ``memory`` as in ResidentIterated."""

    at: float
    trial_id: str
    epoch: int
    message: Any
    memory: tuple[float, float] | None = None


def encode(messages: Sequence[Any]) -> bytes:
    """Pickles a batch of messages."""
    return pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)


def decode(data: bytes | bytearray | memoryview) -> list[Any]:
    """Unpickles a batch of messages; only for connections between processes of one user."""
    return list(pickle.loads(data))


# -- device messages -----------------------------------------------------------------------------
#
# What a lane tells the driver about its device and its process.


class HeldAtRest(NamedTuple):
    """A resident that does not run holds so many bytes on the device, once what it had freed was given back."""

    at: float
    trial_id: str
    held_bytes: float


class LaneWarming(NamedTuple):
    """The lane begins to make its GPU ready; LaneWarm or LaneUnusable follows, unless it hangs in the driver."""

    at: float


class LaneUnusable(NamedTuple):
    """The lane cannot use its device and ends; sent instead of LaneWarm.

    Attributes:
        reason: the error, in one line.
        position: which of a gang's devices, from 0.
        may_pass: whether another process may be able to use it soon, as an MPS server was not ready.
    """

    at: float
    reason: str
    position: int = 0
    may_pass: bool = False


class ModulesLoaded(NamedTuple):
    """A trial has made the lane load modules that it did not have when it was started."""

    at: float
    modules: tuple[str, ...]


class ProcessSpent(NamedTuple):
    """A trial that has left has changed the process for good: no further one should come.

    Attributes:
        reason: what stays, in one line.
    """

    at: float
    reason: str


class OwnBytesChanged(NamedTuple):
    """The lane takes notably more or less device memory for itself than it told before."""

    at: float
    own_bytes: float


# -- keep messages -------------------------------------------------------------------------------
#
# Messages between the driver and a lane about checkpoints that outlive the run; see :mod:`fluid.lane.protocol`.


class KeepBar(NamedTuple):
    """What is worth keeping of a group's trials.

    Attributes:
        bar: what an iteration must pass for its checkpoint to outlive the run; ``None`` if any will do.
        room: bytes that are left of the quota for such checkpoints; ``None`` if there is no quota.
    """

    group: str
    bar: WorstKept | None
    room: int | None


class ResidentNotKept(NamedTuple):
    """A checkpoint that was to outlive the run was not written; ``reason`` is one line."""

    at: float
    trial_id: str
    iteration: int
    reason: str


# -- limit messages ------------------------------------------------------------------------------
#
# Limits that a lane keeps to: what the driver sets, and what the lane finds.


class LimitResident(NamedTuple):
    """Limits the device memory that a trial may take until another limit; ``None`` for no limit."""

    trial_id: str
    limit_bytes: float | None


class SetThreads(NamedTuple):
    """Use that many CPU threads, as other lanes have begun or ended to run trials on the device."""

    threads: int


class SetRows(NamedTuple):
    """Train at most so many trials in one step from now on; 1 for one after another."""

    rows: int


class RowsLimited(NamedTuple):
    """Trials like this one train at most so many in one step in this lane from now on.

    Attributes:
        rows: 1 if they cannot be fused; more if so many fit into the device's memory.
        reason: why, in one line.
    """

    at: float
    trial_id: str
    rows: int
    reason: str
