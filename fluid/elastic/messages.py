"""What a controller and the members of an elastic trial tell each other: named tuples, as for lanes.

A member answers with the message that is named, or with :class:`MemberRaised`, or, if its generation is broken, with
one :class:`Broken` per generation. Only rank 0 sends :class:`MemberIterated`. Times are seconds.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

from fluid.errors import MissingDependencyError, require_one_of

#: What the members of a trial can talk through, to choose from.
PROCESS_GROUPS = ("torch", "horovod")
DEFAULT_PROCESS_GROUP = "torch"
#: Address by which processes of one machine reach each other, and no others can.
LOOPBACK = "127.0.0.1"
HOROVOD_INSTALL = 'pip install "$(python scripts/build_horovod.py)"'


def require_process_group(value: str) -> str:
    """Returns the name of a process group that can be used, without loading it.

    Raises:
        InvalidFieldError: there is none of that name.
        MissingDependencyError: Horovod is not installed.
    """
    if require_one_of("process_group", value, PROCESS_GROUPS) == "horovod" and not importlib.util.find_spec("horovod"):
        raise MissingDependencyError(f"Horovod is not installed. Install it with: {HOROVOD_INSTALL}")
    return value


# -- from the controller to a member -------------------------------------------------------------------------


class Prepare(NamedTuple):
    """Import the trainable, set it up and, with a checkpoint's folder, restore it; answered by Prepared.

    Others may train meanwhile. ``trainable`` and ``config`` are pickled.
    """

    trainable: bytes
    config: bytes
    checkpoint: str | None = None
    sys_path: tuple[str, ...] = ()


class OpenRendezvous(NamedTuple):
    """Open the meeting point of a generation; told to its rank 0, answered by Hosting."""

    generation: int
    address: str
    size: int


class Join(NamedTuple):
    """Meet the others, and take rank 0's state if ``sync``; answered by Joined.

    With size 1 there is no other member, and ``rendezvous`` is empty. ``reported`` is the last iteration whose result
    the controller has received.
    """

    generation: int
    rank: int
    size: int
    rendezvous: str
    sync: bool
    reported: int = 0


class RunMember(NamedTuple):
    """Run that many iterations together with the others; each member says Halted at the end of the last.

    Ignored by a member that is not in that generation any more.
    """

    generation: int
    iterations: int


class Halt(NamedTuple):
    """Run no further than the current iteration; it is enough to tell one member. Idle ones ignore it."""


class WriteCheckpoint(NamedTuple):
    """Write a checkpoint into an empty folder; told to one idle member, answered by Saved."""

    path: str


class Leave(NamedTuple):
    """Clean up, and wait for another Prepare; answered by Left."""


class Abort(NamedTuple):
    """Break a generation; must be acted on while the member runs. Answered by Broken unless that was said before."""

    generation: int


class EndWorker(NamedTuple):
    """Clean up and end; not answered."""


# -- from a member to the controller -------------------------------------------------------------------------


class Prepared(NamedTuple):
    """The member could start to train at once."""

    iteration: int
    address: str
    seconds: float


class RendezvousOpened(NamedTuple):
    """The generation's members can meet there."""

    generation: int
    rendezvous: str


class Joined(NamedTuple):
    """The member has met the others. ``metrics`` are those of ``iteration``, if it ran that itself."""

    generation: int
    iteration: int
    metrics: Any
    seconds: float


class MemberIterated(NamedTuple):
    """All members have finished an iteration."""

    generation: int
    iteration: int
    metrics: Any
    seconds: float


class Halted(NamedTuple):
    """The member runs no further for now; ``finished`` if the trial said that it has no more to do."""

    generation: int
    iteration: int
    finished: bool


class CheckpointWritten(NamedTuple):
    """The checkpoint is written."""

    iteration: int
    path: str


class Left(NamedTuple):
    """The member holds nothing of the trial any more."""


class Broken(NamedTuple):
    """The generation is broken. The member stands at the end of ``iteration`` and can join another."""

    generation: int
    iteration: int
    reason: str


class MemberRaised(NamedTuple):
    """The user's code raised. The member holds nothing of the trial any more; it has broken its generation."""

    message: str
    traceback: str
