"""Feasibility: whether the devices that there are, or may come to be, could ever run a trial."""

from __future__ import annotations

from fluid.planning.constraints import Constraint
from fluid.planning.occupancy import Occupancy
from fluid.resources import MemoryNeed


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

    def problem(self, need: MemoryNeed | None, constraint: Constraint | None) -> tuple[str, object, str] | None:
        """Says why a trial can never run; devices that drain count until they are gone.

        Args:
            need: the device memory that the submitter says it needs; ``None`` if it does not.
            constraint: what it asks of its devices.

        Returns:
            The field that is to blame, its value and the reason; ``None`` if the trial can run, or there is no device
            yet.
        """
        if (need is None and constraint is None) or not self._occupancy.devices:
            return None
        devices = self._occupancy.devices
        if need is not None:
            usable = self._occupancy.memory.usable_bytes
            rooms = {device.index: usable(device.index) for device in devices}
            devices = [device for device in devices if (room := rooms[device.index]) is None or need.peak_bytes <= room]
            if not devices and not self.most_devices:
                most = max(room for room in rooms.values() if room is not None)
                needed = f"it needs {need.peak_bytes:.0f} bytes"
                return "memory", need, f"{needed} and the device with the most has {most:.0f} usable"
        return None if constraint is None else constraint.problem(devices, self.most_devices)
