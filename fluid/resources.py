"""Devices, the cluster they form, and what a trial needs of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of, require_text

DeviceKind = Literal["gpu", "cpu"]

#: Share of a device's memory that trials may fill (docs/theory.md, section 8).
DEFAULT_MEMORY_WATERMARK = 0.9
#: A request for more devices than this is refused as a typing error.
MOST_DEVICES = 1_000_000
#: Absorbs rounding errors where the theory means exact arithmetic (floor, strict comparisons).
TOLERANCE = 1e-9


def available_cores() -> list[int]:
    """Returns the CPU cores that this process may use: in a container, often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True, repr=False)
class Device:
    """One GPU, or one CPU core on a machine without GPUs.

    Example:
        >>> from fluid import Device
        >>> Device(0, kind="gpu", memory_bytes=24 * 2**30).host
        'localhost'

    Args:
        index: number of the device, unique within its cluster.
        host: name of the machine that holds it, ``"localhost"`` by default; wide trials prefer devices of one host.
        kind: ``"gpu"`` or ``"cpu"``, the default.
        speed: iterations per second relative to a device of speed 1, the default. A data-parallel trial advances at
            the pace of its slowest device. If no device has another speed than 1, speeds are measured by ``model``.
        memory_bytes: memory of the device; ``None``, the default, if it does not limit packing. For a CPU, the share of
            the host's memory that trials on this core may take; their memory is then measured.
        model: name of the product, such as ``"NVIDIA A100-SXM4-80GB"``; ``None``, the default, if unknown.
        tags: names that :class:`Requires` may ask for; none by default.

    Raises:
        InvalidFieldError: a field cannot be used.
    """

    index: int
    host: str = "localhost"
    kind: DeviceKind = "cpu"
    speed: float = 1.0
    memory_bytes: float | None = None
    model: str | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_integer("index", self.index, at_least=0)
        if not isinstance(self.host, str):
            raise InvalidFieldError("host", self.host, "must be a string")
        require_one_of("kind", self.kind, ("gpu", "cpu"))
        if require_number("speed", self.speed, at_least=0.0) == 0.0:
            raise InvalidFieldError("speed", self.speed, "must be above 0")
        if self.memory_bytes is not None:
            require_number("memory_bytes", self.memory_bytes, at_least=0.0)
        if self.model is not None:
            require_text("model", self.model)
        object.__setattr__(self, "tags", _tags(self.tags))

    def __repr__(self) -> str:
        """Leaves out model and tags where there are none."""
        text = f"Device(index={self.index}, host={self.host!r}, kind={self.kind!r}, speed={self.speed}"
        text += f", memory_bytes={self.memory_bytes}"
        text += "" if self.model is None else f", model={self.model!r}"
        return text + (f", tags={self.tags})" if self.tags else ")")


#: Which devices to use: how many, which by index, name (``"cuda:1"``) or as such, or ``None`` for all.
DeviceChoice = int | str | Iterable[int | str | Device] | None


def require_devices(name: str, value: object) -> float | None:
    """Returns the devices that a trial is to have: ``None``, a whole number, or a fraction of one device.

    Raises:
        InvalidFieldError: it is neither.
    """
    if value is None:
        return None
    number = require_number(name, value, at_least=0.0)
    if number == 0.0:
        raise InvalidFieldError(name, value, "must be above 0")
    if number < 1.0:
        return number
    try:
        return require_integer(name, number, at_least=1, at_most=MOST_DEVICES)
    except InvalidFieldError as error:
        raise InvalidFieldError(name, value, "must be a whole number, or a fraction of one device") from error


@dataclass(frozen=True, slots=True, repr=False)
class Requires:
    """What a device must have to run a trial. A field that is left out asks for nothing.

    Example:
        >>> from fluid import Device, Requires
        >>> requires = Requires(model="H100|A100", memory_bytes=60 * 2**30)
        >>> requires.met_by(Device(0, kind="gpu", model="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30))
        True
        >>> print(requires)
        model 'H100|A100', memory of at least 60 GiB

    Args:
        memory_bytes: least memory of the device, in bytes. A device whose memory is unknown has enough.
        kind: ``"gpu"`` or ``"cpu"``.
        model: name of the product, or several, divided by ``|``. The words of one of them must occur in the device's
            model, in that order: ``"A100"`` and ``"A100-80G"`` are both met by ``"NVIDIA A100-SXM4-80GB"``. Case does
            not matter.
        host: name of the machine, or several, divided by ``|``.
        tags: tags that the device must have, all of them; one may be given as a string.
        wait: whether to wait for such a device where there is none yet, or none any more; ``False``, the default, to
            refuse the trial, and to fail it when the last such device goes.

    Raises:
        InvalidFieldError: a field cannot be used.
    """

    memory_bytes: float | None = None
    kind: DeviceKind | None = None
    model: str | None = None
    host: str | None = None
    tags: tuple[str, ...] = ()
    wait: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.wait, bool):
            raise InvalidFieldError("wait", self.wait, "must be True or False")
        if self.memory_bytes is not None:
            least = require_number("memory_bytes", self.memory_bytes, at_least=0.0)
            object.__setattr__(self, "memory_bytes", least)
        if self.kind is not None:
            require_one_of("kind", self.kind, ("gpu", "cpu"))
        for name in ("model", "host"):
            value = getattr(self, name)
            if value is not None and not all(part.strip() for part in require_text(name, value).split("|")):
                raise InvalidFieldError(name, value, "must be a name, or several divided by |")
        object.__setattr__(self, "tags", _tags(self.tags))

    def __repr__(self) -> str:
        """Leaves out what is not asked for."""
        shown = (field for field in fields(self) if getattr(self, field.name) != field.default)
        return f"Requires({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in shown)})"

    @property
    def asks(self) -> bool:
        """Whether it asks anything of a device."""
        return bool(self.memory_bytes or self.kind or self.model or self.host or self.tags)

    def __str__(self) -> str:
        parts = [f"{name} {value!r}" for name in ("kind", "model", "host") if (value := getattr(self, name))]
        parts += [f"tag {tag!r}" for tag in self.tags]
        if self.memory_bytes:
            parts.append(f"memory of at least {self.memory_bytes / 2**30:.4g} GiB")
        return ", ".join(parts) or "nothing"

    def filled_from(self, group: Requires | None) -> Requires:
        """What a trial requires whose group requires something too: a field that it leaves out is the group's.

        Example:
            >>> from fluid import Requires
            >>> Requires(kind="gpu").filled_from(Requires(kind="cpu", host="n1"))
            Requires(kind='gpu', host='n1')
        """
        if group is None:
            return self
        return Requires(
            memory_bytes=group.memory_bytes if self.memory_bytes is None else self.memory_bytes,
            kind=self.kind or group.kind,
            model=self.model or group.model,
            host=self.host or group.host,
            tags=self.tags or group.tags,
            wait=self.wait or group.wait,
        )

    def met_by(self, device: Device) -> bool:
        """Whether a device has all that is required."""
        least, has = self.memory_bytes, device.memory_bytes
        if least is not None and has is not None and has < least:
            return False
        if self.kind not in (None, device.kind) or not set(self.tags) <= set(device.tags):
            return False
        if self.host is not None and device.host not in [name.strip() for name in self.host.split("|")]:
            return False
        return self.model is None or any(_names(part, device.model) for part in self.model.split("|"))


def _tags(tags: Iterable[str] | str) -> tuple[str, ...]:
    """Tags in order, each once."""
    if isinstance(tags, str):
        tags = (tags,)
    if not isinstance(tags, Iterable):
        raise InvalidFieldError("tags", tags, "must be strings in a tuple")
    return tuple(sorted({require_text("tags", tag) for tag in tags}))


def _names(wanted: str, model: str | None) -> bool:
    """Whether the words of a name occur in a device's model, in that order."""
    words = iter(_words(model or ""))
    return all(any(word == found for found in words) for word in _words(wanted))


def _words(name: str) -> list[str]:
    # Ray writes 80G where NVIDIA writes 80GB.
    return [re.sub(r"(?<=\dg)b$", "", word) for word in re.findall(r"[a-z0-9]+", name.lower())]


def whole_bytes(memory: float) -> float:
    """Rounds up to whole bytes: sums and differences of them are exact, so what fits is not decided by rounding."""
    return float(math.ceil(memory))


def usable_bytes(memory_bytes: float, watermark: float) -> float:
    """Whole bytes that trials may fill of a device with so many, up to the watermark."""
    return float(math.floor(memory_bytes * watermark))


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Device memory that one trial needs (docs/theory.md, section 8), in whole bytes: fractions are rounded up.

    Example:
        >>> from fluid import MemoryNeed
        >>> MemoryNeed(persistent_bytes=2e9, ephemeral_bytes=5e8).peak_bytes
        2500000000.0

    Args:
        persistent_bytes: held between iterations (weights, optimizer state); 0 by default.
        ephemeral_bytes: needed on top of that at the peak of one iteration; 0 by default.
        shared_bytes: those of the persistent ones that are there once for all trials that are fused with it, such as
            data on the device, and the frozen base of adapters; 0 by default.

    Raises:
        InvalidFieldError: one of them is negative or not a number, or more is shared than persistent.
    """

    persistent_bytes: float = 0.0
    ephemeral_bytes: float = 0.0
    shared_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("persistent_bytes", "ephemeral_bytes", "shared_bytes"):
            value = getattr(self, name)
            # Spelled out for what a lane measures, with each iteration.
            if type(value) is not float or not (value.is_integer() and value >= 0.0):
                object.__setattr__(self, name, whole_bytes(require_number(name, value, at_least=0.0)))
        if self.shared_bytes > self.persistent_bytes:
            raise InvalidFieldError(
                "shared_bytes", self.shared_bytes, f"must be at most persistent_bytes, {self.persistent_bytes:.0f}"
            )

    @property
    def peak_bytes(self) -> float:
        """Bytes held while an iteration runs."""
        return self.persistent_bytes + self.ephemeral_bytes

    @property
    def own_persistent_bytes(self) -> float:
        """Bytes held between iterations that are shared with no other trial."""
        return self.persistent_bytes - self.shared_bytes

    @property
    def own_peak_bytes(self) -> float:
        """Bytes held while an iteration runs that are shared with no other trial."""
        return self.peak_bytes - self.shared_bytes

    def covers(self, other: MemoryNeed) -> bool:
        """Whether no part of another need is larger."""
        return (
            other.persistent_bytes <= self.persistent_bytes
            and other.ephemeral_bytes <= self.ephemeral_bytes
            and other.own_persistent_bytes <= self.own_persistent_bytes
        )

    @classmethod
    def most(cls, *needs: MemoryNeed) -> MemoryNeed:
        """Returns the largest of each part, persistent, own and ephemeral; of no needs, a need of nothing.

        An average would admit a trial that does not fit.
        """
        return cls._of_parts(max, needs)

    @classmethod
    def least(cls, *needs: MemoryNeed) -> MemoryNeed:
        """Returns the smallest of each part, persistent, own and ephemeral; of no needs, a need of nothing."""
        return cls._of_parts(min, needs)

    @classmethod
    def _of_parts(cls, of: Callable[[Iterable[float]], float], needs: Sequence[MemoryNeed]) -> MemoryNeed:
        if not needs:
            return cls()
        persistent, own = of(need.persistent_bytes for need in needs), of(need.own_persistent_bytes for need in needs)
        return cls(persistent, of(need.ephemeral_bytes for need in needs), persistent - own)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices that planners may use, in order of their index.

    Example:
        >>> from fluid import Cluster, Device
        >>> cluster = Cluster.of(4)
        >>> len(cluster), cluster[2]
        (4, Device(index=2, host='localhost', kind='gpu', speed=1.0, memory_bytes=None))
        >>> Cluster((Device(0, memory_bytes=1e9),)).usable_bytes(Device(0, memory_bytes=1e9))
        900000000.0

    Args:
        devices: at least one device; indices are unique.
        memory_watermark: share of each device's memory that trials may fill, in (0, 1]; 0.9 by default.

    Raises:
        InvalidFieldError: there is no device, an index occurs twice, or the watermark is out of range.
    """

    devices: tuple[Device, ...]
    memory_watermark: float = DEFAULT_MEMORY_WATERMARK
    _by_index: dict[int, Device] = field(init=False, repr=False, compare=False, hash=False)
    #: Bytes that trials may fill on each device, ascending.
    rooms: tuple[float, ...] = field(init=False, repr=False, compare=False, hash=False)

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
        object.__setattr__(self, "rooms", tuple(sorted(map(self.usable_bytes, self.devices))))

    @classmethod
    def of(cls, devices: int | Iterable[Device], *, kind: DeviceKind = "gpu") -> Cluster:
        """Makes a cluster of ``devices`` equal devices on one host, or of the devices given."""
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
        return math.inf if device.memory_bytes is None else usable_bytes(device.memory_bytes, self.memory_watermark)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a trial runs.

    Example:
        >>> from fluid import Placement
        >>> Placement(0.5, (3,))  # one of two co-resident trials on device 3
        Placement(width=0.5, device_ids=(3,))

    Attributes:
        width: number of devices that the trial is given: ``1/p`` (one of p co-resident trials), ``1``, or ``2..d``.
        device_ids: indices of those devices; one for a width of at most 1.

    Raises:
        InvalidFieldError: the number of devices does not fit the width.
    """

    width: float
    device_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        wanted = max(1, round(self.width))
        if len(self.device_ids) != wanted:
            raise InvalidFieldError("device_ids", self.device_ids, f"width {self.width:g} takes {wanted} devices")
