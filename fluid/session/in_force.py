"""Which executor is in force: the one that :func:`fluid.submit_trialgroup` uses.

That is the innermost ``with`` block of the calling thread or task (a context variable holds it); else the innermost
block of the process, so that worker threads of a block's owner submit to that block's executor; else the default one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class InForce(Generic[T]):
    """The executors in force in one process.

    Args:
        is_closed: whether one was closed. One that was drained stays in force, and refuses what it is given.

    Attributes:
        lock: held while one is made or looked for, so that two threads do not make two default ones.
    """

    def __init__(self, is_closed: Callable[[T], bool]) -> None:
        self._is_closed = is_closed
        self.lock = threading.RLock()
        #: Blocks that this thread or task is in, the innermost last. A task starts with those of the one that made it.
        self._entered_here: ContextVar[tuple[T, ...]] = ContextVar("fluid_executors", default=())
        #: Blocks that any thread of the process is in, the latest last.
        self._entered: list[T] = []
        #: The default executor, while there is one.
        self._default: list[T] = []

    def enter(self, executor: T) -> None:
        """Puts an executor in force for the block that begins."""
        self._entered_here.set((*self._entered_here.get(), executor))
        with self.lock:
            self._entered.append(executor)

    def make_default(self, executor: T) -> None:
        """Makes an executor the one in force outside all blocks."""
        with self.lock:
            self._default.append(executor)

    def leave(self, executor: T) -> None:
        """Takes a closed executor out of force; other contexts skip it as it is closed."""
        with self.lock:
            for stack in (self._entered, self._default):
                stack[:] = [other for other in stack if other is not executor]
        self._entered_here.set(tuple(other for other in self._entered_here.get() if other is not executor))

    def find(self) -> T | None:
        """Returns the executor in force; ``None`` if there is none."""
        with self.lock:
            candidates = [*self._default, *self._entered, *self._entered_here.get()]
        return next((executor for executor in reversed(candidates) if not self._is_closed(executor)), None)

    def has(self, executor: T) -> bool:
        """Whether an executor is the default one, or in a ``with`` block of any thread."""
        with self.lock:
            return any(other is executor for other in (*self._default, *self._entered))
