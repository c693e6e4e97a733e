"""The members of a population advance evenly where there are fewer devices than members."""

from __future__ import annotations

from collections.abc import Callable


class EvenPace:
    """Keeps members back that are ahead of others which wait for a device.

    A lane takes time to start, and meanwhile those whose lanes are there would run far ahead, and be copied by all
    others. No member waits for one that runs, however slow it is.

    Example:
        >>> from fluid.sweeping.even_pace import EvenPace
        >>> pace = EvenPace(4, lambda member: print("member", member, "goes on"))
        >>> pace.waits(0, 0), pace.waits(1, 0), pace.runs(0)
        (None, None, None)
        >>> pace.may_go(0, 4), pace.runs(0), pace.may_go(0, 8)
        (True, None, False)
        >>> pace.runs(1)
        member 0 goes on

    Args:
        lead: iterations by which a member may be ahead of one that waits.
        go: lets a member go on that was kept back.
    """

    def __init__(self, lead: int, go: Callable[[int], None]) -> None:
        self._lead = lead
        self._go = go
        #: Iterations done by those that wait for a device, and by those that are kept back.
        self._waiting: dict[int, int] = {}
        self._kept: dict[int, int] = {}

    def waits(self, member: int, iteration: int) -> None:
        """A member waits for a device from now on."""
        self._waiting[member] = iteration

    def may_go(self, member: int, iteration: int) -> bool:
        """Whether a member that has come so far may go on now, so that it waits for a device; else it is kept back."""
        if any(done + self._lead < iteration for done in self._waiting.values()):
            self._kept[member] = iteration
            return False
        self.waits(member, iteration)
        return True

    def runs(self, member: int) -> None:
        """A member runs, or has ended; others may go on now."""
        if self._waiting.pop(member, None) is None:
            return
        for kept, iteration in sorted(self._kept.items(), key=lambda item: item[1]):
            del self._kept[kept]
            if self.may_go(kept, iteration):
                self._go(kept)
