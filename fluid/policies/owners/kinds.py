"""Kinds of devices: open devices that meet the same ones of the requirements that there are."""

from __future__ import annotations

from collections.abc import Set

from fluid.devices.constraints import Constraint
from fluid.devices.occupancy import Occupancy
from fluid.resources import Requires

#: What a trial requires of a device, and the device memory that it needs; ``None`` for nothing, or nothing known.
Wants = tuple[Requires | None, float | None]


class DeviceKinds:
    """Finds the kinds of the open devices. A set of kinds is a bit mask: bit k is set for kind k.

    Args:
        occupancy: the devices.

    Attributes:
        speeds: the devices of each kind, weighted by their speeds.
        version: changes when devices come or go.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self.speeds: list[float] = []
        self.version = 0
        self._occupancy = occupancy
        self._masks: dict[Wants, int] = {}
        self._devices: list[frozenset[int]] = []

    def forget_devices(self) -> None:
        """Has to be called when devices came or went."""
        self.version += 1
        self._masks.clear()

    def find(self, wants: Set[Wants]) -> None:
        """Sorts the devices into kinds by what is wanted of them."""
        if self._masks.keys() == wants:
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
        self.speeds = [sum(self._occupancy.device(index).speed for index in some) for some in kinds.values()]
        self._masks = {
            each: sum(1 << kind for kind, met in enumerate(kinds) if met >> bit & 1) for bit, each in enumerate(ordered)
        }

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
