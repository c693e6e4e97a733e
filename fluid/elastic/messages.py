"""The messages between a controller and the members of an elastic trial: frames, as for lanes.

A generation is a fixed set of members with ranks; its members meet at a rendezvous. A member answers each message as
its docstring says, or with :class:`MemberRaised`, or, if its generation breaks, with one :class:`Broken` per
generation. Only rank 0 sends :class:`MemberIterated`. Times are seconds.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

from fluid.errors import MissingDependencyError, require_one_of
from fluid.trainables.encoded_metrics import EncodedMetrics
from fluid.wire import Frame

#: The libraries through which the members of a trial can communicate.
PROCESS_GROUPS = ("torch", "horovod")
DEFAULT_PROCESS_GROUP = "torch"
#: Address by which processes of one machine reach each other, and no others can.
LOOPBACK = "127.0.0.1"
HOROVOD_INSTALL = 'pip install "$(python scripts/build_horovod.py)", in a checkout of Fluid'


def require_process_group(value: str) -> str:
    """Returns the name of a process group after checking that it can be used; does not load it.

    Raises:
        InvalidFieldError: the name is unknown.
        MissingDependencyError: Horovod is not installed.
    """
    if require_one_of("process_group", value, PROCESS_GROUPS) == "horovod" and not importlib.util.find_spec("horovod"):
        raise MissingDependencyError(f"Horovod is not installed. Install it with: {HOROVOD_INSTALL}")
    return value


# -- from the controller to a member -------------------------------------------------------------------------


class Prepare(Frame, frozen=True):
    """Set the trainable up, and restore it if there is a checkpoint's folder; answered by Prepared.

    Other members may train meanwhile. ``trainable``, ``config`` and ``process`` are pickled; the last is what a process
    of its own takes over from the driver: see ``multiprocessing.spawn.prepare``.
    """

    trainable: bytes
    config: bytes
    checkpoint: str | None = None
    process: bytes = b""


class Join(Frame, frozen=True):
    """Join a generation, and take rank 0's state if ``sync``; answered by Joined.

    ``address`` is the one at which the other members connect to this one: its machine's, or :data:`LOOPBACK` if all
    members are on one machine; empty with size 1. ``reported`` is the last iteration whose result the controller has
    received. ``connection`` is the generation for which the members connected to each other, if they have.
    """

    generation: int
    rank: int
    size: int
    address: str
    sync: bool
    reported: int = 0
    connection: int = 0


class Connect(Frame, frozen=True):
    """Connect to the members of a generation to come, while this one trains; answered by Connected.

    ``rank``, ``size`` and ``address`` are as in Join.
    """

    generation: int
    rank: int
    size: int
    address: str


class Disconnect(Frame, frozen=True):
    """Close the connections that were made for a generation, which the current one does not use; not answered."""

    generation: int


class RunMember(Frame, frozen=True):
    """Run that many iterations together with the other members; each answers Halted at the end of the last.

    A member that has left that generation ignores it.
    """

    generation: int
    iterations: int


class Halt(Frame, frozen=True):
    """Stop at the end of the current iteration; sent to one member, which stops all. An idle one ignores it."""


class WriteCheckpoint(Frame, frozen=True):
    """Write a checkpoint into an empty folder; sent to one idle member, answered by CheckpointWritten."""

    path: str


class StoreValues(Frame, frozen=True):
    """The answer to StoreGet, once all of its values are there."""

    generation: int
    number: int
    values: tuple[bytes, ...]


class Leave(Frame, frozen=True):
    """Clean up, and wait for the next Prepare; answered by Left."""


class Abort(Frame, frozen=True):
    """Break a generation, in the middle of an iteration too; answered by Broken unless that was sent before."""

    generation: int


class EndWorker(Frame, frozen=True):
    """Clean up and end the process; not answered."""


#: All that members are told.
ForMember = (
    Prepare | Join | Connect | Disconnect | RunMember | Halt | WriteCheckpoint | StoreValues | Leave | Abort | EndWorker
)


# -- from a member to the controller -------------------------------------------------------------------------


class Prepared(Frame, frozen=True):
    """The member is set up and can join a generation; ``address`` is the one at which other machines reach its own."""

    iteration: int
    address: str
    seconds: float


class StorePut(Frame, frozen=True):
    """Keep a value for the members of a generation; not answered. See :mod:`fluid.elastic.groups.rendezvous`."""

    generation: int
    key: str
    value: bytes


class StoreGet(Frame, frozen=True):
    """Tell the values of these keys, as soon as all are there; answered by StoreValues with the same number."""

    generation: int
    number: int
    keys: tuple[str, ...]


class Connected(Frame, frozen=True):
    """The member is connected to the others of a generation to come, or could not be for a ``problem``."""

    generation: int
    problem: str = ""


class Joined(Frame, frozen=True):
    """The member has joined. ``metrics`` are those of ``iteration``, if it ran that iteration itself."""

    generation: int
    iteration: int
    metrics: EncodedMetrics | None
    seconds: float


class MemberIterated(Frame, frozen=True):
    """All members have finished an iteration."""

    generation: int
    iteration: int
    metrics: EncodedMetrics
    seconds: float


class Halted(Frame, frozen=True):
    """The member has stopped for now; ``finished`` if the trial said that it is done."""

    generation: int
    iteration: int
    finished: bool


class CheckpointWritten(Frame, frozen=True):
    """The checkpoint was written."""

    iteration: int
    path: str


class Left(Frame, frozen=True):
    """The member has released the trial."""


class Broken(Frame, frozen=True):
    """The generation broke. The member is at the end of ``iteration`` and can join another generation."""

    generation: int
    iteration: int
    reason: str


class MemberRaised(Frame, frozen=True):
    """The user's code raised. The member has broken its generation and released the trial."""

    message: str
    traceback: str


#: All that members say.
OfMember = (
    Prepared
    | StorePut
    | StoreGet
    | Connected
    | Joined
    | MemberIterated
    | Halted
    | CheckpointWritten
    | Left
    | Broken
    | MemberRaised
)


# -- actions -------------------------------------------------------------------------------------
#
# What an :class:`~fluid.elastic.members.controller.ElasticController` returns: messages to send, and events for the
# driver.


class Send(NamedTuple):
    """A message to be sent to a member."""

    member: int
    message: Any


class MemberReady(NamedTuple):
    """A member is set up and can be part of the next :meth:`ElasticController.form`."""

    member: int


class MembersConnected(NamedTuple):
    """The members of a generation to come are connected; or, for a ``problem``, only when it is formed."""

    problem: str


class Formed(NamedTuple):
    """A generation was formed and is idle at the end of ``iteration``; members by rank."""

    generation: int
    members: tuple[int, ...]
    iteration: int


class Reported(NamedTuple):
    """An iteration is finished, and is not lost as long as one member lives. Each is reported once."""

    iteration: int
    metrics: Any
    width: int
    seconds: float | None


class AllHalted(NamedTuple):
    """All members have stopped at the end of ``iteration``."""

    iteration: int
    finished: bool


class Collapsed(NamedTuple):
    """A generation broke, and its survivors are at the end of an iteration; repeated if another member is lost.

    Without survivors the trial must be restored from a checkpoint, by members that are prepared with it.
    """

    generation: int
    survivors: tuple[int, ...]
    reason: str


class MemberFailed(NamedTuple):
    """The user's code raised in a member. The member is no survivor, but its process can be prepared again."""

    member: int
    message: str
    traceback: str


Action = Send | MemberReady | MembersConnected | Formed | Reported | AllHalted | Collapsed | MemberFailed
