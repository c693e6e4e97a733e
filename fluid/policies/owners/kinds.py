"""Kinds of devices: those that meet the same ones of the requirements that there are."""

from __future__ import annotations

from collections.abc import Set

from fluid.devices.constraints import Constraint
from fluid.devices.occupancy import Occupancy
from fluid.policies.owners.supply import Supply
from fluid.resources import Device, Requires, usable_bytes

#: What a trial requires of a device, and the device memory that it needs; ``None`` for nothing, or nothing known.
Wants = tuple[Requires | None, float | None]


class DeviceKinds:
    """Finds the kinds of the open devices. A set of kinds is a bit mask: bit k is set for kind k.

    Args:
        occupancy: the devices.

    Attributes:
        speeds: the devices of each kind, weighted by their speeds: as many as there were on average
            (:class:`Supply`), where devices have come or gone. A kind without a device now is none.
        version: changes when devices come or go.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self.speeds: list[float] = []
        self.version = 0
        self.supply = Supply()
        self._occupancy = occupancy
        self._masks: dict[Wants, int] = {}
        self._devices: list[frozenset[int]] = []

    def forget_devices(self, changed: int) -> None:
        """Has to be called once a device has come, gone, or is closed or open again; its index."""
        occupancy = self._occupancy
        is_open = changed in occupancy.residents and not occupancy.is_closed(changed)
        self.supply.set(occupancy.now, changed, occupancy.device(changed) if is_open else None)
        self.version += 1
        self._masks.clear()

    def find(self, wants: Set[Wants]) -> None:
        """Sorts the devices into kinds by what is wanted of them."""
        averages = self.supply.averages(self._occupancy.now)
        if averages is None and self._masks.keys() == wants:
            return
        ordered = sorted(wants, key=repr)
        devices = self._occupancy.open_devices
        met_by: dict[int, int] = {device.index: 0 for device in devices}
        for bit, each in enumerate(ordered):
            for index in self._meeting(each, met_by.keys()):
                met_by[index] |= 1 << bit
        kinds: dict[int, list[int]] = {}
        for index, met in met_by.items():
            kinds.setdefault(met, []).append(index)
        self._devices = [frozenset(some) for some in kinds.values()]
        self._masks = {
            each: sum(1 << kind for kind, met in enumerate(kinds) if met >> bit & 1) for bit, each in enumerate(ordered)
        }
        if averages is None:
            self.speeds = [sum(self._occupancy.device(index).speed for index in some) for some in kinds.values()]
            return
        # Not a kind that is absent: its jobs would be given its devices, and so none, for as long as it stays away.
        usual = dict.fromkeys(kinds, 0.0)
        for device, number in averages.items():
            met = sum(1 << bit for bit, each in enumerate(ordered) if self._meets(device, each))
            if met in usual:
                usual[met] += number * device.speed
        self.speeds = list(usual.values())

    def eligible(self, wants: Wants) -> int:
        """The kinds that will do for trials that want this."""
        return self._masks[wants]

    def devices_of(self, kinds: int) -> frozenset[int]:
        """The devices of these kinds."""
        return frozenset().union(*(some for kind, some in enumerate(self._devices) if kinds >> kind & 1))

    def speed_of(self, kinds: int) -> float:
        """The devices of these kinds, weighted by their speeds."""
        return sum(speed for kind, speed in enumerate(self.speeds) if kinds >> kind & 1)

    def _meeting(self, wants: Wants, devices: Set[int]) -> Set[int]:
        requires, memory_bytes = wants
        eligible = self._occupancy.eligible.of(None if requires is None else Constraint(requires))
        met = devices if eligible is None else devices & eligible
        if memory_bytes is None:
            return met
        usable = self._occupancy.memory.usable_bytes
        return {index for index in met if (room := usable(index)) is None or room >= memory_bytes}

    def _meets(self, device: Device, wants: Wants) -> bool:
        """Whether a device that may be absent meets it."""
        requires, memory_bytes = wants
        if requires is not None and not requires.met_by(device):
            return False
        if memory_bytes is None or device.memory_bytes is None:
            return True
        return usable_bytes(device.memory_bytes, self._occupancy.memory.watermark) >= memory_bytes
