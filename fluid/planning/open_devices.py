"""Open devices: shared devices with a slot for one more packed trial, the most idle and fastest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from fluid.planning.device_models import ByModel
from fluid.resources import Device


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
