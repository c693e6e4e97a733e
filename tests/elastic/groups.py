"""Real process groups whose members are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fluid.elastic.groups.generation import GenerationBrokenError
from fluid.elastic.groups.rendezvous import Rendezvous, RendezvousStore
from fluid.elastic.groups.torch_group import TorchGroup
from fluid.elastic.messages import LOOPBACK


class Controller:
    """Keeps the store of one generation, as the driver does."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.store = RendezvousStore()
        #: Sends a rank a message.
        self.send: dict[int, Callable[[Any], None]] = {}
        self._lock = threading.Lock()

    def receive(self, rank: int, message: Any) -> None:
        with self._lock:
            for answer in self.store.receive(rank, message):
                self.send[answer.member](answer.message)

    def rendezvous(self, rank: int) -> Rendezvous:
        """The store as a member sees it, in this process."""
        made = Rendezvous(self.generation, LOOPBACK, lambda message: self.receive(rank, message))
        self.send[rank] = made.receive
        return made


def make_groups(size: int, generation: int = 1, backend: str = "gloo") -> list[TorchGroup]:
    """Groups that have met."""
    groups = [TorchGroup("cpu", backend) for _ in range(size)]
    meet(groups, generation)
    return groups


def meet(groups: list[TorchGroup], generation: int) -> list[Any]:
    controller = Controller(generation)

    def configure(group: TorchGroup) -> None:
        rank = groups.index(group)
        try:
            group.configure(controller.rendezvous(rank), rank, len(groups))
        except GenerationBrokenError:
            for other in groups:
                other.abort(generation)
            raise

    return together(groups, configure)


def together(groups: list[Any], call: Callable[[Any], Any]) -> list[Any]:
    """What each member's call gives; an exception is a result, too."""

    def attempt(group: Any) -> Any:
        try:
            return call(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(attempt, groups))
