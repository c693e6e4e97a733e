"""Devices that go back to Ray once their lanes have ended, and hosts that end with the last device of their node."""

from __future__ import annotations

import functools
from collections.abc import Callable

from fluid.backends.ray.devices import RayDevices


class LeavingDevices:
    """Keeps track of which lanes may still run on which devices. Its methods do not wait.

    Args:
        devices: the session's.
        request: makes a call to Ray in the thread for such calls.
        end_host: ends the host of a node on which no device is left.
    """

    def __init__(
        self, devices: RayDevices, request: Callable[[Callable[[], None]], None], end_host: Callable[[str], None]
    ) -> None:
        self._devices = devices
        self._request = request
        self._end_host = end_host
        #: Devices of every lane that may still run.
        self._devices_of: dict[int, tuple[int, ...]] = {}
        #: Devices whose lanes are to end first, and those that Ray was or is given back.
        self._waiting: set[int] = set()
        self._gone: set[int] = set()

    def __contains__(self, device_id: int) -> bool:
        """Whether a device goes back, or has gone."""
        return device_id in self._waiting or device_id in self._gone

    def started(self, lane_id: int, device_ids: tuple[int, ...]) -> None:
        """Takes note of a lane."""
        self._devices_of[lane_id] = device_ids

    def ended(self, lane_id: int) -> None:
        """Gives its devices back that are to go if that was the last lane there."""
        for device_id in self._devices_of.pop(lane_id, ()):
            if device_id in self._waiting:
                self._give_back_if_empty(device_id)

    def give_back(self, device_id: int) -> None:
        """Gives a device back once its lanes have ended."""
        if device_id not in self:
            self._waiting.add(device_id)
            self._give_back_if_empty(device_id)

    def _give_back_if_empty(self, device_id: int) -> None:
        if any(device_id in devices for devices in self._devices_of.values()):
            return
        node = self._devices.node_of(device_id)
        self._waiting.remove(device_id)
        self._gone.add(device_id)
        here = {device.index for device in self._devices.devices if self._devices.node_of(device.index) == node}
        if here <= self._gone:
            # Ray's autoscaler would not end a node on which an actor runs.
            self._end_host(node)
        self._request(functools.partial(self._devices.give_back, device_id))
