"""The devices that a session holds: those that are not needed retire and are given back, missing ones are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median_low

from fluid._logs import logger_of
from fluid.backends.base import Backend
from fluid.engine.commands import Command, NoteDeviceLost
from fluid.engine.events import DeviceAdded, DeviceDraining, DeviceRetained, DeviceRetiring, Event
from fluid.engine.records import TrialRecord
from fluid.policies.engine import EngineState

#: Latest provisions of devices of which the median is expected of the next one.
_PROVISIONS = 9
#: Seconds for trials to leave devices that are lent. Those that cannot be saved end there.
_LEAVE_S = 86_400.0
_log = logger_of(__name__)


class HeldDevices:
    """Brings the devices of a session to a number. For the session's thread.

    Args:
        state: the engine.
        backend: what gives devices.
        handle: gives the engine an event.

    Attributes:
        asked: devices that were asked for here and have not come.
        are_lent: whether all devices are given back, or about to be, so that others can use them for a while.
    """

    def __init__(self, state: EngineState, backend: Backend, handle: Callable[[Event], None]) -> None:
        self.asked = 0
        self.are_lent = False
        self._state = state
        self._backend = backend
        self._handle = handle
        #: How many devices the session began with.
        self._first = 0
        #: Devices that were told to retire here, and how many were given back and have not come again.
        self._retiring: set[int] = set()
        self._given_back = 0
        #: When devices were asked for that have not come, and how long those took that have.
        self._asked_at: list[float] = []
        self._provisions: list[float] = []

    def begin(self, devices: int) -> None:
        """Called once, with how many devices the session begins with."""
        self._first = devices

    @property
    def can_change(self) -> bool:
        """Whether the backend takes devices back, and gives them again."""
        return self._backend.scaling_limits is not None

    @property
    def most(self) -> int:
        """Most devices that can be had."""
        limits = self._backend.scaling_limits
        autoscale = 0 if limits is None else limits.autoscale or 0
        known = len(self._state.occupancy.devices) + self._given_back
        return max(1, autoscale, known or self._first)

    @property
    def are_missing(self) -> bool:
        """Whether devices were given back that can be had again, or are about to be."""
        return self.are_lent or self._given_back > 0

    @property
    def provision_s(self) -> float:
        """Seconds until a device comes that is asked for now."""
        if self._provisions:
            return median_low(self._provisions)
        limits = self._backend.scaling_limits
        return 0.0 if limits is None else limits.provision_s

    def gives_back(self, device_id: int) -> bool:
        """Whether a device was told to retire here, so that it is given back here, too."""
        return device_id in self._retiring

    def heard(self, events: Iterable[Event], commands: Iterable[Command]) -> bool:
        """Gives devices back that have retired; returns whether devices came or went."""
        changed = False
        for event in events:
            if isinstance(event, DeviceAdded):
                changed = True
                if self.asked:
                    self.asked -= 1
                    self._given_back = max(0, self._given_back - 1)
                    self._provisions = [*self._provisions, event.at - self._asked_at.pop(0)][-_PROVISIONS:]
        for command in commands:
            if isinstance(command, NoteDeviceLost):
                changed = True
                if command.device_id in self._retiring:
                    self._retiring.remove(command.device_id)
                    self._given_back += 1
                    self._backend.give_back(command.device_id)
        return changed

    def hold(self, wanted: int, *, interrupts: bool = False) -> None:
        """Brings the devices that take trials to a number, as far as it can be done now.

        Args:
            wanted: how many.
            interrupts: whether devices that run trials may retire, too, rather than idle ones only.
        """
        if self.are_lent:
            return
        if self._given_back and self._state.retirements.some_wait_for_others():
            wanted = self.most  # A trial waits for devices of a kind that may be among those given back.
        held = len(self._state.occupancy)
        if wanted < held:
            self._ask(0)
            self._retire(held - wanted, busy=interrupts)
            return
        for device in sorted(self._retiring & self._state.retirements.devices)[: wanted - held]:
            self._retiring.discard(device)
            self._handle(DeviceRetained(self._backend.now(), device))
        self._ask(max(0, wanted - len(self._state.occupancy)))

    def restore(self) -> None:
        """Holds as many devices again as the session began with."""
        self.hold(max(self._first, len(self._state.occupancy)))

    def lend(self) -> bool:
        """Gives all devices back until :meth:`reclaim`; their trials are saved, and wait.

        Returns:
            Whether others can use what this backend gives back.
        """
        if not self._backend.can_lend:
            return False
        if not self.are_lent:
            self._ask(0)
            self.are_lent = True
            devices = [device.index for device in self._state.occupancy.devices]
            self._state.set_most_devices(max(self._state.most_devices, self.most))
            self._retiring.update(devices)
            for device in devices:
                now = self._backend.now()
                self._handle(DeviceDraining(now, device, now + _LEAVE_S))
            _log.info("all %d devices are given back for a while, for others in the cluster", len(devices))
        return True

    def reclaim(self) -> None:
        """Takes as many devices again as there were before :meth:`lend`."""
        if self.are_lent:
            self.are_lent = False
            self.hold(self.most)

    def withdraw(self) -> None:
        """Asks for no device any more."""
        self._ask(0)

    def _ask(self, missing: int) -> None:
        """Asks for so many devices beyond those that take trials."""
        if not self.can_change or missing == self.asked:
            return
        now = self._backend.now()
        self._asked_at = [*self._asked_at[:missing], *([now] * (missing - len(self._asked_at)))]
        self.asked = missing
        self._backend.ask(len(self._state.occupancy.devices) + missing if missing else 0)

    def _retire(self, count: int, *, busy: bool) -> None:
        state = self._state
        devices, idle = state.occupancy.open_devices, state.demand.idle_since
        on_host = Counter(device.host for device in devices)
        # Idle ones first; then machines with few devices, so that whole nodes fall idle; then what is free first.
        order = sorted(
            (device.index not in idle, on_host[device.host], self._busy_s(device.index), -device.index)
            for device in devices
            if busy or device.index in idle
        )
        for *_, index in order:
            if count and self._backend.can_give_back(-index) and state.retirements.may_retire(-index):
                count -= 1
                self._retiring.add(-index)
                state.set_most_devices(max(state.most_devices, self.most))
                self._handle(DeviceRetiring(self._backend.now(), -index))

    def _busy_s(self, device: int) -> float:
        """Seconds until the trials on a device have ended."""
        return max((self._state.estimates.seconds_left(trial) for trial in self._trials_on(device)), default=0.0)

    def _trials_on(self, device: int) -> list[TrialRecord]:
        by_row = self._state.trials.by_row
        return [by_row[row] for row in self._state.occupancy.residents[device] if row in by_row]
