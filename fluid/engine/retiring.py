"""Retiring devices: they take no further trial, and go once the trials that run there have left by themselves.

Unlike a drain (:mod:`fluid.engine.drains`), this interrupts nothing: the trials run on to their end or their next rung,
so no iteration waits for a save. A device that may be needed after all is retained, and takes trials again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fluid.engine.claims import Claims
from fluid.engine.core import SessionState
from fluid.engine.demand import DeviceDemand, may_run_again
from fluid.engine.drains import Drains
from fluid.engine.events import DeviceDraining, Event
from fluid.errors import InvalidFieldError

#: Seconds to save the states that an idle device keeps; then it goes as it is.
SAVING_S = 300.0


@dataclass(frozen=True, slots=True)
class DeviceRetiring(Event):
    """A device is not needed: it takes no further trial, and is removed once the trials there have left."""

    device_id: int


@dataclass(frozen=True, slots=True)
class DeviceRetained(Event):
    """A device that retires is needed after all."""

    device_id: int


#: The events of this module.
RETIREMENTS = (DeviceRetiring, DeviceRetained)


class Retirements:
    """Retires devices.

    Args:
        core: the session.
        drains: saves the states that an empty device keeps, and removes it.
        demand: says which device can go without loss.

    Attributes:
        devices: those that retire and still run trials, by index.
        under_way: whether there are any. Read at every instant.
    """

    def __init__(self, core: SessionState, drains: Drains, demand: DeviceDemand) -> None:
        self._core = core
        self._drains = drains
        self._demand = demand
        self.devices: set[int] = set()
        self.under_way = False

    def may_retire(self, device_id: int) -> bool:
        """Whether a device takes trials, another one does, too, and no trial that may run again needs this one."""
        occupancy = self._core.occupancy
        if device_id not in occupancy.residents or occupancy.is_closed(device_id) or self._core.drained:
            return False
        return len(occupancy) > 1 and not self._is_needed(device_id)

    def check_retiring(self, event: DeviceRetiring, claims: Claims) -> None:
        """Refuses to retire a device that is not in use, or is needed."""
        if event.device_id not in self._core.occupancy.residents:
            raise InvalidFieldError("device", event.device_id, "is not in use")
        if event.device_id not in self.devices and not self.may_retire(event.device_id):
            raise InvalidFieldError("device", event.device_id, "is needed, or about to go already")
        claims.claim("device", event.device_id)

    def device_retiring(self, event: DeviceRetiring) -> None:
        """Begins to retire a device."""
        if len(self._core.occupancy) > 1 and not self._core.occupancy.is_closed(event.device_id):
            self._core.scheduling.close_device(event.device_id)
            self.devices.add(event.device_id)
            self._core.changed = self.under_way = True

    def check_retained(self, event: DeviceRetained, claims: Claims) -> None:
        """Refuses to retain a device that does not retire, or whose states are being saved already."""
        if event.device_id not in self.devices:
            raise InvalidFieldError("device", event.device_id, "does not retire")

    def device_retained(self, event: DeviceRetained) -> None:
        """Places trials on a device again."""
        self._reopen(event.device_id)

    def advance(self) -> None:
        """Removes the retiring devices that are empty, and retains those that are needed meanwhile."""
        core = self._core
        for device in sorted(self.devices):
            if device not in core.occupancy.residents or core.drained or self._drains.is_draining(device):
                self.devices.discard(device)
            elif not core.occupancy.residents[device]:
                if self._demand.may_give_back(device) and not self._is_needed(device):
                    self.devices.discard(device)
                    self._drains.device_draining(DeviceDraining(core.now, device, core.now + SAVING_S))
                else:  # It keeps the state of a trial that can go on only there, or has become the only one that fits.
                    self._reopen(device)
        if not core.occupancy and not core.drained:  # The others were lost.
            for device in sorted(self.devices):
                self._reopen(device)
        self.under_way = bool(self.devices)

    def some_wait_for_others(self) -> bool:
        """Whether a queued trial could not run on the devices that take trials, so that it waits for others."""
        core, here = self._core, self._core.occupancy.open_devices
        trials = [*(core.trials.by_row[row] for row in core.queue), *core.arrivals.values()]
        asked = {(trial.spec.memory, trial.constraint) for trial in trials}
        return not all(core.feasibility.is_possible_on(here, need, constraint) for need, constraint in asked)

    def problems(self) -> Iterator[str]:
        """What is broken of the invariants: a device that retires is in use and closed, beside an open one."""
        occupancy = self._core.occupancy
        for device in self.devices:
            if device not in occupancy.residents or not occupancy.is_closed(device):
                yield f"device {device} retires, and is gone or open"
        if self.devices and not occupancy:
            yield f"devices {self.devices} retire, and no other takes trials"

    def _is_needed(self, device_id: int) -> bool:
        """Whether a trial that may run again could run on no other devices that take trials."""
        core = self._core
        rest = [device for device in core.occupancy.open_devices if device.index != device_id]
        trials = (trial for trial in core.trials.values() if may_run_again(trial))
        asked = {(core.estimates.need(trial), trial.constraint) for trial in trials}
        return not all(core.feasibility.is_possible_on(rest, need, constraint) for need, constraint in asked)

    def _reopen(self, device_id: int) -> None:
        self.devices.discard(device_id)
        self._core.scheduling.reopen_device(device_id)
        self._core.changed = True
