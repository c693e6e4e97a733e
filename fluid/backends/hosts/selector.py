"""Waits for several descriptors, and can be woken from any thread."""

from __future__ import annotations

import os
import selectors
from contextlib import suppress
from typing import Any, NamedTuple, Protocol


class Watched(Protocol):
    """Something with a descriptor."""

    @property
    def wants_to_write(self) -> bool:
        """Whether to wait also until it becomes writable."""
        ...

    def fileno(self) -> int:
        """Its descriptor; -1 while it has none."""
        ...


class ReadyDescriptor(NamedTuple):
    """A descriptor that can be read from or written to; ``key`` names it."""

    key: Any
    readable: bool
    writable: bool


class WakeableSelector:
    """A set of descriptors to wait on, and a way to end the waiting."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._reader, selectors.EVENT_READ)
        #: Descriptor and events registered, by key.
        self._known: dict[Any, tuple[int, int]] = {}

    def watch(self, key: Any, watched: Watched) -> None:
        """Adds a descriptor, or updates it after it, or what to wait for, has changed."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if watched.wants_to_write else 0)
        wanted = (watched.fileno(), events)
        if self._known.get(key) == wanted:
            return
        self.drop(key)
        if wanted[0] >= 0:
            self._selector.register(wanted[0], events, (key,))
            self._known[key] = wanted

    def drop(self, key: Any) -> None:
        """Removes a descriptor, before or after it was closed; it need not be there."""
        known = self._known.pop(key, None)
        if known is not None:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(known[0])

    def wait(self, seconds: float | None) -> tuple[list[ReadyDescriptor], bool]:
        """Waits once; returns what is ready, and whether :meth:`wake` was called."""
        ready = []
        woken = False
        for key, mask in self._selector.select(seconds):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(self._reader, 4096)
                woken = True
            else:
                can_read, can_write = bool(mask & selectors.EVENT_READ), bool(mask & selectors.EVENT_WRITE)
                ready.append(ReadyDescriptor(key.data[0], can_read, can_write))
        return ready, woken

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`wait` would return at once."""
        return self._selector.fileno()

    def wake(self) -> None:
        """Ends the waiting, in progress or the next; may be called from any thread, also after the end."""
        with suppress(OSError):  # The pipe is full: poll() will return. Or closed: the pool is.
            os.write(self._writer, b"x")

    def close(self) -> None:
        """Closes the selector and its pipe."""
        self._selector.close()
        # Closed last: wake() may run in another thread at this moment, and must not write to a descriptor used again.
        reader, writer, self._reader, self._writer = self._reader, self._writer, -1, -1
        os.close(reader)
        os.close(writer)
