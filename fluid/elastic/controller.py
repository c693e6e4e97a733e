"""Keeps the books of one elastic trial: who trains, with which ranks, in which generation. Without IO.

Calls and messages go in, a list of :class:`Send` and of events comes out. Whoever drives it carries the sends out in
order, and decides about widths.

A resize has four steps: :meth:`ElasticController.prepare` the newcomers while the others train, until
:class:`MemberReady` has come for each; :meth:`ElasticController.halt`, until :class:`AllHalted`;
:meth:`ElasticController.form` the new set, until :class:`Formed`; :meth:`ElasticController.run`. After a failure
:class:`Collapsed` comes instead; then :meth:`ElasticController.form` with the survivors.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fluid.elastic.messages import (
    LOOPBACK,
    Abort,
    Broken,
    CheckpointWritten,
    Halt,
    Halted,
    Join,
    Joined,
    Leave,
    Left,
    MemberIterated,
    MemberRaised,
    OpenRendezvous,
    Prepared,
    RendezvousOpened,
    RunMember,
)
from fluid.errors import FluidError, InvalidFieldError, require_integer


class Send(NamedTuple):
    """A message to be sent to a member."""

    member: int
    message: Any


class MemberReady(NamedTuple):
    """A member is set up and can be in the next :meth:`ElasticController.form`."""

    member: int


class Formed(NamedTuple):
    """A generation has come together and stands still at the end of ``iteration``; members by rank."""

    generation: int
    members: tuple[int, ...]
    iteration: int


class Reported(NamedTuple):
    """An iteration is finished, and will not be lost as long as any member lives; each is told once."""

    iteration: int
    metrics: Any
    width: int
    seconds: float | None


class AllHalted(NamedTuple):
    """All members stand at the end of ``iteration``."""

    iteration: int
    finished: bool


class Collapsed(NamedTuple):
    """A generation is broken, and its survivors stand at the end of an iteration; told again if another one is lost.

    Without survivors the trial has to be restored from a checkpoint, by members that are prepared with it.
    """

    generation: int
    survivors: tuple[int, ...]
    reason: str


class MemberFailed(NamedTuple):
    """The user's code raised in a member. It is not one of the survivors, but its process can prepare again."""

    member: int
    message: str
    traceback: str


Action = Send | MemberReady | Formed | Reported | AllHalted | Collapsed | MemberFailed


class Phase(enum.Enum):
    """What the current generation does."""

    IDLE = "stands still, or there is none"
    RENDEZVOUS = "waits for its meeting point"
    JOINING = "comes together"
    RUNNING = "trains"
    BREAKING = "waits for its survivors to stand still"
    BROKEN = "is broken, and its survivors stand still"


@dataclass(slots=True)
class _Member:
    """What is known of a member.

    Attributes:
        iteration: iterations done; ``None`` until it is prepared.
        has_state: whether it has the trial's state, and not just the one it was set up with.
        broke: the last generation it said was broken.
    """

    iteration: int | None = None
    address: str = LOOPBACK
    metrics: Any = None
    has_state: bool = False
    broken_generation: int = 0


class ElasticController:
    """The generations of one trial; members are numbers of the caller's choice, such as lane ids.

    Attributes:
        generation: number of the current one; 0 before the first.
        ranks: its members, rank 0 first.
        iteration: the last iteration that was reported.
        phase: what it does.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.ranks: tuple[int, ...] = ()
        self.iteration = 0
        self.phase = Phase.IDLE
        self._members: dict[int, _Member] = {}
        #: Members of the current generation that still have to say something for it to get on.
        self._awaited: set[int] = set()
        #: Where the trial goes from a generation that only hands its state over.
        self._handover_target: tuple[int, ...] = ()
        self._leaving: list[int] = []
        self._sync = False
        self._finished = False
        self._reason = ""

    @property
    def members(self) -> tuple[int, ...]:
        """Everybody who was prepared and has not left."""
        return tuple(self._members)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Those of them who are not in the current generation."""
        return tuple(member for member in self._members if member not in self.ranks and member not in self._leaving)

    def is_ready(self, member: int) -> bool:
        """Whether a member can be in the next :meth:`form`."""
        return member in self._members and self._members[member].iteration is not None

    def is_member(self, member: int) -> bool:
        """Whether it is a member, or is being set up to be one."""
        return member in self._members

    @property
    def survivors(self) -> tuple[int, ...]:
        """Members that have the trial's state, the one to take it from first."""
        return tuple(self._by_seniority())

    # -- what the driver asks ------------------------------------------------------------------------------

    def prepare(self, member: int, message: Any) -> list[Action]:
        """Has a newcomer set up, while the others go on.

        Args:
            member: its number.
            message: :class:`fluid.elastic.messages.Prepare`, or whatever else it answers by Prepared.

        Raises:
            InvalidFieldError: it is a member already.
        """
        if member in self._members:
            raise InvalidFieldError("member", member, "is one already")
        self._members[member] = _Member()
        return [Send(member, message)]

    def adopt(self, member: int, message: Any) -> list[Action]:
        """Takes over a trial that ran in one process so far, and stands still: that one has the state.

        Args:
            member: its number.
            message: what makes it a member; it answers by Prepared.

        Raises:
            FluidError: the trial has a generation already.
        """
        if self.generation:
            raise FluidError(f"a trial in generation {self.generation} cannot be taken over")
        actions = self.prepare(member, message)
        self._members[member].has_state = True
        self.ranks = (member,)
        return actions

    def form(self, members: Sequence[int]) -> list[Action]:
        """Goes on with another set of members, the next generation; those of the old one that are not in it leave.

        Rank 0 stays if it is in the set; if not, the first survivor in it takes its place. Survivors come before
        newcomers. If nobody stays, or somebody else knows more than the new rank 0, the state is first handed over, in
        a generation of its own.

        Raises:
            InvalidFieldError: the set is empty, names a member twice, or one that is not ready.
            FluidError: the current generation does not stand still.
        """
        if self.phase not in (Phase.IDLE, Phase.BROKEN):
            raise FluidError(f"a trial whose generation {self.generation} {self.phase.value} cannot be resized")
        target = tuple(members)
        if not target or len(set(target)) != len(target):
            raise InvalidFieldError("members", target, "must be some members, each once")
        for member in target:
            if not self.is_ready(member):
                raise InvalidFieldError("members", target, f"member {member} is not ready")
        survivors = self._by_seniority()
        staying = [member for member in survivors if member in target]
        self._leaving = [member for member in self.ranks if member in self._members and member not in target]
        if survivors and not staying:
            self._handover_target = target
            return self._open([survivors[0], *target], survivors)
        newcomers = [member for member in target if member not in staying]
        if staying and self.ranks[0] not in staying:
            wanted = [member for member in target if member in staying]
            self._handover_target = (*wanted, *newcomers) if wanted[0] != staying[0] else ()
        return self._open([*staying, *newcomers], survivors)

    def run(self, iterations: int) -> list[Action]:
        """Runs a generation that stands still for so many iterations.

        Raises:
            InvalidFieldError: ``iterations`` is less than 1.
            FluidError: there is no generation that stands still.
        """
        iterations = require_integer("iterations", iterations, at_least=1)
        if self.phase is not Phase.IDLE or not self.ranks:
            raise FluidError("there is no generation that stands still")
        self.phase, self._awaited, self._finished = Phase.RUNNING, set(self.ranks), False
        return [Send(member, RunMember(self.generation, iterations)) for member in self.ranks]

    def halt(self) -> list[Action]:
        """Stops at the end of the current iteration; StoodStill follows, of itself if nothing runs."""
        return [Send(self.ranks[0], Halt())] if self.phase is Phase.RUNNING else []

    def dismiss(self, member: int) -> list[Action]:
        """Has somebody leave who was prepared, and has not been in any generation.

        Raises:
            InvalidFieldError: it is in the current one.
        """
        if member in self.ranks:
            raise InvalidFieldError("member", member, "is in the current generation")
        return [Send(member, Leave())] if self._members.pop(member, None) is not None else []

    def member_lost(self, member: int) -> list[Action]:
        """Takes note that a member's process is gone; one that is unknown does not matter."""
        if self._members.pop(member, None) is None:
            return []
        if member in self._leaving:
            self._leaving.remove(member)
        return self._break(f"member {member} is gone") if member in self.ranks else []

    # -- what members say ----------------------------------------------------------------------------------

    def receive(self, member: int, message: Any) -> list[Action]:
        """Takes a member's message; those of members that were given up are ignored."""
        known = self._members.get(member)
        if known is None:
            return []
        if isinstance(message, Prepared):
            known.iteration, known.address = message.iteration, message.address
            return [MemberReady(member)]
        if isinstance(message, MemberRaised):
            return [MemberFailed(member, message.message, message.traceback), *self.member_lost(member)]
        if isinstance(message, (Left, CheckpointWritten)):
            return []
        if message.generation != self.generation or member not in self.ranks:
            return []  # It crossed with what ended that generation.
        if isinstance(message, RendezvousOpened):
            return self._meet(message.rendezvous) if self.phase is Phase.RENDEZVOUS else []
        known.iteration = message.iteration
        if isinstance(message, Broken):
            known.broken_generation = message.generation
            return self._break(message.reason)
        if isinstance(message, MemberIterated):
            known.metrics = message.metrics
            return self._report(message.iteration, message.metrics, message.seconds)
        if isinstance(message, Halted):
            self._finished |= message.finished
        elif isinstance(message, Joined):
            known.metrics, known.has_state = message.metrics, True
        if self.phase in (Phase.JOINING, Phase.RUNNING):
            self._awaited.discard(member)
            if not self._awaited:
                return self._formed() if self.phase is Phase.JOINING else self._stood_still()
        return []

    # -- generations ---------------------------------------------------------------------------------------

    def _by_seniority(self) -> list[int]:
        """Members of the last generation, the one to take the state from first.

        That is rank 0, which has all that was reported. Without it, it is who is farthest: whatever was reported,
        every member had finished before.
        """
        survivors = [member for member in self.ranks if member in self._members and self._members[member].has_state]
        if survivors and survivors[0] != self.ranks[0]:
            survivors.sort(key=lambda member: -self._iteration_of(member))
        return survivors

    def _iteration_of(self, member: int) -> int:
        iteration = self._members[member].iteration
        assert iteration is not None
        return iteration

    def _open(self, order: list[int], survivors: list[int]) -> list[Action]:
        self.generation += 1
        self.ranks = tuple(order)
        iterations = {self._iteration_of(member) for member in order}
        self._sync = len(iterations) > 1 or any(member not in survivors for member in order)
        self._awaited = set(order)
        if len(order) == 1:
            return self._meet("")
        addresses = {self._members[member].address for member in order}
        address = LOOPBACK if len(addresses) == 1 else self._members[order[0]].address
        self.phase = Phase.RENDEZVOUS
        return [Send(order[0], OpenRendezvous(self.generation, address, len(order)))]

    def _meet(self, rendezvous: str) -> list[Action]:
        self.phase = Phase.JOINING
        size = len(self.ranks)
        return [
            Send(member, Join(self.generation, rank, size, rendezvous, self._sync, self.iteration))
            for rank, member in enumerate(self.ranks)
        ]

    def _formed(self) -> list[Action]:
        self.phase = Phase.IDLE
        actions: list[Action] = []
        first = self.ranks[0]
        iteration = self._iteration_of(first)
        # A survivor may have finished an iteration whose rank 0 died before it could say so.
        if self._members[first].metrics is not None:
            actions += self._report(iteration, self._members[first].metrics, None)
        self.iteration = max(self.iteration, iteration)  # What it began from was reported before its time.
        if self._handover_target:
            target, self._handover_target = self._handover_target, ()
            return [*actions, *self._open(list(target), list(self.ranks))]
        for member in self._leaving:
            del self._members[member]
            actions.append(Send(member, Leave()))
        self._leaving = []
        return [*actions, Formed(self.generation, self.ranks, iteration)]

    def _report(self, iteration: int, metrics: Any, seconds: float | None) -> list[Action]:
        if iteration <= self.iteration:
            return []  # Done again, from an older checkpoint.
        self.iteration = iteration
        return [Reported(iteration, metrics, len(self.ranks), seconds)]

    def _stood_still(self) -> list[Action]:
        self.phase = Phase.IDLE
        return [AllHalted(self._iteration_of(self.ranks[0]), self._finished)]

    def _break(self, reason: str) -> list[Action]:
        """Waits until all that are left of the generation have said that they stand still."""
        actions: list[Action] = []
        awaited = [m for m in self.ranks if m in self._members and self._members[m].broken_generation < self.generation]
        if self.phase not in (Phase.BREAKING, Phase.BROKEN):
            self.phase, self._reason, self._handover_target = Phase.BREAKING, reason, ()
            actions += [Send(member, Abort(self.generation)) for member in awaited]
        if awaited:
            return actions
        self.phase = Phase.BROKEN
        # Whoever was to leave stands still with the state, and may be all that is left of it.
        self.ranks += tuple(member for member in self._leaving if member not in self.ranks)
        self._leaving = []
        return [*actions, Collapsed(self.generation, self.survivors, self._reason)]
