"""Feasibility: whether the devices that there are, or may come to be, could ever run a trial."""

from __future__ import annotations

from fluid.devices.constraints import Constraint
from fluid.devices.occupancy import Occupancy
from fluid.resources import Device, MemoryNeed


class Feasibility:
    """Finds what keeps a trial from ever running.

    Args:
        occupancy: the devices.

    Attributes:
        most_devices: most devices that the session may come to hold; 0 if none come by themselves.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self.most_devices = 0
        self._occupancy = occupancy
        #: What :meth:`awaits` has found, and after how many changes of the devices.
        self._awaited: dict[tuple[MemoryNeed | None, Constraint], bool] = {}
        self._found_at = 0

    def problem(self, need: MemoryNeed | None, constraint: Constraint | None) -> tuple[str, object, str] | None:
        """Says why a trial can never run; devices that drain count until they are gone.

        Args:
            need: the device memory that the submitter says it needs; ``None`` if it does not.
            constraint: what it asks of its devices.

        Returns:
            The field that is to blame, its value and the reason; ``None`` if the trial can run, is to wait until it
            can, or there is no device yet.
        """
        if (need is None and constraint is None) or not self._occupancy.devices:
            return None
        if constraint is not None and constraint.waits:
            return None
        devices = self._with_room(self._occupancy.devices, need)
        if need is not None and not devices and not self.most_devices:
            usable = self._occupancy.memory.usable_bytes
            most = max(room for device in self._occupancy.devices if (room := usable(device.index)) is not None)
            needed = f"it needs {need.peak_bytes:.0f} bytes"
            return "memory", need, f"{needed} and the device with the most has {most:.0f} usable"
        return None if constraint is None else constraint.problem(devices, self.most_devices)

    def awaits(self, need: MemoryNeed | None, constraint: Constraint | None) -> bool:
        """Whether a trial that asks something of its devices has to wait until others come than there are.

        Args:
            need: the device memory that the submitter says it needs; ``None`` if it does not.
            constraint: what it asks of its devices.
        """
        if constraint is None:
            return False
        if self._found_at != self._occupancy.eligible.changes:
            self._awaited.clear()
            self._found_at = self._occupancy.eligible.changes
        found = self._awaited.get((need, constraint))
        if found is None:
            found = not self.is_possible_on(self._occupancy.devices, need, constraint)
            self._awaited[need, constraint] = found
        return found

    def is_possible_on(self, devices: list[Device], need: MemoryNeed | None, constraint: Constraint | None) -> bool:
        """Whether these devices alone, if no other comes, could run a trial.

        Args:
            devices: some of the devices in use.
            need: the device memory that it takes, as far as that is known.
            constraint: what it asks of its devices.
        """
        fitting = self._with_room(devices, need)
        return bool(fitting) and (constraint is None or constraint.problem(fitting) is None)

    def _with_room(self, devices: list[Device], need: MemoryNeed | None) -> list[Device]:
        """The devices whose memory is large enough."""
        if need is None:
            return devices
        usable = self._occupancy.memory.usable_bytes
        return [one for one in devices if (room := usable(one.index)) is None or need.peak_bytes <= room]
