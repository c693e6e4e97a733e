"""Which sets of members are connected to each other: the controller's part of the connections that members keep.

Connections are numbered by the generation that they were made for, and tied to ranks: the same members in another order
need others. Performs no IO.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from fluid.elastic.actions import Action, MembersConnected, Send
from fluid.elastic.messages import Connect, Connected, Disconnect, StoreGet, StorePut
from fluid.elastic.rendezvous import RendezvousStore

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
