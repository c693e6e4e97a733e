"""Placement: which devices a trial of a given width gets, and which trial holds what (docs/theory.md, section 3).

Packed trials (width 1/p) go to the most idle device, wide trials to the devices of one host where one has enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence, Set

from fluid.devices.constraints import EligibleDevices
from fluid.devices.idle import IdleDevices, SpeedOf
from fluid.devices.memory import MemoryLedger, SharingGroups
from fluid.devices.models import ByModel, DeviceModels, OnModel
from fluid.errors import InvalidFieldError
from fluid.measure.runtime_model import residents_at
from fluid.resources import DEFAULT_MEMORY_WATERMARK, Cluster, Device, MemoryNeed

# -- open devices --------------------------------------------------------------------------------
#
# Open devices: shared devices with a slot for one more packed trial, the most idle and fastest first.


class OpenDevices:
    """Finds the device that a packed trial shares.

    Args:
        devices: device index -> device.
        residents: device index -> trials on it.
        open_slots: says how many further trials those of a device tolerate.
    """

    def __init__(
        self,
        devices: Mapping[int, Device],
        residents: Mapping[int, Sequence[int]],
        open_slots: Callable[[int], int],
    ) -> None:
        self._devices = devices
        self._residents = residents
        self._open_slots = open_slots
        #: residents -> heap of (-speed, device) that may have an open slot; entries go stale, see :meth:`find`.
        self._open: dict[int, list[tuple[float, int]]] = {}

    def push(self, index: int) -> None:
        """Records that a device has an open slot beside the trials that it has now."""
        heapq.heappush(self._open.setdefault(len(self._residents[index]), []), (-self._devices[index].speed, index))

    def find(
        self,
        tolerates: int,
        takes: Callable[[int], bool],
        host: str | None,
        on_host: Sequence[int],
        by_model: ByModel | None,
    ) -> int | None:
        """The shared device with the fewest residents, of these the fastest, then one of a host, then the first.

        Args:
            tolerates: most trials that the trial tolerates on its device, itself included.
            takes: says whether the trial may have a device, and its memory fits there.
            host: preferred among equally idle and fast devices.
            on_host: the devices of that host.
            by_model: how the trial does on unlike device models; ``None`` for the devices' own speeds.

        Returns:
            Its index; ``None`` if no device will do.
        """
        if by_model is not None:
            return self._find_by_model(tolerates, takes, host, by_model)
        for count in range(1, tolerates):
            heap = self._open.get(count, [])
            unfit: list[tuple[float, int]] = []
            found = None
            while heap and found is None:
                index = heap[0][1]
                if (
                    len(self._residents.get(index, ())) != count
                    or self._open_slots(index) <= 0
                    or self._devices[index].speed != -heap[0][0]
                ):
                    heapq.heappop(heap)  # stale: the device changed since this entry was made
                elif not takes(index):
                    unfit.append(heapq.heappop(heap))
                else:
                    found = index
            for entry in unfit:
                heapq.heappush(heap, entry)
            if found is not None:
                return self._alike_on(host, on_host, found, takes)
        return None

    def _alike_on(self, host: str | None, on_host: Sequence[int], found: int, takes: Callable[[int], bool]) -> int:
        """The first device of a host that is open to a trial and as idle and fast as another one; else that one."""
        other = self._devices[found]
        if host is None or host == other.host:
            return found
        for index in on_host:
            alike = len(self._residents[index]) == len(self._residents[found])
            if alike and self._open_slots(index) > 0 and self._devices[index].speed == other.speed and takes(index):
                return index
        return found

    def _find_by_model(
        self, tolerates: int, takes: Callable[[int], bool], host: str | None, by_model: ByModel
    ) -> int | None:
        slots = []
        for index, rows in self._residents.items():
            device = self._devices[index]
            on_model = by_model[device.model]
            room = 0 < len(rows) < min(tolerates, on_model.packing)
            if room and self._open_slots(index) > 0 and takes(index):
                slots.append((len(rows), -on_model.speed, device.host != host, index))
        return min(slots)[3] if slots else None


# -- occupancy -----------------------------------------------------------------------------------


#: Says which devices have room for a trial; ``None`` if all that are idle have.
_Fits = Callable[[int], bool] | None


class Occupancy:
    """Which trial holds which devices, and which devices are idle. Trials are known by a number, their row.

    A trial of width >= 1 holds its devices alone. A trial of width 1/p shares one device with at most p - 1
    others; with mixed p on a device the smallest counts. A device is never filled beyond its usable memory.

    Args:
        cluster: the devices to begin with; :meth:`add_device` and :meth:`remove_device` change them later.
        watermark: share of a device's memory that trials may fill, if no cluster is given.

    Attributes:
        groups: which trials share a device only with their like.
        now: when what is changed next happens, seconds; only :attr:`idle_since` depends on it.
    """

    def __init__(self, cluster: Cluster | None = None, *, watermark: float = DEFAULT_MEMORY_WATERMARK) -> None:
        #: Which devices meet which requirements.
        self.eligible = EligibleDevices()
        self._devices = self.eligible.all
        self.models = DeviceModels()
        #: devices that no further trial is placed on
        self._closed: set[int] = set()
        #: device index -> rows on it, in order of arrival.
        self.residents: dict[int, list[int]] = {}
        #: row -> device indices it holds; a row that holds none is absent.
        self.held: dict[int, tuple[int, ...]] = {}
        #: row -> most trials it tolerates on its device, itself included; 1 for widths >= 1.
        self._tolerates: dict[int, int] = {}
        #: device index -> most trials there, whatever they tolerate; only for devices with such a cap, while not idle.
        self.caps: dict[int, int] = {}
        self.groups = SharingGroups(self.residents)
        #: What the trials, kept states and lanes take of each device's memory.
        watermark = cluster.memory_watermark if cluster is not None else watermark
        self.memory = MemoryLedger(watermark, self.residents, self.held, self.groups)
        self._idle = IdleDevices()
        self.now = 0.0
        #: host -> its devices
        self._on_host: dict[str, list[int]] = {}
        self._open = OpenDevices(self._devices, self.residents, self.open_slots)
        for device in cluster.devices if cluster is not None else ():
            self.add_device(device)

    # -- questions ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """n, the number of devices that trials are placed on: closed ones do not count."""
        return len(self._devices) - len(self._closed)

    @property
    def devices(self) -> list[Device]:
        """The devices, by index, closed ones included."""
        return [self._devices[index] for index in sorted(self._devices)]

    @property
    def open_devices(self) -> list[Device]:
        """The devices that trials are placed on, by index."""
        return [device for device in self.devices if device.index not in self._closed]

    def is_closed(self, index: int) -> bool:
        """Whether no further trial is placed on a device."""
        return index in self._closed

    def device(self, index: int) -> Device:
        """The device with this index."""
        return self._devices[index]

    @property
    def free_count(self) -> int:
        """F, the number of idle devices."""
        return self._idle.count

    @property
    def is_unlike(self) -> bool:
        """Whether a device may be faster than another: they are of several models, or were given several speeds."""
        return self.models.are_several or self._idle.only_speed is None

    @property
    def idle_since(self) -> Mapping[int, float]:
        """Since when each idle device is idle, seconds; the one that has been idle longest comes first."""
        return self._idle.since

    def speed(self, device_ids: Sequence[int]) -> float:
        """Speed of the slowest of these devices."""
        if len(device_ids) == 1:
            return self._devices[device_ids[0]].speed
        return min(self._devices[index].speed for index in device_ids)

    def speeds(self, held: Sequence[tuple[int, ...]]) -> list[float]:
        """Speed of the slowest device of each of these sets."""
        speed = self._idle.only_speed
        return [self.speed(devices) for devices in held] if speed is None else [speed] * len(held)

    def open_slots(self, device: int) -> int:
        """Further packed trials that the residents of ``device`` tolerate; 0 for an idle or closed device."""
        rows = self.residents[device]
        return self._limit(device) - len(rows) if rows and device not in self._closed else 0

    # -- changes ------------------------------------------------------------------------------------------

    def add_device(self, device: Device) -> None:
        """Adds an idle device; its index must be new."""
        if device.index in self._devices:
            raise InvalidFieldError("index", device.index, "a device with this index exists already")
        self.eligible.add(device)
        self.models.add(device)
        self._on_host.setdefault(device.host, []).append(device.index)
        self.residents[device.index] = []
        self.memory.add_device(device.index, device.memory_bytes)
        self._idle.add_device(device, self.now)

    def close_device(self, index: int) -> None:
        """Places no further trial on a device; those there keep it until they are released."""
        if index not in self._closed:
            if not self.residents[index]:
                self._idle.take(index)
            self._closed.add(index)

    def reopen_device(self, index: int) -> None:
        """Places trials on a closed device again."""
        self._closed.remove(index)
        self._refresh(index)

    def remove_device(self, index: int) -> list[int]:
        """Removes a device; the rows on it lose everything they hold, and are returned."""
        evicted = list(self.residents[index])
        for row in evicted:
            self.release(row)
        if index in self._closed:
            self.reopen_device(index)
        self._idle.remove_device(index)
        self.models.remove(self._devices[index])
        host = self._devices[index].host
        self._on_host[host].remove(index)
        if not self._on_host[host]:
            del self._on_host[host]
        del self.residents[index]
        self.caps.pop(index, None)
        self.eligible.remove(index)
        self.memory.remove_device(index)
        return evicted

    def place(
        self,
        row: int,
        width: float,
        need: MemoryNeed | None = None,
        *,
        near: int | None = None,
        only: bool = False,
        own_state: float = 0.0,
        host: str | None = None,
        allowed: Set[int] | None = None,
        one_host: bool = False,
        by_model: ByModel | None = None,
    ) -> tuple[int, ...] | None:
        """Gives ``row`` devices for ``width``; returns their indices, or ``None`` where it does not fit now.

        Args:
            row, width: the trial, which holds nothing yet, and its width.
            need: device memory, where it is known.
            near, only: device to prefer for a width of at most 1, and whether no other one will do.
            own_state: bytes reserved for the trial's own state, which its need includes: on ``near``, else everywhere.
            host: to prefer among hosts with equally idle and fast devices.
            allowed, one_host: the only devices that will do, ``None`` for all; whether all have to be of one host.
            by_model: how it does on unlike device models; ``None`` for the devices' own speeds.
        """
        chosen: tuple[int, ...] | None = None
        can_be_near = near is not None and width <= 1.0 and (allowed is None or near in allowed)
        if near is not None and can_be_near and self._admits(row, near, width, need, own_state, by_model):
            chosen = (near,)
        elif not only and width < 1.0:
            device = self._open_device(row, residents_at(width), need, host=host, allowed=allowed, by_model=by_model)
            chosen = None if device is None else (device,)
        elif not only:
            own = own_state if near is None else 0.0
            fits, speed_of = self._fits(need, allowed, own, by_model), self._speed_of(by_model)
            chosen = self._idle.choose(round(width), fits, host, one_host=one_host, speed_of=speed_of)
        if chosen is not None:
            self._hold(row, chosen, residents_at(width), self._need_on(chosen[0], need, by_model))
        return chosen

    def hold(self, row: int, devices: tuple[int, ...], width: float, need: MemoryNeed | None = None) -> None:
        """Gives ``row``, which holds nothing, exactly these devices, whether or not there is room."""
        self._hold(row, devices, residents_at(width), need)

    def tolerate(self, row: int, width: float) -> None:
        """Changes how many trials a row tolerates on the device it has."""
        self._tolerates[row] = residents_at(width)
        for index in self.held[row]:
            self._refresh(index)

    def limit(self, index: int) -> int:
        """Most trials that the residents of a device tolerate there, themselves included; 1 for an idle device."""
        return self._limit(index) if self.residents[index] else 1

    def cap(self, index: int, most: int) -> None:
        """Places at most so many trials, at least 1, on a device until it is idle again, or the cap is lifted."""
        self.caps[index] = most

    def lift_cap(self, index: int) -> None:
        """Lets the residents of a device alone decide again how many trials it takes."""
        if self.caps.pop(index, None) is not None:
            self._refresh(index)

    def is_open(self, index: int, width: float, by_model: ByModel | None = None) -> bool:
        """Whether a device takes one more trial of that width, memory apart: it is idle, or packed, and not full."""
        rows = self.residents[index]
        if not rows or index in self._closed:
            return index not in self._closed
        c = residents_at(width) if by_model is None else min(residents_at(width), self._on(index, by_model).packing)
        return width < 1.0 and len(rows) < min(self._limit(index), c)

    def has_open(self, width: float, by_model: ByModel | None = None) -> bool:
        """Whether enough devices are open to a trial of that width, its memory apart."""
        if width >= 1.0 or self._idle.count:
            return self._idle.count >= max(1, round(width))
        return self._open.find(residents_at(width), lambda _: True, None, (), by_model) is not None

    def release(self, row: int) -> None:
        """Frees everything that ``row`` holds."""
        self.memory.release(row)
        devices = self.held.pop(row)
        del self._tolerates[row]
        for index in devices:
            self.residents[index].remove(row)
            self._refresh(index)

    def move(
        self,
        row: int,
        devices: tuple[int, ...],
        width: float,
        need: MemoryNeed | None = None,
        *,
        old_devices_row: int | None = None,
    ) -> None:
        """Gives the row these devices, as :meth:`devices_for` or :meth:`fastest_idle` chose them just before.

        Args:
            row, devices, width, need: the trial, its new devices and width, and device memory, where it is known.
            old_devices_row: row that keeps the devices it leaves until that row is released; ``None`` frees them now.
        """
        left = tuple(index for index in self.held[row] if index not in devices)
        tolerates, placed, old_need = self._tolerates[row], self.memory.placed_need_of(row), self.memory.need_of(row)
        self.release(row)
        self._hold(row, devices, residents_at(width), need)
        if old_devices_row is not None and left:
            self._hold(old_devices_row, left, tolerates, placed)
            self.memory.set_need(old_devices_row, old_need)

    def devices_for(
        self,
        row: int,
        width: float,
        need: MemoryNeed | None = None,
        allowed: Set[int] | None = None,
        by_model: ByModel | None = None,
    ) -> tuple[int, ...] | None:
        """The devices that :meth:`move` can give a row for another width; changes nothing.

        A trial alone on its devices keeps them, unless another host can hold it whole and its own ones cannot; one
        that leaves a shared device moves. A width below 1 takes an open slot, or opens the trial's device to others.

        Args:
            row, width: a row that holds devices, and its new width.
            need, allowed, by_model: as in :meth:`place`.

        Returns:
            The devices; ``None`` if it cannot have that width now.
        """
        before = self.held[row]
        host, speed_of = self._devices[before[0]].host, self._speed_of(by_model)
        if width < 1.0:
            slot = self._open_device(
                row, residents_at(width), need, before, shared_only=True, host=host, allowed=allowed, by_model=by_model
            )
            if slot is None and len(self.residents[before[0]]) > residents_at(width):
                return None
            return (slot,) if slot is not None else self._idle.resized(before, 1)
        if all(len(self.residents[index]) == 1 for index in before):
            return self._idle.resized(before, round(width), self._fits(need, allowed, 0.0, by_model), speed_of)
        return self._idle.choose(round(width), self._fits(need, allowed, 0.0, by_model), host, speed_of=speed_of)

    def fastest_idle(
        self, need: MemoryNeed | None, host: str | None, allowed: Set[int] | None, by_model: ByModel | None
    ) -> int | None:
        """The idle device that is fastest for a trial and has room for it; ``None`` for none (see :meth:`place`)."""
        fits, speed_of = self._fits(need, allowed, 0.0, by_model), self._speed_of(by_model)
        chosen = self._idle.choose(1, fits, host, speed_of=speed_of)
        return None if chosen is None else chosen[0]

    def can_widen_in_place(self, row: int, width: float) -> bool:
        """Whether the host of a row's first device has enough idle devices for this width, memory apart."""
        return len(self._on_host) == 1 or self._idle.has_room_near(self.held[row], round(width))

    # -- choices ------------------------------------------------------------------------------------------

    def _admits(
        self, row: int, index: int, width: float, need: MemoryNeed | None, own_state: float, by_model: ByModel | None
    ) -> bool:
        """Whether a trial of a width of at most 1 fits on this device now."""
        if index not in self._devices or not self.groups.agree(row, index):
            return False
        fits = self.memory.fits(index, self._need_on(index, need, by_model), own_state=own_state)
        return fits and self.is_open(index, width, by_model)

    def _open_device(
        self,
        row: int,
        tolerates: int,
        need: MemoryNeed | None,
        avoid: tuple[int, ...] = (),
        *,
        shared_only: bool = False,
        host: str | None = None,
        allowed: Set[int] | None = None,
        by_model: ByModel | None = None,
    ) -> int | None:
        """The most idle device for one more packed trial: fewest residents, fastest, on that host, lowest index."""
        any_idle = not shared_only and self._idle.count > 0
        if any_idle and (idle := self.fastest_idle(need, host, allowed, by_model)) is not None:
            return idle

        def takes(index: int) -> bool:
            may = index not in avoid and (allowed is None or index in allowed) and self.groups.agree(row, index)
            return may and self.memory.fits(index, self._need_on(index, need, by_model))

        return self._open.find(tolerates, takes, host, self._on_host.get(host or "", ()), by_model)

    def _on(self, index: int, by_model: ByModel) -> OnModel:
        return by_model[self._devices[index].model]

    def _need_on(self, index: int, need: MemoryNeed | None, by_model: ByModel | None) -> MemoryNeed | None:
        return need if by_model is None else self._on(index, by_model).need

    def _speed_of(self, by_model: ByModel | None) -> SpeedOf | None:
        return None if by_model is None else lambda index: self._on(index, by_model).speed

    def _fits(
        self, need: MemoryNeed | None, allowed: Set[int] | None, own_state: float, by_model: ByModel | None
    ) -> _Fits:
        fits = self.memory.fits
        if by_model is not None:
            return lambda index: (
                (allowed is None or index in allowed)
                and fits(index, self._need_on(index, need, by_model), own_state=own_state)
            )
        if allowed is not None:
            return lambda index: index in allowed and (need is None or fits(index, need, own_state=own_state))
        return None if need is None else lambda index: fits(index, need)

    # -- bookkeeping --------------------------------------------------------------------------------------

    def _hold(self, row: int, devices: tuple[int, ...], tolerates: int, need: MemoryNeed | None) -> None:
        self.held[row] = devices
        self._tolerates[row] = tolerates
        self.memory.place(row, need)
        for index in devices:
            if not self.residents[index] and index not in self._closed:
                self._idle.take(index)
            self.residents[index].append(row)
            self._refresh(index)

    def _refresh(self, index: int) -> None:
        """Puts ``index`` among the idle or the open devices after its residents changed, unless it is closed."""
        if index in self._closed:
            return
        rows = self.residents[index]
        if not rows:
            self.caps.pop(index, None)
            self._idle.add(index, self.now)
        elif len(rows) < self._limit(index):
            self._open.push(index)

    def _limit(self, index: int) -> int:
        most = min(self._tolerates[row] for row in self.residents[index])
        return min(most, self.caps.get(index, most)) if self.caps else most
