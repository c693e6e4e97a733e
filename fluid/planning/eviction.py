"""Which checkpoints leave a host's memory when there is too little of it (docs/theory.md, section 18). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class InMemory(NamedTuple):
    """A checkpoint in a host's memory.

    Attributes:
        key: what names it.
        bytes: that it takes.
        returns: probability that its trial is restored from it.
        saved_s: seconds by which that is faster from memory than from disk.
        pinned: whether it stays as long as others that are not pinned can go.
        used: when it was written or read last, in any unit.
    """

    key: str
    bytes: float
    returns: float
    saved_s: float = 1.0
    pinned: bool = False
    used: float = 0.0

    @property
    def worth(self) -> float:
        """Seconds that a byte of it saves, in the mean."""
        return self.returns * self.saved_s / max(self.bytes, 1.0)


def evictions(held: Iterable[InMemory], excess: float) -> list[str]:
    """Returns what leaves, so that so many bytes become free: what is worth least per byte first, pinned ones last.

    Of those that are worth the same the one that was used least recently goes first.

    Example:
        >>> from fluid.planning.eviction import InMemory, evictions
        >>> evictions([InMemory("a", 4.0, returns=0.9), InMemory("b", 4.0, returns=0.1)], excess=3.0)
        ['b']
    """
    leaving: list[str] = []
    for one in sorted(held, key=lambda one: (one.pinned, one.worth, one.used, one.key)):
        if excess <= 0.0:
            break
        leaving.append(one.key)
        excess -= one.bytes
    return leaving
