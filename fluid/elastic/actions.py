"""What an :class:`~fluid.elastic.controller.ElasticController` returns: messages to send, and events for the driver."""

from __future__ import annotations

from typing import Any, NamedTuple


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
