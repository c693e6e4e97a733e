"""What decides how many devices a session holds: a deadline or a budget if there is one, else what waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fluid._logs import logger_of
from fluid.backends.base import Backend, ScalingLimits
from fluid.engine.commands import Command, NoteDeviceLost
from fluid.engine.events import DeviceAdded, DeviceDraining, Event
from fluid.policies.drains import SAVING_S
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.session.scaling.sizing import DeviceSizing
from fluid.sizing.goals import Goals

# -- autoscaling ---------------------------------------------------------------------------------
#
# Autoscaling: when a session asks for further devices, and which idle ones it gives back.
#
# The policy is :class:`Scaling`, without a clock; :class:`Autoscaler` applies it to an engine and a backend.


_log = logger_of(__name__)

#: Seconds for which the demand has to be above or below what was asked for until that is changed: a rung that ends,
#: or trials that are being narrowed, make others wait for a moment only, and a node takes minutes to start.
SETTLED_S = 5.0
#: Least seconds between two looks at devices that are not idle for long yet.
_LOOK_S = 1.0


class Scaling:
    """Decides how many devices a session is to hold. Pure: times come in as seconds on the clock of the events.

    Args:
        limits: how far it may scale.

    Attributes:
        asked: devices, in all, that were asked for; 0 if none is missing.
    """

    def __init__(self, limits: ScalingLimits) -> None:
        self._limits = limits
        self.asked = 0
        #: Since when the demand differs from what was asked for, and whether it is above; ``None`` while it does not.
        self._differs: tuple[float, bool] | None = None
        #: What it was since then, closest to what was asked for.
        self._closest = 0
        #: When idle devices are to be looked at next; ``None`` while no device was taken later.
        self._look_at: float | None = None

    @property
    def wake_at(self) -> float | None:
        """When to decide again though nothing has happened; ``None`` for never."""
        settled_at = None if self._differs is None else self._differs[0] + SETTLED_S
        times = [at for at in (settled_at, self._look_at) if at is not None]
        return min(times, default=None)

    def decide(self, now: float, held: int, demand: int) -> int:
        """Decides how many devices to ask for, in all; 0 for none beyond those held.

        The answer follows the demand once that has been above or below it for :data:`SETTLED_S`.

        Args:
            now: the time.
            held: devices in use.
            demand: devices that could be used beyond those.
        """
        most = self._limits.autoscale
        if most is None:
            return 0
        wanted, asked = max(held, min(held + demand, most)), max(held, self.asked)
        self.asked = asked if asked > held else 0
        if wanted == asked:
            self._differs = None
            return self.asked
        above = wanted > asked
        if self._differs is None or self._differs[1] is not above:
            self._differs, self._closest = (now, above), wanted
        self._closest = min(self._closest, wanted) if above else max(self._closest, wanted)
        if now >= self._differs[0] + SETTLED_S:
            self.asked, self._differs = (self._closest if self._closest > held else 0), None
        return self.asked

    def devices_changed(self, now: float) -> None:
        """Looks at idle devices again in time, as a device was taken."""
        timeout = self._limits.idle_timeout_s
        if timeout is not None and self._look_at is None:
            self._look_at = now + timeout

    def idle(
        self, now: float, later: Collection[int], idle_since: Mapping[int, float], *, trials_wait: bool
    ) -> list[int]:
        """Returns the devices that have been idle for too long; none while trials wait.

        Args:
            now: the time.
            later: the devices that may be given back.
            idle_since: since when each idle device is idle.
            trials_wait: whether a trial waits that any device will do for, such as one that needs more memory than the
                idle devices have left.
        """
        timeout = self._limits.idle_timeout_s
        if timeout is None or self._look_at is None or now < self._look_at:
            return []
        if not later:
            self._look_at = None
            return []
        ends = {device: idle_since[device] + timeout for device in later if device in idle_since}
        # A device that falls idle from now on is not due before this time.
        self._look_at = min((at for at in ends.values() if at > now), default=now + max(timeout, _LOOK_S))
        return [] if trials_wait else [device for device, at in ends.items() if at <= now]


class Autoscaler:
    """Keeps a session's devices within its limits, by its demand.

    Args:
        state: the engine.
        backend: what gives devices.
        limits: how far the session may scale.
        first: the devices that the session began with, which stay.
        handle: gives the engine an event.
    """

    def __init__(
        self,
        state: EngineState,
        backend: Backend,
        limits: ScalingLimits,
        first: Iterable[Device],
        handle: Callable[[Event], None],
    ) -> None:
        self._state = state
        self._backend = backend
        self._handle = handle
        self._limits = limits
        self._scaling = Scaling(limits)
        self._first = {device.index for device in first}
        #: Devices taken later.
        self._later: set[int] = set()
        #: What the backend was told: devices asked for, and held then.
        self._told = (0, 0)

    @property
    def most(self) -> int:
        """Most devices that the session may come to hold."""
        return max(len(self._state.occupancy), self._limits.autoscale or 0)

    @property
    def asked(self) -> int:
        """Devices that were asked for and have not come."""
        return max(0, self._scaling.asked - len(self._state.occupancy))

    def heard(
        self,
        events: Iterable[Event],
        commands: Sequence[Command],
        is_given_back: Callable[[int], bool],
    ) -> None:
        """Takes note of devices that came, and gives the backend those back that the engine gave up.

        Args:
            events: what happened.
            commands: what the engine decided.
            is_given_back: whether another part gives a device back.
        """
        for event in events:
            if isinstance(event, DeviceAdded) and event.device.index not in self._first:
                self._later.add(event.device.index)
                self._scaling.devices_changed(event.at)
        for command in commands:
            if isinstance(command, NoteDeviceLost) and command.device_id in self._later:
                self._later.remove(command.device_id)
                if not is_given_back(command.device_id):
                    self._backend.give_back(command.device_id)

    def act(self, now: float) -> float | None:
        """Asks for devices and gives idle ones back; returns when to be called again at the latest, if ever."""
        demand, held = self._state.demand, len(self._state.occupancy)
        asked = self._scaling.decide(now, held, demand.devices)
        told = (asked, held) if asked else (0, 0)
        if told != self._told:
            if asked != self._told[0]:
                _log.info("%d devices are held, and %d asked for beyond them", held, max(0, asked - held))
            self._told = told
            self._backend.ask(asked)
        for device in self._scaling.idle(now, self._later, demand.idle_since, trials_wait=demand.trials_wait):
            if demand.may_give_back(device):
                _log.info("device %d has been idle for long, and is given back", device)
                self._handle(DeviceDraining(now, device, now + SAVING_S))
        return self._scaling.wake_at


def make_autoscaler(
    state: EngineState, backend: Backend, first: Iterable[Device], handle: Callable[[Event], None]
) -> Autoscaler | None:
    """Returns what scales a session, and tells the engine how far; ``None`` if its backend cannot, or is not to."""
    limits = backend.scaling_limits
    if limits is None or limits.is_off:
        return None
    state.set_most_devices(limits.autoscale or 0)
    return Autoscaler(state, backend, limits, first, handle)


# -- batches -------------------------------------------------------------------------------------
#
# Which events of a backend the engine is given together, and when it is to hear next.


#: Events of a backend that the engine may refuse.
_CHECKED = frozenset({DeviceAdded, DeviceDraining})


def apart(events: list[Event]) -> list[list[Event]]:
    """Splits events where devices come or drain: the engine checks those against what earlier calls have changed."""
    if _CHECKED.isdisjoint(map(type, events)):
        return [events]
    kinds = itertools.groupby(events, key=lambda event: type(event) if type(event) in _CHECKED else None)
    return [list(together) for _, together in kinds]


def earlier(first: float | None, second: float | None) -> float | None:
    """The earlier of two times, or the shorter of two waits; ``None`` sets no limit."""
    return second if first is None else first if second is None else min(first, second)


# -- device scaling ------------------------------------------------------------------------------


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
