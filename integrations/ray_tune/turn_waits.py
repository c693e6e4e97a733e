"""The waits of Tune's controller for the engine, on a real clock and on a rehearsal's."""

from __future__ import annotations

from typing import Any

from fluid._clock import nap
from fluid.executor import FluidExecutor
from fluid.integrations.inbox import EventInbox
from fluid.integrations.ray_tune.private_api import seconds_left_of
from fluid.integrations.ray_tune.virtual_time import clock_of, is_rehearsed

#: Real seconds between two looks of a controller that waits where nothing is left to happen on a virtual clock.
_IDLE_S = 0.01


class TurnWaits:
    """Waits of one controller.

    In a rehearsal, the controller is given events once all that happens at an instant has happened. What it is given at
    which of its turns, and so what it decides, is then the same in each rehearsal. The clock stops where a time budget
    ends.

    Args:
        executor: runs the sweep.
        controller: Tune's.
        inbox: the events.

    Attributes:
        are_virtual: whether they are on a rehearsal's clock.
        clock: by which the controller's turn comes.
    """

    def __init__(self, executor: FluidExecutor, controller: Any, inbox: EventInbox) -> None:
        self._controller, self._inbox = controller, inbox
        self.are_virtual = is_rehearsed(executor)
        self.clock = clock_of(executor)
        #: How many waits have ended in a row as nothing was left to happen.
        self._idle = 0

    def look(self) -> None:
        """Handles the events that are there."""
        if not self.are_virtual:
            self._inbox.deliver()

    def wait(self, timeout: float | None) -> bool:
        """Waits for events and handles them; returns whether there were any.

        Args:
            timeout: longest wait on a real clock, seconds; ``None`` for no limit.
        """
        if not self.are_virtual:
            return self._inbox.deliver(timeout, polls=True)
        left = seconds_left_of(self._controller)
        # The controller has looked again at a standstill, and nothing came of it: its time budget is all that is left.
        polls = self._idle == 0 or left is None
        if self._idle > 1:
            nap(_IDLE_S)
        found = self._inbox.deliver_settled(left, polls=polls)
        self._idle = 0 if found else self._idle + 1
        return found
