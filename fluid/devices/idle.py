"""Idle devices by host and speed, and which of them a trial gets (docs/theory.md, section 3).

A trial of width 1 gets the fastest device. A wide trial gets devices of one host if one has enough, where exchanging
gradients is fastest, and of one speed if possible, so that no device waits for a slower one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from fluid.resources import TOLERANCE, Device

#: (host, speed): devices of one group are alike to a wide trial.
_Group = tuple[str, float]
#: Says which devices have room for a trial; ``None`` if all have.
_Fits = Callable[[int], bool] | None
#: How fast a device is for a trial.
SpeedOf = Callable[[int], float]
#: host -> speed -> indices, ascending.
_ByHost = dict[str, dict[float, list[int]]]


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
        #: The groups of all devices that there ever were.
        self._groups: set[_Group] = set()
        #: The idle devices; without empty entries.
        self._by_host: _ByHost = {}
        #: speed -> indices of idle devices, ascending; empty where all devices of a speed are taken.
        self._by_speed: dict[float, list[int]] = {}

    @property
    def only_speed(self) -> float | None:
        """The speed of all devices, idle or not, if there is only one; else ``None``."""
        return next(iter(self._by_speed)) if len(self._by_speed) == 1 else None

    # -- changes -------------------------------------------------------------------------------------------

    def add_device(self, device: Device, now: float) -> None:
        """Adds a new device; it is idle."""
        self._group[device.index] = device.host, device.speed
        self._groups.add(self._group[device.index])
        self.add(device.index, now)

    def remove_device(self, index: int) -> None:
        """Removes an idle device for good."""
        self.take(index)
        del self._group[index]

    def add(self, index: int, now: float) -> None:
        """Adds a device that a trial left at that time, seconds."""
        host, speed = self._group[index]
        insort(self._by_host.setdefault(host, {}).setdefault(speed, []), index)
        insort(self._by_speed.setdefault(speed, []), index)
        self.count += 1
        self.since[index] = now

    def take(self, index: int) -> None:
        """Removes a device that a trial got."""
        del self.since[index]
        host, speed = self._group[index]
        on_host = self._by_host[host]
        for indices in (on_host[speed], self._by_speed[speed]):
            del indices[bisect_left(indices, index)]
        if not on_host[speed]:
            del on_host[speed]
            if not on_host:
                del self._by_host[host]
        self.count -= 1

    # -- choices -------------------------------------------------------------------------------------------

    def choose(
        self,
        count: int,
        fits: _Fits = None,
        host: str | None = None,
        *,
        one_host: bool = False,
        speed_of: SpeedOf | None = None,
    ) -> tuple[int, ...] | None:
        """Chooses ``count`` idle devices: of one host and speed if possible, then of one host, then any.

        Args:
            count: how many.
            fits: says which devices have room for the trial; ``None`` if all have.
            host: preferred among hosts that are equally good otherwise.
            one_host: whether all have to be of one host.
            speed_of: how fast each device is for the trial; ``None`` for the devices' own speeds.

        Returns:
            Their indices; ``None`` if there are too few.
        """
        if count > self.count:
            return None
        if fits is None and speed_of is None and len(self._groups) == 1:  # The usual case: alike devices on one host.
            return tuple(next(iter(self._by_speed.values()))[:count])
        if count == 1:
            return self._fastest(fits, host) if speed_of is None else self._fastest_for(speed_of, fits, host)
        idle = self._fitting(fits, speed_of=speed_of)
        chosen = self._on_one_host(count, idle, host)
        if chosen is not None or one_host:
            return chosen
        sizes = _sizes(idle)
        if sum(sizes.values()) < count:
            return None
        # The fewest hosts: the largest first.
        order = sorted(sizes, key=lambda name: (-sizes[name], name != host, name))
        return tuple(islice(chain.from_iterable(_fastest_first(idle[name]) for name in order), count))

    def resized(
        self, own: tuple[int, ...], count: int, fits: _Fits = None, speed_of: SpeedOf | None = None
    ) -> tuple[int, ...] | None:
        """Chooses ``count`` devices for a trial that holds some alone: those, fewer of them, or others too.

        They are of one host if any host has enough: that of the trial's first device, then another one on which it
        has devices, then one to which it moves, unless it would have slower devices there than on several hosts.

        Args:
            own: the devices that the trial holds.
            count: how many it is to hold, at least 1.
            fits: says which idle devices have room for the trial; ``None`` if all have.
            speed_of: as in :meth:`choose`.

        Returns:
            Their indices, those that it keeps first; ``None`` if too few are idle.
        """
        if count > len(own) + self.count:
            return None
        if fits is None and speed_of is None and len(self._groups) == 1:
            return own[:count] + tuple(next(iter(self._by_speed.values()))[: max(0, count - len(own))])
        kept = self._best(own, count, speed_of)
        if len(kept) == count and len({self._group[index][0] for index in kept}) == 1:
            return kept
        by_host: dict[str, list[int]] = {}
        for index in own:
            by_host.setdefault(self._group[index][0], []).append(index)
        first, *others = by_host
        for host in (first, *sorted(others, key=lambda name: -len(by_host[name]))):
            chosen = self._extend(tuple(by_host[host]), count, self._fitting(fits, (host,), speed_of), speed_of)
            if chosen is not None:
                return chosen
        idle = self._fitting(fits, speed_of=speed_of)
        spread = self._extend(own, count, idle, speed_of)
        moved = self._on_one_host(count, idle)
        if spread is None or moved is None or self._slowest(moved, speed_of) < self._slowest(spread, speed_of):
            return spread
        return moved

    def has_room_near(self, own: tuple[int, ...], count: int) -> bool:
        """Whether the host of a trial's first device has enough idle devices for it to hold ``count`` there."""
        host = self._group[own[0]][0]
        kept = sum(self._group[index][0] == host for index in own)
        return kept + sum(map(len, self._by_host.get(host, {}).values())) >= count

    # -- inside --------------------------------------------------------------------------------------------

    def _fastest(self, fits: _Fits, host: str | None) -> tuple[int] | None:
        """The fastest idle device with room, of the preferred host or else with the lowest index."""
        for speed in sorted(self._by_speed, reverse=True):
            near = self._by_host.get(host, {}).get(speed, []) if host is not None else []
            for index in chain(near, self._by_speed[speed]):
                if fits is None or fits(index):
                    return (index,)
        return None

    def _fastest_for(self, speed_of: SpeedOf, fits: _Fits, host: str | None) -> tuple[int] | None:
        """As :meth:`_fastest`, where devices have other speeds for the trial."""
        found = [
            (-speed_of(index), self._group[index][0] != host, index)
            for index in self.since
            if fits is None or fits(index)
        ]
        return (min(found)[2],) if found else None

    def _fitting(self, fits: _Fits, hosts: Sequence[str] | None = None, speed_of: SpeedOf | None = None) -> _ByHost:
        """The idle devices that have room, of these hosts or of all."""
        if speed_of is not None:
            by_host: _ByHost = {}
            for index in sorted(self.since):
                host = self._group[index][0]
                if (hosts is None or host in hosts) and (fits is None or fits(index)):
                    by_host.setdefault(host, {}).setdefault(speed_of(index), []).append(index)
            return by_host
        some = self._by_host if hosts is None else {host: self._by_host.get(host, {}) for host in hosts}
        if fits is None:
            return some
        fitting: _ByHost = {}
        for host, speeds in some.items():
            for speed, indices in speeds.items():
                room = [index for index in indices if fits(index)]
                if room:
                    fitting.setdefault(host, {})[speed] = room
        return fitting

    @staticmethod
    def _on_one_host(count: int, idle: _ByHost, host: str | None = None) -> tuple[int, ...] | None:
        """``count`` of these devices that are on one host, and of one speed if possible."""
        # The tightest fit leaves the large hosts whole for wider trials.
        alike = [
            (-speed, name != host, len(indices), indices)
            for name, speeds in idle.items()
            for speed, indices in speeds.items()
            if len(indices) >= count
        ]
        if alike:
            return tuple(min(alike)[3][:count])
        sizes = _sizes(idle)
        enough = [name for name in sizes if sizes[name] >= count]
        if not enough:
            return None
        chosen = min(enough, key=lambda name: (name != host, -sizes[name], name))
        return tuple(islice(_fastest_first(idle[chosen]), count))

    def _extend(
        self, own: tuple[int, ...], count: int, idle: _ByHost, speed_of: SpeedOf | None
    ) -> tuple[int, ...] | None:
        """Some of a trial's devices, or all and some of these: first those like its own, then those on its hosts."""
        kept = self._best(own, count, speed_of)
        missing = count - len(kept)
        if not missing:
            return kept
        sizes = _sizes(idle)
        if sum(sizes.values()) < missing:
            return None
        groups = {self._group_for(index, speed_of) for index in own}
        hosts = {host for host, _ in groups}
        order = sorted(
            ((host, speed) not in groups, host not in hosts, -speed, -sizes[host], indices)
            for host, speeds in idle.items()
            for speed, indices in speeds.items()
        )
        return kept + tuple(islice(chain.from_iterable(indices for *_, indices in order), missing))

    def _best(self, devices: tuple[int, ...], count: int, speed_of: SpeedOf | None) -> tuple[int, ...]:
        """At most ``count`` of a trial's devices: those of the most numerous group, then the fastest."""
        if count >= len(devices):
            return devices
        group = {index: self._group_for(index, speed_of) for index in devices}
        tally = Counter(group.values())
        ranked = sorted(devices, key=lambda index: (-tally[group[index]], -group[index][1]))
        return tuple(ranked[:count])

    def _group_for(self, index: int, speed_of: SpeedOf | None) -> _Group:
        host, speed = self._group[index]
        return (host, speed) if speed_of is None else (host, speed_of(index))

    def _slowest(self, devices: tuple[int, ...], speed_of: SpeedOf | None) -> float:
        return min(self._group_for(index, speed_of)[1] for index in devices)


def _sizes(idle: _ByHost) -> dict[str, int]:
    return {host: sum(map(len, speeds.values())) for host, speeds in idle.items()}


def _fastest_first(speeds: dict[float, list[int]]) -> Iterator[int]:
    return chain.from_iterable(speeds[speed] for speed in sorted(speeds, reverse=True))


# -- tiers ---------------------------------------------------------------------------------------
#
# Tiers: whether a trial of several devices should have them of one speed (docs/theory.md, section 15).
#
# A trial on several devices runs at the pace of the slowest of them. So it may end sooner on fewer that are faster, or
# on faster ones that are not idle yet.


def waits_for_tier(seconds_now: float, delay: float, seconds_there: float) -> bool:
    """Whether a trial that could start now should wait for devices of one tier, as it then ends sooner (after Venn).

    Args:
        seconds_now: how long it would take on the devices that are idle.
        delay: seconds until the devices of the tier are idle.
        seconds_there: how long it would take on those.
    """
    return delay + seconds_there < seconds_now * (1.0 - TOLERANCE)


def fastest_part(speeds: Sequence[float], stretch: Callable[[int], float]) -> list[int]:
    """Those of a trial's devices on which it ends first: all that are as fast as one of them; of equal ones, fewest.

    Args:
        speeds: of each device for the trial.
        stretch: h(w)/h(1) at a width w, at speed 1.

    Returns:
        Their positions, ascending.
    """
    best, slowest = float("inf"), 0.0
    for speed in sorted(set(speeds), reverse=True):
        seconds = stretch(sum(each >= speed for each in speeds)) / speed
        if seconds < best * (1.0 - TOLERANCE):
            best, slowest = seconds, speed
    return [position for position, speed in enumerate(speeds) if speed >= slowest]
