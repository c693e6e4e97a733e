"""A queue between the session's thread and one that submits: to wait for it is to wait for the session."""

from __future__ import annotations

import queue
from typing import Generic, TypeVar

from fluid.waiting.clock_hold import NO_HOLD, ClockHold, Place, VirtualClockHold

Item = TypeVar("Item")


class HeldQueue(Generic[Item]):
    """A queue of any number of threads that put and one that gets.

    Args:
        hold: of the session's clock.
    """

    def __init__(self, hold: ClockHold = NO_HOLD) -> None:
        self._hold = hold
        self._place = Place()
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Puts an item; never waits."""
        self._items.put(item)
        self._hold.wake(self._place)

    def get(self, timeout: float | None, *, polls: bool = False) -> Item:
        """Takes the first item.

        Args:
            timeout: seconds to wait for one at most, of the session's clock; ``None`` for no limit.
            polls: whether the timeout is only how often the caller looks at something else. A virtual clock does not
                stop for that: the wait then lasts until there is an item, or nothing is left to happen.

        Raises:
            queue.Empty: there is none.
        """
        if timeout == 0.0:
            return self._items.get_nowait()
        if not isinstance(self._hold, VirtualClockHold) or self._hold.is_over:
            return self._items.get(timeout=timeout)
        limit = None if polls else timeout
        self._hold.wait_until(lambda: not self._items.empty(), self._place, limit, polls=polls)
        return self._items.get_nowait()

    def get_settled(self, timeout: float | None, *, polls: bool = False) -> list[Item]:
        """Waits for an item, and until all has happened that happens at that instant of a virtual clock.

        Args:
            timeout: seconds to wait at most, of the session's clock; ``None`` for no limit.
            polls: whether the wait also ends where nothing is left to happen on the virtual clock.

        Returns:
            All items then; none where the wait has ended without one.
        """
        assert isinstance(self._hold, VirtualClockHold)
        self._hold.wait_settled(lambda: not self._items.empty(), self._place, timeout, polls=polls)
        return [self._items.get_nowait() for _ in range(self._items.qsize())]

    def empty(self) -> bool:
        """Whether there is no item."""
        return self._items.empty()
