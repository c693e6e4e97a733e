"""Virtual devices as a session holds them: those at the start, those that are added, and those that come as asked."""

from __future__ import annotations

from collections.abc import Iterable

from fluid._clock import VirtualClock
from fluid.backends.base import ScalingLimits
from fluid.backends.simulated.booting import BootingDevices
from fluid.backends.simulated.devices import VirtualDevices
from fluid.errors import require_number
from fluid.planning.rollout import Segment
from fluid.resources import Device


class VirtualMachines:
    """The devices of a virtual clock's backend.

    Args:
        devices: the devices at the start.
        autoscale, idle_timeout_s: see :class:`fluid.backends.base.ScalingLimits`.
        boot_s: seconds until a device that was asked for comes; it is like the first one.
        record: whether to keep :attr:`segments`.

    Attributes:
        clock: the virtual clock.
        scaling_limits: how far the session may scale.

    Raises:
        InvalidFieldError: a limit of scaling, or ``boot_s``, cannot be used.
    """

    def __init__(
        self,
        devices: Iterable[Device] = (),
        *,
        autoscale: int | None = None,
        idle_timeout_s: float | None = None,
        boot_s: float = 0.0,
        record: bool = True,
    ) -> None:
        self.scaling_limits = ScalingLimits.of(autoscale, idle_timeout_s, boot_s)
        self.clock = VirtualClock()
        self._devices = VirtualDevices(self.clock, record=record)
        self._devices.add(devices)
        self._booting = BootingDevices(require_number("boot_s", boot_s, at_least=0.0), self._devices.all())

    @property
    def segments(self) -> list[Segment]:
        """Stretches of time in which a trial held devices, as they ended."""
        return self._devices.segments

    def devices(self) -> list[Device]:
        """Returns the devices, in order of their index."""
        return self._devices.all()

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Adds devices."""
        self._devices.add(devices)

    def ask(self, devices: int) -> None:
        """Asks for the devices that are missing to so many in all."""
        self._booting.ask(devices - len(self._devices), self.clock.now())

    def can_give_back(self, device_id: int) -> bool:
        """Whether a device can be given back alone: each one can."""
        return device_id in self._devices

    def give_back(self, device_id: int) -> None:
        """Gives a device back."""
        self._devices.remove(device_id)
