"""Waiting for lanes, for their launcher and for a wake-up from another thread, all at once."""

from __future__ import annotations

import os
import selectors
from contextlib import suppress
from typing import Any, NamedTuple, Protocol


class Watched(Protocol):
    """Something with a descriptor."""

    @property
    def wants_to_write(self) -> bool:
        """Whether to tell also when it becomes writable."""
        ...

    def fileno(self) -> int:
        """Its descriptor; -1 while it has none."""
        ...


class Ready(NamedTuple):
    """Something that can be read from or written to; ``key`` is what it was put in under."""

    key: Any
    readable: bool
    writable: bool


class WakeableSelector:
    """A set of descriptors to wait on, and a way to end the waiting."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._reader, selectors.EVENT_READ)
        #: Descriptor and events registered, by key.
        self._known: dict[Any, tuple[int, int]] = {}

    def watch(self, key: Any, watched: Watched) -> None:
        """Puts something in, or notes that its descriptor, or what it waits for, has changed."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if watched.wants_to_write else 0)
        wanted = (watched.fileno(), events)
        if self._known.get(key) == wanted:
            return
        self.drop(key)
        if wanted[0] >= 0:
            self._selector.register(wanted[0], events, (key,))
            self._known[key] = wanted

    def drop(self, key: Any) -> None:
        """Takes something out, before or after its descriptor was closed; it need not be there."""
        known = self._known.pop(key, None)
        if known is not None:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(known[0])

    def wait(self, seconds: float | None) -> tuple[list[Ready], bool]:
        """Waits once; returns what is ready, and whether :meth:`wake` was called."""
        ready = []
        woken = False
        for key, mask in self._selector.select(seconds):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(self._reader, 4096)
                woken = True
            else:
                ready.append(Ready(key.data[0], bool(mask & selectors.EVENT_READ), bool(mask & selectors.EVENT_WRITE)))
        return ready, woken

    def wake(self) -> None:
        """Ends the waiting, in progress or the next; may be called from any thread, also after the end."""
        with suppress(OSError):  # The pipe is full: it is awake. Or closed: nobody waits.
            os.write(self._writer, b"x")

    def close(self) -> None:
        """Closes what is its own."""
        self._selector.close()
        # Closed last and not reused by wake(), which may run in another thread at this moment.
        reader, writer, self._reader, self._writer = self._reader, self._writer, -1, -1
        os.close(reader)
        os.close(writer)
