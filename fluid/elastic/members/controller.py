"""Coordinates the members of one elastic trial through its generations. Performs no IO.

Calls and members' messages go in; a list of :class:`Send` and of events comes out. The driver delivers the sends in
order, and decides about widths.

A resize has four steps: :meth:`ElasticController.prepare` the newcomers while the others train, until
:class:`MemberReady` has come for each, and :meth:`ElasticController.connect` them with those that stay, until
:class:`~fluid.elastic.messages.MembersConnected`; :meth:`ElasticController.halt`, until :class:`AllHalted`;
:meth:`ElasticController.form` the new set, until :class:`Formed`; :meth:`ElasticController.run`. After a failure
:class:`Collapsed` comes instead; then :meth:`ElasticController.form` with the survivors.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fluid.elastic.groups.rendezvous import RendezvousStore
from fluid.elastic.messages import (
    LOOPBACK,
    Abort,
    Action,
    AllHalted,
    Broken,
    CheckpointWritten,
    Collapsed,
    Connect,
    Connected,
    Disconnect,
    Formed,
    Halt,
    Halted,
    Join,
    Joined,
    Leave,
    Left,
    MemberFailed,
    MemberIterated,
    MemberRaised,
    MemberReady,
    MembersConnected,
    Prepared,
    Reported,
    RunMember,
    Send,
    StoreGet,
    StorePut,
)
from fluid.errors import FluidError, InvalidFieldError, require_integer

# -- known member --------------------------------------------------------------------------------
#
# What a controller knows of a member.


@dataclass(slots=True)
class KnownMember:
    """The controller's record of a member.

    Attributes:
        iteration: iterations done; ``None`` until it is prepared.
        address: at which other machines reach its machine.
        metrics: of its last iteration, if it ran that itself.
        has_state: whether it has the trial's state, and not only its initial one.
        broken_generation: the last generation that it reported as broken.
    """

    iteration: int | None = None
    address: str = LOOPBACK
    metrics: Any = None
    has_state: bool = False
    broken_generation: int = 0


# -- connections ---------------------------------------------------------------------------------
#
# Which sets of members are connected to each other: the controller's part of the connections that members keep.
#
# Connections are numbered by the generation that they were made for, and tied to ranks: the same members in another
# order need others. Performs no IO.


#: Connections that a member keeps beside those in use. Each one of NCCL takes memory of the GPU.
_MOST_KEPT = 2


class Connections:
    """The connections that are there, and those that are being made for a generation to come.

    Attributes:
        number: of the connections that are being made; 0 if none are.
    """

    def __init__(self) -> None:
        self.number = 0
        #: The members that connect now.
        self._order: tuple[int, ...] = ()
        #: Those that could not connect, and will when a generation is formed.
        self._failed: tuple[int, ...] = ()
        self._store = RendezvousStore()
        #: Members that have not answered yet.
        self._awaited: set[int] = set()
        #: The ranks' members by number; those that were used last come last.
        self._made: dict[int, tuple[int, ...]] = {}

    def find(self, order: tuple[int, ...]) -> int:
        """Returns the number of connections between these members with these ranks; 0 if there are none."""
        return next((number for number, members in self._made.items() if members == order), 0)

    def make(self, number: int, order: tuple[int, ...], addresses: Sequence[str]) -> list[Action]:
        """Has members connect to each other, once before they are used; MembersConnected follows.

        Args:
            number: of the new connections.
            order: the members, by rank.
            addresses: at which each accepts the others' connections.
        """
        if order == self._failed or (self.number and order == self._order):
            return []
        actions = self.drop(lambda other: other != self._order, self._order) if self.number else []
        self.number, self._order, self._awaited, self._store = number, order, set(order), RendezvousStore()
        sends = zip(order, addresses, strict=True)
        return actions + [Send(m, Connect(number, rank, len(order), at)) for rank, (m, at) in enumerate(sends)]

    def receive(self, member: int, message: StorePut | StoreGet | Connected) -> list[Action]:
        """Handles a message about the connections that are being made; ignores those about others."""
        if not self.number or message.generation != self.number:
            return []
        if not isinstance(message, Connected):
            return [*self._store.receive(member, message)]
        if message.problem:
            self._failed = self._order
            return self.drop(lambda order: order != self._order, self._order, message.problem)
        self._awaited.discard(member)
        if self._awaited:
            return []
        self._made[self.number], self.number = self._order, 0
        return [MembersConnected("")]

    def used(self, number: int, order: tuple[int, ...]) -> None:
        """Notes that members are connected, and that these connections are the last ones used."""
        self._made.pop(number, None)
        self._made[number] = order
        self._failed = ()

    def drop(
        self, is_wanted: Callable[[tuple[int, ...]], bool], told: Collection[int], problem: str = ""
    ) -> list[Action]:
        """Forgets connections, also those that are being made, unless their members are wanted.

        Args:
            is_wanted: whether connections between these members may still be used.
            told: the members that are to close them; the others have closed theirs.
            problem: why those that are being made are not wanted any more.
        """
        dropped = {number: order for number, order in self._made.items() if not is_wanted(order)}
        actions: list[Action] = []
        if self.number and not is_wanted(self._order):
            dropped[self.number], self.number = self._order, 0
            actions.append(MembersConnected(problem or "other members are to be connected"))
        return self._close(dropped, told) + actions

    def drop_oldest(self) -> list[Action]:
        """Has members close the connections that were not used for longest, beyond those that they may keep."""
        oldest = dict(list(self._made.items())[: -1 - _MOST_KEPT])
        return self._close(oldest, {member for order in oldest.values() for member in order})

    def _close(self, dropped: dict[int, tuple[int, ...]], told: Collection[int]) -> list[Action]:
        for number in dropped:
            self._made.pop(number, None)
        return [Send(m, Disconnect(number)) for number, order in dropped.items() for m in order if m in told]


# -- controller ----------------------------------------------------------------------------------


class Phase(enum.Enum):
    """What the current generation does."""

    IDLE = "is idle, or does not exist"
    JOINING = "is being joined"
    RUNNING = "is training"
    BREAKING = "waits for its survivors to stop"
    BROKEN = "is broken, and its survivors have stopped"


class ElasticController:
    """Forms the generations of one trial; members are numbers of the caller's choice, such as lane ids.

    Attributes:
        generation: number of the current generation; 0 before the first.
        ranks: its members, rank 0 first.
        iteration: the last iteration that was reported.
        phase: what the generation does.

    Example:
        A trial that starts in one process, member 7:

        >>> from fluid.elastic import ElasticController
        >>> from fluid.elastic.messages import Joined, Prepare, Prepared
        >>> controller = ElasticController()
        >>> [send] = controller.prepare(7, Prepare(trainable=b"", config=b""))
        >>> send.member
        7
        >>> controller.receive(7, Prepared(iteration=0, address="127.0.0.1", seconds=0.1))
        [MemberReady(member=7)]
        >>> [send] = controller.form([7])
        >>> controller.receive(7, Joined(generation=1, iteration=0, metrics=None, seconds=0.1))
        [Formed(generation=1, members=(7,), iteration=0)]
        >>> controller.run(iterations=3)
        [Send(member=7, message=RunMember(generation=1, iterations=3))]
    """

    def __init__(self) -> None:
        self.generation = 0
        self.ranks: tuple[int, ...] = ()
        self.iteration = 0
        self.phase = Phase.IDLE
        self._members: dict[int, KnownMember] = {}
        #: Members of the current generation whose answers its phase still waits for.
        self._awaited: set[int] = set()
        #: The members of the next generation, while the current one only hands its state over.
        self._handover_target: tuple[int, ...] = ()
        self._leaving: list[int] = []
        self._store = RendezvousStore()
        #: Numbers generations, and connections that are made ahead of theirs.
        self._numbers = itertools.count(1)
        self._connections = Connections()
        #: The connections that the current generation uses.
        self._connection = 0
        self._finished = False
        self._reason = ""

    @property
    def members(self) -> tuple[int, ...]:
        """All members that were prepared and have not left."""
        return tuple(self._members)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """The members that are not in the current generation."""
        return tuple(member for member in self._members if member not in self.ranks and member not in self._leaving)

    def is_ready(self, member: int) -> bool:
        """Whether a member can be part of the next :meth:`form`."""
        return member in self._members and self._members[member].iteration is not None

    def is_member(self, member: int) -> bool:
        """Whether it is a member, or is being set up as one."""
        return member in self._members

    @property
    def is_connecting(self) -> bool:
        """Whether members connect to each other for a generation to come."""
        return self._connections.number > 0

    @property
    def survivors(self) -> tuple[int, ...]:
        """The members that have the trial's state, the one to take it from first."""
        return tuple(self._by_seniority())

    # -- requests of the driver ---------------------------------------------------------------------------

    def prepare(self, member: int, message: Any) -> list[Action]:
        """Sets up a newcomer while the others continue.

        Args:
            member: its number.
            message: :class:`fluid.elastic.messages.Prepare`, or another message that it answers by Prepared.

        Raises:
            InvalidFieldError: it is a member already.
        """
        if member in self._members:
            raise InvalidFieldError("member", member, "is a member already")
        self._members[member] = KnownMember()
        return [Send(member, message)]

    def adopt(self, member: int, message: Any) -> list[Action]:
        """Makes a member of the process in which the trial has trained alone and is now idle; it has the state.

        Args:
            member: its number.
            message: makes it a member; answered by Prepared.

        Raises:
            FluidError: the trial has a generation already.
        """
        if self.generation:
            raise FluidError(f"member={member}: a trial in generation {self.generation} cannot be adopted")
        actions = self.prepare(member, message)
        self._members[member].has_state = True
        self.ranks = (member,)
        return actions

    def connect(self, members: Sequence[int]) -> list[Action]:
        """Has the members of the next :meth:`form` connect to each other while the current generation trains.

        MembersConnected follows, unless there is nothing to do: they are connected already, there is one only, or the
        state is to be handed over first.

        Raises:
            InvalidFieldError: as of :meth:`form`.
        """
        order, handover = self._plan(self._require_ready(members))
        if len(order) == 1 or handover or self._connections.find(order):
            return []
        return self._connections.make(next(self._numbers), order, self._addresses(order))

    def form(self, members: Sequence[int]) -> list[Action]:
        """Forms the next generation; members of the current one that are not in it leave.

        Rank 0 keeps its rank if it stays; if not, the first survivor in the set takes it. Survivors come before
        newcomers. If no survivor stays, or if one is ahead of the new rank 0, a generation in between hands the state
        over.

        Raises:
            InvalidFieldError: the set is empty, names a member twice, or names one that is not ready.
            FluidError: the current generation is not idle.
        """
        if self.phase not in (Phase.IDLE, Phase.BROKEN):
            raise FluidError(f"a trial whose generation {self.generation} {self.phase.value} cannot be resized")
        target = self._require_ready(members)
        self._leaving = [member for member in self.ranks if member in self._members and member not in target]
        order, self._handover_target = self._plan(target)
        return self._open(order, self._by_seniority())

    def run(self, iterations: int) -> list[Action]:
        """Runs an idle generation for so many iterations.

        Raises:
            InvalidFieldError: ``iterations`` is less than 1.
            FluidError: there is no idle generation.
        """
        iterations = require_integer("iterations", iterations, at_least=1)
        if self.phase is not Phase.IDLE or not self.ranks:
            raise FluidError(f"iterations={iterations}: the trial's generation {self.generation} {self.phase.value}")
        self.phase, self._awaited, self._finished = Phase.RUNNING, set(self.ranks), False
        return [Send(member, RunMember(self.generation, iterations)) for member in self.ranks]

    def halt(self) -> list[Action]:
        """Stops a trial that runs, at the end of its current iteration; AllHalted follows."""
        return [Send(self.ranks[0], Halt())] if self.phase is Phase.RUNNING else []

    def dismiss(self, member: int) -> list[Action]:
        """Releases a member that was prepared and has not been in any generation.

        Raises:
            InvalidFieldError: it is in the current one.
        """
        if member in self.ranks:
            raise InvalidFieldError("member", member, "is in the current generation")
        if self._members.pop(member, None) is None:
            return []
        return [Send(member, Leave()), *self._drop_connections_of(member)]

    def member_lost(self, member: int) -> list[Action]:
        """Handles the loss of a member's process; ignores unknown members."""
        if self._members.pop(member, None) is None:
            return []
        if member in self._leaving:
            self._leaving.remove(member)
        actions = self._break(f"member {member} is gone") if member in self.ranks else []
        return [*actions, *self._drop_connections_of(member)]

    # -- messages of members-------------------------------------------------------------------------------

    def receive(self, member: int, message: Any) -> list[Action]:
        """Handles a member's message; ignores those of unknown members."""
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
        if isinstance(message, Connected) or (
            isinstance(message, (StorePut, StoreGet)) and message.generation == self._connections.number
        ):
            return self._connections.receive(member, message)
        if message.generation != self.generation or member not in self.ranks:
            return []  # Sent before the member learned that its generation had ended.
        if isinstance(message, (StorePut, StoreGet)):
            return [*self._store.receive(member, message)]
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
                return self._formed() if self.phase is Phase.JOINING else self._all_halted()
        return []

    # -- generations ---------------------------------------------------------------------------------------

    def _by_seniority(self) -> list[int]:
        """Members of the last generation, the one to take the state from first.

        That is rank 0, which has all that was reported. Without rank 0 it is the one with the most iterations: every
        member had finished each iteration before it was reported.
        """
        survivors = [member for member in self.ranks if member in self._members and self._members[member].has_state]
        if survivors and survivors[0] != self.ranks[0]:
            survivors.sort(key=lambda member: -self._iteration_of(member))
        return survivors

    def _iteration_of(self, member: int) -> int:
        iteration = self._members[member].iteration
        assert iteration is not None
        return iteration

    def _require_ready(self, members: Sequence[int]) -> tuple[int, ...]:
        target = tuple(members)
        if not target or len(set(target)) != len(target):
            raise InvalidFieldError("members", target, "must name at least one member, and none twice")
        for member in target:
            if not self.is_ready(member):
                raise InvalidFieldError("members", target, f"member {member} is not ready")
        return target

    def _plan(self, target: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the members of the next generation, and of the one after it if the first hands the state over."""
        survivors = self._by_seniority()
        staying = [member for member in survivors if member in target]
        if survivors and not staying:
            return (survivors[0], *target), target
        newcomers = [member for member in target if member not in staying]
        handover: tuple[int, ...] = ()
        if staying and self.ranks[0] not in staying:
            wanted = [member for member in target if member in staying]
            handover = (*wanted, *newcomers) if wanted[0] != staying[0] else ()
        return (*staying, *newcomers), handover

    def _open(self, order: tuple[int, ...], survivors: list[int]) -> list[Action]:
        self.generation = next(self._numbers)
        self.ranks = order
        self.phase, self._awaited, self._store = Phase.JOINING, set(order), RendezvousStore()
        iterations = {self._iteration_of(member) for member in order}
        sync = len(iterations) > 1 or any(member not in survivors for member in order)
        addresses = self._addresses(order)
        self._connection = self._connections.find(order)
        return [
            Send(member, Join(self.generation, rank, len(order), address, sync, self.iteration, self._connection))
            for rank, (member, address) in enumerate(zip(order, addresses, strict=True))
        ]

    def _addresses(self, order: tuple[int, ...]) -> list[str]:
        """The address at which each member of a generation accepts the others' connections."""
        if len(order) == 1:
            return [""]
        addresses = [self._members[member].address for member in order]
        return addresses if len(set(addresses)) > 1 else [LOOPBACK] * len(order)

    def _formed(self) -> list[Action]:
        self.phase = Phase.IDLE
        actions: list[Action] = []
        first = self.ranks[0]
        iteration = self._iteration_of(first)
        # Rank 0 may have died before it reported an iteration that a survivor has finished.
        if self._members[first].metrics is not None:
            actions += self._report(iteration, self._members[first].metrics, None)
        self.iteration = max(self.iteration, iteration)  # It may start from a checkpoint that another run has reported.
        if len(self.ranks) > 1:
            self._connections.used(self._connection or self.generation, self.ranks)
        if self._handover_target:
            target, self._handover_target = self._handover_target, ()
            return [*actions, *self._open(target, list(self.ranks))]
        for member in self._leaving:
            del self._members[member]
            actions.append(Send(member, Leave()))
        self._leaving = []
        # A member that leaves, or that trains alone, has closed all of its connections.
        there = self._members.keys() if len(self.ranks) > 1 else self._members.keys() - self.ranks
        actions += self._connections.drop(lambda order: there >= set(order), told=there)
        actions += self._connections.drop_oldest()
        return [*actions, Formed(self.generation, self.ranks, iteration)]

    def _report(self, iteration: int, metrics: Any, seconds: float | None) -> list[Action]:
        if iteration <= self.iteration:
            return []  # Repeated from an older checkpoint.
        self.iteration = iteration
        return [Reported(iteration, metrics, len(self.ranks), seconds)]

    def _all_halted(self) -> list[Action]:
        self.phase = Phase.IDLE
        return [AllHalted(self._iteration_of(self.ranks[0]), self._finished)]

    def _break(self, reason: str) -> list[Action]:
        """Aborts the generation, and waits until its remaining members have stopped."""
        actions: list[Action] = []
        awaited = [m for m in self.ranks if m in self._members and self._members[m].broken_generation < self.generation]
        if self.phase not in (Phase.BREAKING, Phase.BROKEN):
            self.phase, self._reason, self._handover_target = Phase.BREAKING, reason, ()
            actions += [Send(member, Abort(self.generation)) for member in awaited]
            # The members close all of theirs.
            actions += self._connections.drop(lambda order: False, self.newcomers, reason)
        if awaited:
            return actions
        self.phase = Phase.BROKEN
        # A member that was about to leave still has the state, and may be the only one.
        self.ranks += tuple(member for member in self._leaving if member not in self.ranks)
        self._leaving = []
        return [*actions, Collapsed(self.generation, self.survivors, self._reason)]

    def _drop_connections_of(self, member: int) -> list[Action]:
        return self._connections.drop(lambda order: member not in order, self._members, f"member {member} is gone")
