"""Virtual devices as a session holds them: those at the start, those that are added, and those that come as asked."""

from __future__ import annotations

from collections.abc import Iterable

from fluid._clock import VirtualClock
from fluid.backends.base import ScalingLimits
from fluid.backends.simulated.booting import BootingDevices
from fluid.backends.simulated.devices import VirtualDevices
from fluid.errors import require_number, require_one_of
from fluid.lane.policy import POLICIES
from fluid.planners.rollout import Segment
from fluid.resources import Device


class VirtualMachines:
    """The devices of a virtual clock's backend.

    Args:
        devices: the devices at the start.
        scaling_limits: how far the session may scale; a device that it asks for is like the first one.
        record: whether to keep :attr:`segments`.
        lane_policy: which of several trials a lane runs next, one of those of :mod:`fluid.lane.policy`; ``None`` for
            the one that has waited longest.

    Attributes:
        clock: the virtual clock.
        scaling_limits: how far the session may scale.

    Raises:
        InvalidFieldError: a limit of scaling, or ``boot_s``, cannot be used.
    """

    def __init__(
        self,
        devices: Iterable[Device],
        scaling_limits: ScalingLimits,
        *,
        record: bool = True,
        lane_policy: str | None = None,
    ) -> None:
        if lane_policy is not None:
            require_one_of("lane_policy", lane_policy, tuple(POLICIES))
        self.lane_policy = lane_policy
        self.scaling_limits = scaling_limits
        self.clock = VirtualClock()
        self._devices = VirtualDevices(self.clock, record=record, lane_policy=lane_policy)
        self._devices.add(devices)
        boot_s = require_number("boot_s", scaling_limits.provision_s, at_least=0.0)
        self._booting = BootingDevices(boot_s, self._devices.all())

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
