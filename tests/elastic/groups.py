"""Real process groups whose members are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fluid.elastic.torch_group import TorchGroup


def make_groups(size: int, generation: int = 1, backend: str = "gloo") -> list[TorchGroup]:
    """Groups that have met."""
    groups = [TorchGroup("cpu", backend) for _ in range(size)]
    meet(groups, generation)
    return groups


def meet(groups: list[TorchGroup], generation: int) -> None:
    rendezvous = groups[0].open_rendezvous("127.0.0.1", generation, len(groups))
    together(groups, lambda group: group.configure(rendezvous, generation, groups.index(group), len(groups)))


def together(groups: list[Any], call: Callable[[Any], Any]) -> list[Any]:
    """What each member's call gives; an exception is a result, too."""

    def attempt(group: Any) -> Any:
        try:
            return call(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(attempt, groups))
