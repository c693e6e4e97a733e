"""What looks at folders again and again, in a thread of its own, while a page listens."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from fluid.errors import FluidError
from fluid.waiting.waits import BackgroundThread

#: Seconds to wait for a look to end. It may take several, and what it finds is not needed.
_PATIENCE = 0.5


class Versioned(Protocol):
    """What was seen last; each newer one has a greater version."""

    @property
    def version(self) -> int: ...


S = TypeVar("S", bound=Versioned)


class Follower(Generic[S]):
    """Looks at folders at a bounded cost. A derived class says what a look is.

    Args:
        name: of the thread.
        state: what was seen first.
        least_pause: seconds between two looks, at least.
        share: the share of one core that looks may take.
    """

    #: Seconds that the newest look took; the first one is before the thread begins.
    _cost = 0.0

    def __init__(self, name: str, state: S, least_pause: float, share: float) -> None:
        self._changed = threading.Condition()
        self._listeners = 0
        self._closed = self._at_once = False
        self._least_pause, self._share = least_pause, share
        self._state = state
        self._thread = BackgroundThread(name, self._follow)
        self._thread.start()

    @property
    def state(self) -> S:
        """What was seen last."""
        return self._state

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def has_listeners(self) -> bool:
        """Whether a page listens."""
        with self._changed:
            return self._listeners > 0

    def next_after(self, version: int, timeout: float) -> S | None:
        """Waits for a state that is newer than ``version``; ``None`` if there is none after ``timeout`` seconds.

        As long as a thread waits here, the folders are looked at.
        """
        with self._changed:
            self._listeners += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._closed or self._state.version > version, timeout)
            finally:
                self._listeners -= 1
            return self._state if self._state.version > version else None

    def look_soon(self) -> None:
        """Has it look at once."""
        with self._changed:
            self._at_once = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the following, and the waiting of all threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_PATIENCE)

    def _look(self) -> None:
        """Publishes what is new.

        Raises:
            FluidError: a folder is being removed or replaced. The page keeps what it has.
        """
        raise NotImplementedError

    def _publish(self, state: S) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _follow(self) -> None:
        while self._wait():
            try:
                self._look()
            except FluidError:
                continue

    def _wait(self) -> bool:
        """Waits until the folders may be looked at once more; returns whether the following goes on."""
        with self._changed:
            pause = max(self._least_pause, self._cost / self._share)
            self._changed.wait_for(lambda: self._closed or self._at_once, pause)
            self._changed.wait_for(lambda: self._closed or self._at_once or self._listeners > 0)
            self._at_once = False
            return not self._closed
