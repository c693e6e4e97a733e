"""What a driver and a lane tell each other: named tuples, pickled in batches.

Tuples, because thousands of them pass per second and they pickle several times faster than dataclasses.
Trials are named by their id; times are seconds on the clock of the lane's machine.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from fluid.lane.policy import DEFAULT_POLICY

#: Longest name of a file, in bytes, that every file system takes, less room for suffixes.
_LONGEST_NAME = 200


class LaneOptions(NamedTuple):
    """What a lane is told when it is started.

    Attributes:
        lane_id: its number.
        kind: ``"gpu"`` or ``"cpu"``.
        visible: what ``CUDA_VISIBLE_DEVICES`` is set to; empty hides every GPU, ``None`` leaves it as it is.
        threads: threads that PyTorch and numeric libraries may use.
        core: the CPU core it is pinned to; ``None`` leaves that to the system.
        host: name of its machine.
        run_folder: folder for the trials' output, logs and checkpoints on disk.
        memory_folder: folder in host memory for checkpoints; empty if there is none.
        memory_bytes: how much this lane may keep there.
        note: file that names the trial whose code runs, for whoever finds the lane dead; empty for none.
        save_after: a trial is not saved of the lane's own accord before this many seconds of unsaved work.
        save_ratio: nor before this many times what its last save took.
        rest_after: one that has come to rest is saved before that, so that another lane can go on with it at once, if
            its iterations take at least this many seconds, and ``save_ratio`` times what its last save took.
        policy: which trial runs next if several have iterations left; see :mod:`fluid.lane.policy`.
        environment: variables that make it a client of MPS, with which lanes fail together; none without MPS.
        bounded: whether its device has so much memory and no more; that of a CPU is then measured, too.
    """

    lane_id: int
    kind: str = "cpu"
    visible: str | None = ""
    threads: int = 1
    core: int | None = None
    host: str = "localhost"
    run_folder: str = "."
    memory_folder: str = ""
    memory_bytes: float = 0.0
    note: str = ""
    save_after: float = 1.0
    save_ratio: float = 20.0
    rest_after: float = 0.1
    policy: str = DEFAULT_POLICY
    environment: tuple[tuple[str, str], ...] = ()
    bounded: bool = False


class Membership(NamedTuple):
    """On what terms a lane takes part in a trial that trains in several.

    Attributes:
        epoch: tells this membership from earlier ones of the trial; every message from and about it carries the number.
        process_group: as of :func:`fluid.elastic.make_group.make_group`.
        takes_over: whether its state comes from another lane, so that it need not restore any of its own accord.
    """

    epoch: int
    process_group: str
    takes_over: bool = False


# -- from the driver to a lane -------------------------------------------------------------------------------


class ShipTrainable(NamedTuple):
    """A trainable, sent once per lane, and what the lane's ``sys.path`` needs for it."""

    key: int
    payload: bytes
    sys_path: tuple[str, ...]


class StartResident(NamedTuple):
    """Set a trial up and run it; with a checkpoint's path, restore it. Replaces a resident of that id.

    With ``membership`` it becomes a member, to train together with other lanes: it is set up, says Prepared and waits.
    """

    trial_id: str
    key: int
    config: bytes
    iterations: int
    checkpoint: str | None = None
    iteration: int = 0
    membership: Membership | None = None


class RunResident(NamedTuple):
    """Run a resident for that many iterations more."""

    trial_id: str
    iterations: int


class PauseResident(NamedTuple):
    """Run a resident no further, and keep it; where it ``may_move``, it may go on later, and elsewhere."""

    trial_id: str
    may_move: bool = False


class SaveResident(NamedTuple):
    """Save a resident, and let it go if ``drop``."""

    trial_id: str
    drop: bool


class ReleaseResident(NamedTuple):
    """Let a resident go."""

    trial_id: str


class CallResident(NamedTuple):
    """Call a method of a resident; ``payload`` is what :func:`fluid.trainables.pickling.dump_arguments` made."""

    trial_id: str
    call_id: int
    method: str
    payload: bytes


class AdoptResident(NamedTuple):
    """Make a resident that stands still a member, as it is; answered by Prepared."""

    trial_id: str
    membership: Membership


class ToMember(NamedTuple):
    """One of the controller's messages of :mod:`fluid.elastic.messages`, to a member that is in the lane."""

    trial_id: str
    message: Any


class DeleteCheckpoints(NamedTuple):
    """Delete a trial's checkpoints."""

    trial_id: str


class Shutdown(NamedTuple):
    """Let all residents go, and end."""


# -- from a lane to the driver -------------------------------------------------------------------------------


class LaneWarm(NamedTuple):
    """The lane is warm. ``own_bytes`` is the device memory that it takes for itself; 0 where that is not known."""

    at: float
    pid: int
    own_bytes: float = 0.0


class ResidentStarted(NamedTuple):
    """A trial was set up or restored."""

    at: float
    trial_id: str
    iteration: int
    seconds: float


class ResidentIterated(NamedTuple):
    """An iteration is done, or, if ``metrics`` is ``None``, there was none left to do.

    ``metrics`` are plain values in a dict, or :class:`Packed`. ``memory`` is (persistent, ephemeral) bytes, and
    ``busy`` what :class:`fluid.lane.busy.BusyMeter` measured.
    """

    at: float
    trial_id: str
    iteration: int
    seconds: float
    metrics: Any
    memory: tuple[float, float] | None
    finished: bool
    busy: float | None = None


class ResidentPaused(NamedTuple):
    """A trial runs no further for now."""

    at: float
    trial_id: str
    iteration: int


class ResidentSaved(NamedTuple):
    """A trial was saved."""

    at: float
    trial_id: str
    iteration: int
    path: str
    in_memory: bool
    dropped: bool
    seconds: float


class ResidentReleased(NamedTuple):
    """A trial has left the lane."""

    at: float
    trial_id: str


class Raised(NamedTuple):
    """What the code of a trial raised.

    Attributes:
        kind: ``"error"`` or ``"out_of_memory"``.
        message: one line for people.
        traceback: as text.
        exception: pickled; ``None`` if it cannot be, or is too large.
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
    """A method was called; ``result`` is what it returned, pickled, unless it raised."""

    at: float
    trial_id: str
    call_id: int
    result: bytes | None
    raised: Raised | None


class FromMember(NamedTuple):
    """One of a member's messages of :mod:`fluid.elastic.messages`; ``memory`` as in Iterated."""

    at: float
    trial_id: str
    epoch: int
    message: Any
    memory: tuple[float, float] | None = None


def encode(messages: Sequence[Any]) -> bytes:
    """Pickles a batch of messages."""
    return pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)


def decode(data: bytes | memoryview) -> list[Any]:
    """Reads what :func:`encode` wrote; only for connections that are private to one user."""
    return list(pickle.loads(data))


def folder_name(trial_id: str) -> str:
    """A name for a trial's folder: the id, if it can be one, else one made from it. Distinct ids differ."""
    name = quote(trial_id, safe=" +=,@#()[]{}").replace(".", "%2E")
    if len(name) <= _LONGEST_NAME:
        return name
    import hashlib  # Only the rare long name needs it, and every lane would load it.

    return f"{name[:_LONGEST_NAME]}%{hashlib.sha256(trial_id.encode()).hexdigest()[:32]}"


def trials_folder(run_folder: str) -> str:
    """The folder of the trials' folders."""
    return os.path.join(run_folder, "trials")


def trial_folder(run_folder: str, trial_id: str) -> str:
    """The folder of a trial's output and checkpoints on disk."""
    return os.path.join(trials_folder(run_folder), folder_name(trial_id))
