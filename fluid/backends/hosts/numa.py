"""Pins the lanes of a GPU to the CPU cores of its NUMA node, from which memory and the GPU are reached fastest."""

from __future__ import annotations

from collections.abc import Sequence

from fluid.gpu.nvml import cpu_cores
from fluid.resources import available_cores


class NumaCores:
    """The cores to which lanes are pinned. Nothing is pinned if a core would then serve no GPU, or all serve each.

    Args:
        tokens: UUIDs of the GPUs in use on this machine.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        available = set(available_cores())
        near = {token: available.intersection(cpu_cores(token)) for token in tokens}
        is_split = set().union(*near.values()) == available and any(cores != available for cores in near.values())
        self._near = near if is_split and all(near.values()) else {}

    def near(self, token: str) -> tuple[int, ...]:
        """Returns the cores of a lane's GPUs, UUIDs divided by commas; none for no pinning."""
        sets = [self._near.get(name, set()) for name in token.split(",")]
        return tuple(sorted(set().union(*sets))) if all(sets) else ()
