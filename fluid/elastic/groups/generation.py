"""Whether the generation of a trial's members is broken, for all threads of a member."""

from __future__ import annotations

import threading

from fluid.errors import FluidError


class GenerationBrokenError(FluidError):
    """A member of the generation failed, or the controller aborted it; the survivors continue in a new one.

    Example:
        A trainable may catch it to clean up, and must raise it again:

        >>> from fluid.elastic import GenerationBrokenError
        >>> from fluid.errors import FluidError
        >>> issubclass(GenerationBrokenError, FluidError)
        True
    """


class GenerationGuard:
    """Records, across threads, which generation is current and whether it is broken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        #: All generations up to this one are broken: an abort may come before its generation is configured.
        self._broken = -1
        self._waiting: threading.Event | None = None

    def start(self, generation: int) -> None:
        """Makes a generation the current one."""
        with self._lock:
            self._generation = generation

    def break_(self, generation: int | None = None) -> None:
        """Breaks a generation, by default the current one, and wakes the thread that waits in it."""
        with self._lock:
            self._broken = max(self._broken, self._generation if generation is None else generation)
            if self._is_broken() and self._waiting is not None:
                self._waiting.set()

    @property
    def is_broken(self) -> bool:
        """Whether the current generation is broken."""
        with self._lock:
            return self._is_broken()

    def check(self) -> None:
        """Raises GenerationBrokenError if the current generation is broken."""
        if self.is_broken:
            raise GenerationBrokenError(f"generation {self._generation} was aborted")

    def event(self) -> threading.Event:
        """Returns a new event to wait for, which is also set if the generation breaks."""
        with self._lock:
            self._waiting = threading.Event()
            if self._is_broken():
                self._waiting.set()
            return self._waiting

    def _is_broken(self) -> bool:
        return self._generation <= self._broken
