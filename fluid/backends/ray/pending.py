"""Devices that are asked for while a session runs: pending placement groups of one device each.

A pending group is also what makes Ray's autoscaler start a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluid.backends.ray.nodes import Node
from fluid.backends.ray.placement import DeviceSlot, is_placed, places, release, reserve
from fluid.resources import Device, DeviceKind


class PendingDevices:
    """Groups of one device each, until the device can be used. Its methods call Ray, and wait for no device.

    Args:
        kind: of the devices.
        most: most devices that the session may hold; ``None`` for no limit.
    """

    def __init__(self, kind: DeviceKind, most: int | None = None) -> None:
        self._kind: DeviceKind = kind
        self._most = most
        #: Those that the scaling policy has asked for, and those for what was seen to be free on new nodes.
        self._asked: list[Any] = []
        self._offered: list[Any] = []
        #: Those that Ray has placed, while a task looks at the GPU.
        self._placed: list[DeviceSlot] = []

    def ask(self, total: int, held: int) -> None:
        """Asks for the devices that the scaling policy misses, and withdraws those that it does not miss any more.

        Args:
            total: devices to hold in all.
            held: those that have joined.
        """
        waiting = _unplaced(self._asked)
        coming = len(self._placed) + len(self._offered) + len(self._asked) - len(waiting)
        self._resize(self._asked, waiting, max(0, total - held - coming))

    def offer(self, count: int, held: int) -> None:
        """Asks for devices that are free on new nodes, less those that the scaling policy asks for.

        Args:
            count: how many are free there.
            held: devices that have joined.
        """
        waiting = _unplaced(self._offered)
        count -= len(self._asked)
        if self._most is not None:
            coming = len(self._placed) + len(self._asked) + len(self._offered) - len(waiting)
            count = min(count, self._most - held - coming)
        self._resize(self._offered, waiting, max(0, count))

    def count_on(self, node: str) -> int:
        """Returns how many devices Ray has placed on a node that cannot be used yet."""
        return sum(slot.node == node for slot in self._placed)

    def take(self, nodes: Mapping[str, Node]) -> list[DeviceSlot]:
        """Returns the devices that can be used by now, which are the caller's from now on; each has index 0.

        Args:
            nodes: all nodes, by id.
        """
        for groups in (self._asked, self._offered):
            for group in [group for group in groups if is_placed(group)]:
                groups.remove(group)
                slot = DeviceSlot(Device(0, kind=self._kind), group, 0, True, places(group)[0])
                self._placed.append(slot)
                slot.begin_look()
        usable = []
        for slot in list(self._placed):
            node = nodes.get(slot.node)
            if (node is not None and not node.alive) or not slot.node:  # It went before it was used.
                self._placed.remove(slot)
                release(slot.group)
            elif node is not None and slot.end_look(0.0):
                self._placed.remove(slot)
                usable.append(slot)
        return usable

    def close(self) -> None:
        """Withdraws all, and gives back what Ray has placed."""
        for group in (*self._asked, *self._offered, *(slot.group for slot in self._placed)):
            release(group)

    def _resize(self, groups: list[Any], waiting: list[Any], count: int) -> None:
        """Makes it ``count`` groups that wait; those that Ray has just placed are kept."""
        for group in waiting[count:]:
            groups.remove(group)
            release(group)
        groups += [reserve([Device(0, kind=self._kind)]) for _ in range(count - len(waiting))]


def _unplaced(groups: list[Any]) -> list[Any]:
    """The groups that Ray has not placed."""
    return [group for group in groups if not is_placed(group)]
