"""The interface of a backend on a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from fluid._clock_hold import ClockHold
from fluid.backends.base import Backend


@runtime_checkable
class VirtualBackend(Backend, Protocol):
    """A backend whose clock is virtual, and stands still while a thread holds it: :mod:`fluid._clock_hold`."""

    @property
    def hold(self) -> ClockHold:
        """Who holds the clock."""
        ...


@runtime_checkable
class ReplayingBackend(VirtualBackend, Protocol):
    """One that replays trials: no code of theirs runs."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What ``session.json`` says of that."""
        ...

    def require_replayable(self, trainable: Any) -> None:
        """Refuses a trainable whose trials cannot be replayed; from any thread.

        Raises:
            InvalidFieldError: it is one.
        """
        ...

    @property
    def pays_to_pack(self) -> bool:
        """Whether it is known that two trials on one device end sooner than one after the other."""
        ...
