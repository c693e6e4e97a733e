"""What a TrialGroup runs on: devices, the cluster they form, and the memory a trial needs there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of

DeviceKind = Literal["gpu", "cpu"]

#: Share of a device's memory that trials may fill (docs/theory.md, section 8).
DEFAULT_MEMORY_WATERMARK = 0.9
#: More devices than this are taken for a slip of the keyboard.
MOST_DEVICES = 1_000_000


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one CPU core where there is no GPU.

    Args:
        index: the device's identity within its cluster.
        host: name of the machine that holds it; wide trials prefer devices of one host.
        kind: ``"gpu"`` or ``"cpu"``.
        speed: iterations per second relative to a device of speed 1. A data-parallel trial advances at the
            pace of its slowest device.
        memory_bytes: memory of the device, ``None`` where it does not bound packing. For a CPU it is what trials
            there may take of the host's, which is then measured.
    """

    index: int
    host: str = "localhost"
    kind: DeviceKind = "cpu"
    speed: float = 1.0
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        require_integer("index", self.index, at_least=0)
        if not isinstance(self.host, str):
            raise InvalidFieldError("host", self.host, "must be a string")
        require_one_of("kind", self.kind, ("gpu", "cpu"))
        if require_number("speed", self.speed, at_least=0.0) == 0.0:
            raise InvalidFieldError("speed", self.speed, "must be above 0")
        if self.memory_bytes is not None:
            require_number("memory_bytes", self.memory_bytes, at_least=0.0)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Device memory one trial needs (docs/theory.md, section 8), in bytes.

    Args:
        persistent_bytes: held between iterations (weights, optimizer state).
        ephemeral_bytes: needed on top of that at the peak of one iteration.
    """

    persistent_bytes: float = 0.0
    ephemeral_bytes: float = 0.0

    def __post_init__(self) -> None:
        require_number("persistent_bytes", self.persistent_bytes, at_least=0.0)
        require_number("ephemeral_bytes", self.ephemeral_bytes, at_least=0.0)

    @property
    def peak_bytes(self) -> float:
        """Bytes held while an iteration runs."""
        return self.persistent_bytes + self.ephemeral_bytes


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices a job may use, in order of their index.

    Args:
        devices: at least one device; indices are unique.
        memory_watermark: share of each device's memory that trials may fill.
    """

    devices: tuple[Device, ...]
    memory_watermark: float = DEFAULT_MEMORY_WATERMARK
    _by_index: dict[int, Device] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        if not self.devices:
            raise InvalidFieldError("devices", self.devices, "a cluster needs at least one device")
        for device in self.devices:
            if not isinstance(device, Device):
                raise InvalidFieldError("devices", device, "must be a Device")
        watermark = require_number("memory_watermark", self.memory_watermark, at_least=0.0)
        if not 0.0 < watermark <= 1.0:
            raise InvalidFieldError("memory_watermark", watermark, "must be in (0, 1]")
        by_index = {device.index: device for device in self.devices}
        if len(by_index) < len(self.devices):
            indices = [device.index for device in self.devices]
            twice = sorted({index for index in indices if indices.count(index) > 1})
            raise InvalidFieldError("devices", twice, "these device indices occur more than once")
        object.__setattr__(self, "devices", tuple(by_index[index] for index in sorted(by_index)))
        object.__setattr__(self, "_by_index", by_index)

    @classmethod
    def of(cls, devices: int | Iterable[Device], *, kind: DeviceKind = "gpu") -> Cluster:
        """Makes a cluster of ``devices`` alike devices on one host, or of the devices given."""
        if isinstance(devices, Iterable):
            return cls(tuple(devices))
        count = require_integer("devices", devices, at_least=1, at_most=MOST_DEVICES)
        return cls(tuple(Device(index, kind=kind) for index in range(count)))

    def __len__(self) -> int:
        """n, the number of devices."""
        return len(self.devices)

    def __getitem__(self, index: int) -> Device:
        """Returns the device of that index; raises ``KeyError`` if the cluster has none."""
        return self._by_index[index]

    def usable_bytes(self, device: Device) -> float:
        """Bytes that trials may fill on ``device``: its memory times the watermark."""
        return float("inf") if device.memory_bytes is None else device.memory_bytes * self.memory_watermark


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a trial runs.

    Attributes:
        width: devices the trial is given: ``1/p`` (one of p co-resident trials), ``1``, or ``2..d``.
        device_ids: indices of those devices; one for a width of at most 1.
    """

    width: float
    device_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        wanted = max(1, round(self.width))
        if len(self.device_ids) != wanted:
            raise InvalidFieldError("device_ids", self.device_ids, f"width {self.width:g} takes {wanted} devices")
