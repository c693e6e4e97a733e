"""Idle devices in groups of one host and one speed, and which of them a trial gets (docs/theory.md, section 3).

A trial of width 1 gets the fastest device. A wide trial prefers devices of one host and one speed, where exchanging
gradients is fastest and no device waits for a slower one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from fluid.resources import Device

#: (host, speed): devices of one group are alike to a wide trial.
_Group = tuple[str, float]


class IdleDevices:
    """The devices that no trial holds.

    Attributes:
        count: F, the number of idle devices.
        since: since when each of them is idle, seconds; the one that has been idle longest comes first.
    """

    def __init__(self) -> None:
        self.count = 0
        self.since: dict[int, float] = {}
        #: group of each device, idle or not.
        self._group: dict[int, _Group] = {}
        #: group -> indices, ascending; empty where all devices of a group are taken.
        self._idle: dict[_Group, list[int]] = {}

    @property
    def only_speed(self) -> float | None:
        """The speed of all devices, idle or not, if they are of one group; else ``None``."""
        return next(iter(self._idle))[1] if len(self._idle) == 1 else None

    # -- changes -------------------------------------------------------------------------------------------

    def add_device(self, device: Device, now: float) -> None:
        """Adds a new device; it is idle."""
        self._group[device.index] = device.host, device.speed
        self.add(device.index, now)

    def remove_device(self, index: int) -> None:
        """Removes an idle device for good."""
        self.take(index)
        del self._group[index]

    def add(self, index: int, now: float) -> None:
        """Adds a device that a trial left at that time, seconds."""
        insort(self._idle.setdefault(self._group[index], []), index)
        self.count += 1
        self.since[index] = now

    def take(self, index: int) -> None:
        """Removes a device that a trial got."""
        self._idle[self._group[index]].remove(index)
        self.count -= 1
        del self.since[index]

    # -- choices -------------------------------------------------------------------------------------------

    def choose(
        self, count: int, fits: Callable[[int], bool] | None = None, near: tuple[int, ...] = ()
    ) -> tuple[int, ...] | None:
        """Chooses ``count`` idle devices: of one group if possible, then of one host, then any.

        Args:
            count: how many.
            fits: says which devices have room for the trial; ``None`` if all have.
            near: devices that the trial holds already, whose groups come first.

        Returns:
            Their indices; ``None`` if there are too few.
        """
        if count > self.count:
            return None
        if fits is None and len(self._idle) == 1:  # alike devices on one host, the usual case
            return tuple(next(iter(self._idle.values()))[:count])
        groups = self._idle
        if fits is not None:
            groups = {group: [index for index in indices if fits(index)] for group, indices in groups.items()}
        groups = {group: indices for group, indices in groups.items() if indices}
        if sum(map(len, groups.values())) < count:
            return None
        picked: list[int] = []
        for group in self._order(groups, count, near):
            picked += groups[group][: count - len(picked)]
            if len(picked) == count:
                break
        return tuple(picked)

    def _order(self, groups: dict[_Group, list[int]], count: int, near: tuple[int, ...]) -> list[_Group]:
        """The groups from which to take ``count`` devices, in order."""
        if near:
            own = {self._group[index] for index in near}
            hosts = {host for host, _ in own}
            return sorted(
                groups, key=lambda group: (group not in own, group[0] not in hosts, -group[1], groups[group][0])
            )
        if count == 1:
            return [min(groups, key=lambda group: (-group[1], groups[group][0]))]
        enough = [group for group in groups if len(groups[group]) >= count]
        if enough:  # the tightest fit leaves the large hosts whole for wider trials
            return [min(enough, key=lambda group: (-group[1], len(groups[group]), groups[group][0]))]
        per_host: dict[str, int] = {}
        for (host, _), indices in groups.items():
            per_host[host] = per_host.get(host, 0) + len(indices)
        # A host that holds the trial whole comes first; otherwise the fewest hosts, the largest first.
        return sorted(groups, key=lambda group: (per_host[group[0]] < count, -per_host[group[0]], group[0], -group[1]))

    def best(self, devices: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The ``count`` of a trial's devices to keep: the group that is most numerous among them, then the fastest."""
        tally: dict[_Group, int] = {}
        for index in devices:
            tally[self._group[index]] = tally.get(self._group[index], 0) + 1
        ranked = sorted(devices, key=lambda index: (-tally[self._group[index]], -self._group[index][1]))
        return tuple(ranked[:count])
