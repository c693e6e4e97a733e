"""Device models: which models the devices have, and how trials do on unlike ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fluid.resources import Cluster, Device, MemoryNeed

#: By device model: iterations per second, relative to a device of speed 1.
Speeds = Mapping[str | None, float]


class DeviceModels:
    """The models of the devices that there are; the one that was there first comes first.

    Attributes:
        first: that one; ``None`` if it is unknown, or there is no device.
        are_several: whether there is another one.
    """

    def __init__(self) -> None:
        #: Devices of each model; no zeros.
        self._counts: dict[str | None, int] = {}
        self._with_given_speed = 0
        self.first: str | None = None
        self.are_several = False

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[str | None]:
        return iter(self._counts)

    def __contains__(self, model: object) -> bool:
        return model in self._counts

    @property
    def has_given_speeds(self) -> bool:
        """Whether the user said how fast devices are: the speed of one of them is not 1."""
        return self._with_given_speed > 0

    def add(self, device: Device) -> None:
        """Adds a device."""
        self._counts[device.model] = self._counts.get(device.model, 0) + 1
        self._with_given_speed += device.speed != 1.0
        self._refresh()

    def remove(self, device: Device) -> None:
        """Removes a device."""
        self._counts[device.model] -= 1
        if not self._counts[device.model]:
            del self._counts[device.model]
        self._with_given_speed -= device.speed != 1.0
        self._refresh()

    def _refresh(self) -> None:
        self.first, self.are_several = next(iter(self._counts), None), len(self._counts) > 1


@dataclass(frozen=True, slots=True)
class OnModel:
    """What a trial does on devices of one model.

    Attributes:
        speed: iterations per second, relative to a device of speed 1.
        packing: c there.
        need: device memory that it needs there; ``None`` if unknown.
    """

    speed: float
    packing: int
    need: MemoryNeed | None = None


#: By device model, for each that there is.
ByModel = Mapping[str | None, OnModel]


def speeds_of_all(work: Mapping[str, float], speeds: Mapping[str, Speeds]) -> dict[str | None, float]:
    """How fast each device model is for trials of several profile keys together.

    A plan knows one speed of each device. It is that at which a device would do all of the work, one trial after
    another: ``sum_i h_i / sum_i (h_i / s_i)``, with h_i the seconds of work of key i and s_i its speed on the model. It
    is exact for one key, and for keys of equal speeds. For keys of different speeds, the plan predicts the time that a
    device needs for its average share of the work; a trial whose key gains more from a model than the others is
    predicted to end later there than it does.

    Args:
        work: seconds of work at speed 1, above 0, by profile key.
        speeds: of each of these keys, by device model. Models that some keys lack, as all devices of these went before
            the keys came, are left out.
    """
    total = sum(work.values())
    models = [model for model in speeds[next(iter(work))] if all(model in speeds[key] for key in work)]
    return {model: total / sum(seconds / speeds[key][model] for key, seconds in work.items()) for model in models}


def at_speeds(cluster: Cluster, speeds: Speeds) -> Cluster:
    """The same devices, at the speeds of their models."""
    if all(device.speed == speeds[device.model] for device in cluster.devices):
        return cluster
    devices = tuple(replace(device, speed=speeds[device.model]) for device in cluster.devices)
    return replace(cluster, devices=devices)
