"""What decides how many devices a session holds: a deadline or a budget if there is one, else what waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fluid.backends.base import Backend
from fluid.engine.commands import Command
from fluid.engine.engine import EngineState
from fluid.engine.events import Event
from fluid.resources import Device
from fluid.session.autoscaling import Autoscaler, make_autoscaler
from fluid.session.batches import earlier
from fluid.session.sizing import DeviceSizing
from fluid.sizing.goals import Goals


class DeviceScaling:
    """Scales a session. For the session's thread.

    Args:
        state: the engine.
        backend: what gives devices.
        handle: gives the engine an event.
        goals: of the session.
        began: when it began, seconds on the clock of the events.
        finish: saves all trials and ends the session: called with why, and the seconds that there are for it.

    Attributes:
        sizing: follows deadlines and the budget.
    """

    def __init__(
        self,
        state: EngineState,
        backend: Backend,
        handle: Callable[[Event], None],
        goals: Goals,
        began: float,
        finish: Callable[[str, float], None],
    ) -> None:
        self.sizing = DeviceSizing(state, backend, handle, goals, began=began, finish=finish)
        self._state = state
        self._backend = backend
        self._handle = handle
        self._autoscaler: Autoscaler | None = None

    def begin(self, devices: Sequence[Device]) -> None:
        """Called once, with the devices that the session begins with."""
        self._autoscaler = make_autoscaler(self._state, self._backend, devices, self._handle)
        self.sizing.held.begin(len(devices))

    @property
    def most(self) -> int:
        """Most devices that the session may come to hold."""
        if self.sizing.rules or self.sizing.held.are_missing:
            return self.sizing.held.most
        return len(self._state.occupancy) if self._autoscaler is None else self._autoscaler.most

    @property
    def asked(self) -> int:
        """Devices that were asked for and have not come."""
        asked = self.sizing.held.asked
        return asked if self.sizing.rules or self._autoscaler is None else max(asked, self._autoscaler.asked)

    def heard(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Takes note of what has happened, and gives devices back that the engine gave up."""
        if self._autoscaler is not None:
            self._autoscaler.heard(events, commands, is_given_back=self.sizing.held.gives_back)
        self.sizing.heard(events, commands)

    def act(self, now: float) -> float | None:
        """Asks for devices and gives some back; returns when to be called again at the latest, if ever."""
        at = self.sizing.act(now)
        if self._autoscaler is None or self.sizing.rules or self.sizing.held.are_lent:
            return at
        return earlier(at, self._autoscaler.act(now))
