"""Which devices of a machine a user chose: by number, by index, by name such as ``"cuda:1"``, or as :class:`Device`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fluid._logs import logger_of
from fluid.errors import InvalidFieldError, require_integer
from fluid.gpu.nvml import Gpu
from fluid.resources import MOST_DEVICES, Cluster, Device, DeviceChoice, DeviceKind, available_cores

_log = logger_of(__name__)
_KINDS: dict[str, DeviceKind] = {"cuda": "gpu", "gpu": "gpu", "cpu": "cpu"}
#: CPU devices that any machine may have, and those for each of its cores.
_MOST_CPUS, _MOST_PER_CORE = 1024, 16
_FORMS = 'must be a number of devices, a list of indices, or names such as "cuda:1", "cpu:0" or "all"'


def choose_devices(devices: DeviceChoice, gpus: Sequence[Gpu]) -> list[Device]:
    """Returns the devices of this machine to use.

    Args:
        devices: how many of the machine's GPUs, or of its CPU cores if it has no GPU; or which, by their indices;
            ``None`` or ``"all"`` for all. ``"cuda"`` and ``"cpu"`` are all of one kind, ``"cuda:1"`` is one of them.
            More CPU devices than cores may be asked for, but not more than the machine can have processes for: 1,024,
            or 16 for each core where that is more.
        gpus: the GPUs of the machine; the index of a GPU counts these.

    Raises:
        InvalidFieldError: they cannot be had.
    """
    kind: DeviceKind = "gpu" if gpus else "cpu"
    if devices is None:
        return _all(kind, gpus)
    if isinstance(devices, str):
        names = [name.strip() for name in devices.split(",")]
        return _first_of_each([device for name in names for device in _named(devices, name, kind, gpus)])
    if not isinstance(devices, Iterable):
        count = require_integer("devices", devices, at_least=1, at_most=MOST_DEVICES)
        _require_few(devices, 0 if gpus else count)
        if gpus and count > len(gpus):
            raise InvalidFieldError("devices", devices, f"{_number_of(gpus)}; {_cpu_instead(count)}")
        return [_device(kind, index, gpus) for index in range(count)]
    chosen: list[Device] = []
    for item in devices:
        if isinstance(item, Device):
            chosen.append(item)
        elif isinstance(item, str):
            chosen += _named(item, item.strip(), kind, gpus)
        else:
            chosen.append(_indexed(item, kind, require_integer("devices", item, at_least=0), gpus))
    _require_few(devices, sum(device.kind == "cpu" for device in chosen))
    return require_gpus(Cluster.of(chosen).devices, gpus)


def _require_few(devices: object, cpus: int) -> None:
    """Refuses more CPU devices than a machine can serve: each may have a process."""
    cores = len(available_cores())
    if cpus > (most := max(_MOST_CPUS, _MOST_PER_CORE * cores)):
        given = devices if isinstance(devices, int) else cpus
        reason = f"at most {most:,} CPU devices can be had on {cores} cores: each is served by a process"
        raise InvalidFieldError("devices", given, reason)


def require_gpus(devices: Iterable[Device], gpus: Sequence[Gpu]) -> list[Device]:
    """Returns the devices, or raises :class:`InvalidFieldError` where the machine lacks a GPU of them."""
    chosen = list(devices)
    for device in chosen:
        if device.kind == "gpu" and device.index >= len(gpus):
            raise InvalidFieldError("devices", device, _number_of(gpus))
    return chosen


def _named(given: str, name: str, kind: DeviceKind, gpus: Sequence[Gpu]) -> list[Device]:
    """The devices of a name: ``"all"``, ``"cuda"``, ``"cuda:1"`` or ``"1"``."""
    if name == "all":
        return _all(kind, gpus)
    if name.isdecimal():
        return [_indexed(given, kind, int(name), gpus)]
    word, colon, index = name.partition(":")
    if word not in _KINDS or (colon and not index.isdecimal()):
        raise InvalidFieldError("devices", given, _FORMS)
    if colon:
        return [_indexed(given, _KINDS[word], int(index), gpus)]
    return _all(_KINDS[word], gpus, given)


def _all(kind: DeviceKind, gpus: Sequence[Gpu], given: str = "") -> list[Device]:
    if kind == "gpu" and not gpus:
        raise InvalidFieldError("devices", given, _number_of(gpus))
    return [_device(kind, index, gpus) for index in range(len(gpus) if kind == "gpu" else len(available_cores()))]


def _indexed(given: object, kind: DeviceKind, index: int, gpus: Sequence[Gpu]) -> Device:
    if kind == "gpu" and index >= len(gpus):
        raise InvalidFieldError("devices", given, _number_of(gpus))
    if index >= MOST_DEVICES:
        raise InvalidFieldError("devices", given, f"an index must be below {MOST_DEVICES:,}")
    return _device(kind, index, gpus)


def _number_of(gpus: Sequence[Gpu]) -> str:
    return "there is 1 GPU" if len(gpus) == 1 else f"there are {len(gpus)} GPUs"


def _cpu_instead(count: int) -> str:
    """How to ask for CPU devices on a machine with GPUs."""
    return f'for CPU devices pass devices=[f"cpu:{{i}}" for i in range({count})], or "cpu" for all cores'


def _device(kind: DeviceKind, index: int, gpus: Sequence[Gpu]) -> Device:
    if kind == "cpu":
        return Device(index, kind="cpu")
    gpu = gpus[index]
    if gpu.available_bytes < gpu.memory_bytes:
        held = (gpu.memory_bytes - (gpu.free_bytes or 0.0)) / 2**30
        _log.warning("other processes hold %.1f of %.1f GiB of %s", held, gpu.memory_bytes / 2**30, gpu.token)
    return Device(index, kind="gpu", memory_bytes=gpu.available_bytes, model=gpu.name)


def _first_of_each(devices: list[Device]) -> list[Device]:
    """In order of their index; refuses one that was named twice."""
    return list(Cluster.of(devices).devices)
