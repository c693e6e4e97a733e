"""What backends can do, too, whose lanes take a while to end."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from fluid.backends.base import Backend
from fluid.engine.events import Event


@runtime_checkable
class EndingBackend(Backend, Protocol):
    """A backend whose lanes may finish iterations, or have finished some, as the session ends."""

    def end(self) -> list[Event]:
        """Ends every lane, and waits a while for those that run an iteration; only :meth:`close` is called after it.

        Returns:
            The events since the last :meth:`poll`, in order of time: iterations that were finished count.
        """
        ...
