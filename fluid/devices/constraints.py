"""Constraints: which devices may run a trial, and how many it takes (docs/theory.md, section 9)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fluid.resources import TOLERANCE, Device, MemoryNeed, Requires

_NOTHING = Requires()
#: Kinds of devices that an error lists.
_MOST_LISTED = 6


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a trial asks of its devices.

    Attributes:
        requires: what each of them must have; ``None`` if any will do.
        devices: their number if that is fixed, or a share of one device; ``None`` for what the planner decides.
        gang: whether one lane holds all of them, so that they are of one host and the runtime is not divided.
    """

    requires: Requires | None = None
    devices: float | None = None
    gang: bool = False

    @classmethod
    def of(cls, requires: Requires | None, devices: float | None, gang: bool) -> Constraint | None:
        """The constraint of a trial; ``None`` if it asks for nothing."""
        requires = None if requires == _NOTHING else requires
        return None if requires is None and devices is None else cls(requires, devices, gang)

    @property
    def width(self) -> int | None:
        """The fixed width; ``None`` if the planner decides."""
        return None if self.devices is None or self.devices < 1.0 else int(self.devices)

    @property
    def most_residents(self) -> int | None:
        """Most trials on its device, itself included; ``None`` for no bound."""
        return None if self.devices is None else max(1, math.floor(1.0 / self.devices + TOLERANCE))

    @property
    def waits(self) -> bool:
        """Whether the trial is to wait for devices that there are not yet."""
        return self.requires is not None and self.requires.wait

    def problem(self, devices: Iterable[Device], most: int = 0) -> tuple[str, object, str] | None:
        """Why no set of these devices could ever run the trial.

        Args:
            devices: all there are, memory that is too small left out.
            most: most devices that there may come to be; 0 if no others come.

        Returns:
            The field, its value and the reason; ``None`` if there is such a set, or one may come.
        """
        known = list(devices)
        width = self.width or 1
        eligible = [device for device in known if self.requires is None or self.requires.met_by(device)]
        if width > max(most, len(known)) or (not most and eligible and width > _reach(eligible, self.gang)):
            where = " of one host" if self.gang else ""
            asked = "" if self.requires is None else f" with {self.requires}"
            reason = f"no {width} devices{where}{asked} can be had; there are {describe(known)}"
            return "devices", self.devices, reason
        if not eligible and not most:
            return "requires", self.requires, f"no device has that; there are {describe(known)}"
        return None

    def wanted(self, need: MemoryNeed | None = None) -> str:
        """The devices that it asks for, in words: ``"2 devices of one host with model 'H100'"``.

        Args:
            need: the device memory that the trial is known to need; ``None`` if that is unknown.
        """
        number = self.width or 1
        text = "a device" if number == 1 else f"{number} devices{' of one host' * self.gang}"
        parts = [] if self.requires is None or not self.requires.asks else [str(self.requires)]
        parts += [] if need is None else [f"{need.peak_bytes / 2**30:.3g} GiB usable"]
        return f"{text} with {', '.join(parts)}" if parts else text


def _reach(devices: list[Device], gang: bool) -> int:
    """Most of these devices that one trial can have."""
    per_host = Counter(device.host if gang else "" for device in devices)
    return max(per_host.values())


def describe(devices: Iterable[Device]) -> str:
    """Devices as text: ``"4 x NVIDIA A100 on 'n1', 2 x cpu on 'n2'"``."""
    kinds: Counter[tuple[str, float | None, str, tuple[str, ...]]] = Counter()
    for device in devices:
        kinds[device.model or device.kind, device.memory_bytes, device.host, device.tags] += 1
    parts = [
        f"{count} x {name}{'' if memory is None else f' of {memory / 2**30:.3g} GiB'} on {host!r}"
        + (f" (tags {', '.join(tags)})" if tags else "")
        for (name, memory, host, tags), count in kinds.items()
    ]
    more = len(parts) - _MOST_LISTED
    return ", ".join(parts[:_MOST_LISTED] + ([f"{more} other kinds"] if more > 0 else [])) or "none"


class EligibleDevices:
    """The devices that meet requirements, found once for each.

    Attributes:
        all: the devices, by index.
        changes: how often devices came or went.
    """

    def __init__(self) -> None:
        self.all: dict[int, Device] = {}
        self.changes = 0
        self._sets: dict[Requires, frozenset[int]] = {}

    def add(self, device: Device) -> None:
        """Adds a device."""
        self.all[device.index] = device
        self.changes += 1
        self._sets.clear()

    def remove(self, index: int) -> None:
        """Removes a device."""
        del self.all[index]
        self.changes += 1
        self._sets.clear()

    def of(self, constraint: Constraint | None) -> frozenset[int] | None:
        """Indices of the devices that meet a constraint's requirements; ``None`` if it has none."""
        requires = None if constraint is None else constraint.requires
        if requires is None:
            return None
        found = self._sets.get(requires)
        if found is None:
            met = [index for index, device in self.all.items() if requires.met_by(device)]
            found = self._sets[requires] = frozenset(met)
        return found
