"""The interface of a backend on a virtual clock."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from fluid._clock_hold import ClockHold
from fluid.backends.base import Backend


@runtime_checkable
class VirtualBackend(Backend, Protocol):
    """A backend whose clock is virtual, and stands still while a thread holds it: :mod:`fluid._clock_hold`."""

    @property
    def hold(self) -> ClockHold:
        """Who holds the clock."""
        ...
