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


# -- from the driver to a lane -------------------------------------------------------------------------------


class Ship(NamedTuple):
    """A trainable, sent once per lane, and what the lane's ``sys.path`` needs for it."""

    key: int
    payload: bytes
    sys_path: tuple[str, ...]


class Start(NamedTuple):
    """Set a trial up and run it; with a checkpoint's path, restore it. Replaces a resident of that id."""

    trial_id: str
    key: int
    config: bytes
    iterations: int
    checkpoint: str | None = None
    iteration: int = 0


class Run(NamedTuple):
    """Run a resident for that many iterations more."""

    trial_id: str
    iterations: int


class Pause(NamedTuple):
    """Run a resident no further, and keep it."""

    trial_id: str


class Save(NamedTuple):
    """Save a resident, and let it go if ``drop``."""

    trial_id: str
    drop: bool


class Stop(NamedTuple):
    """Let a resident go."""

    trial_id: str


class Forget(NamedTuple):
    """Delete a trial's checkpoints."""

    trial_id: str


class Shutdown(NamedTuple):
    """Let all residents go, and end."""


# -- from a lane to the driver -------------------------------------------------------------------------------


class Ready(NamedTuple):
    """The lane is warm."""

    at: float
    pid: int


class Started(NamedTuple):
    """A trial was set up or restored."""

    at: float
    trial_id: str
    iteration: int
    seconds: float


class Iterated(NamedTuple):
    """An iteration is done, or, if ``metrics`` is ``None``, there was none left to do.

    ``metrics`` are plain values in a dict, or :class:`Packed`. ``memory`` is (persistent, ephemeral) bytes.
    """

    at: float
    trial_id: str
    iteration: int
    seconds: float
    metrics: Any
    memory: tuple[float, float] | None
    finished: bool


class Paused(NamedTuple):
    """A trial runs no further for now."""

    at: float
    trial_id: str
    iteration: int


class Saved(NamedTuple):
    """A trial was saved."""

    at: float
    trial_id: str
    iteration: int
    path: str
    in_memory: bool
    dropped: bool
    seconds: float


class Released(NamedTuple):
    """A trial has left the lane."""

    at: float
    trial_id: str


class Failed(NamedTuple):
    """A trial raised and has left the lane; ``kind`` is ``"error"`` or ``"out_of_memory"``."""

    at: float
    trial_id: str
    kind: str
    message: str
    traceback: str


class Packed(NamedTuple):
    """Metrics that hold more than plain values.

    They are pickled apart: a driver that cannot read them still reads ``plain``, and the rest of the batch.
    """

    payload: bytes
    plain: dict[str, Any]


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
