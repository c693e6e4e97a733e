"""The embedded backend: a host in the driver's process. Needs nothing but Python."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fluid._logs import logger_of
from fluid.backends.base import DeviceBinding, GpuSharing, HostRoom, ScalingLimits
from fluid.backends.hosts.folders import new_session
from fluid.backends.hosts.host import Host, HostSettings, device_variables, explicit_threads, threads_per_gpu
from fluid.backends.lanes.pool import DEFAULT_GRACE_S, LaneBackend, LanePool, modules_to_load, require_lane_options
from fluid.elastic.messages import DEFAULT_PROCESS_GROUP
from fluid.engine.events import DeviceAdded, Event
from fluid.errors import InvalidFieldError, require_integer
from fluid.gpu.nvml import Gpu, find_gpus, no_gpu_reason
from fluid.keeping import parse_bytes
from fluid.lane.policy import DEFAULT_POLICY
from fluid.packing import DEFAULT_GPU_WAY, gpu_way_of
from fluid.resources import MOST_DEVICES, Cluster, Device, DeviceChoice, DeviceKind, available_cores

# -- chosen devices ------------------------------------------------------------------------------
#
# Which devices of a machine a user chose: by number, by index, by name such as ``"cuda:1"``, or as :class:`Device`.


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
        _tell_beyond(devices, names, kind)
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
    _tell_beyond(devices, [item for item in devices if not isinstance(item, Device)], kind)
    return require_gpus(Cluster.of(chosen).devices, gpus)


def _tell_beyond(given: object, items: Iterable[object], kind: DeviceKind) -> None:
    """Says what becomes of CPU devices that are named by an index for which there is no core."""
    cores = len(available_cores())
    for item in items:
        word, _, index = str(item).strip().rpartition(":")
        of_cpu = _KINDS.get(word) == "cpu" or (not word and kind == "cpu")
        if of_cpu and index.isdecimal() and int(index) >= cores:
            text = "devices=%r: there %s; the index of a CPU device is its name only: its trials run on any core"
            _log.warning(text, given, "is 1 core" if cores == 1 else f"are {cores} cores")
            return


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
    if not gpus and (why := no_gpu_reason()):
        return f"there are 0 GPUs: {why}; fluid doctor shows more"
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


# -- backend -------------------------------------------------------------------------------------


#: Loaded for lanes from the start, if the driver has loaded them; the rest is read from the trainables.
_LIKELY = ("numpy", "torch", "torchvision", "ray.tune")


class LocalBackend(LaneBackend):
    """Runs trials on the GPUs of this machine, or on its CPU cores where it has none.

    Processes start when it is made, so that what they import is loaded while the caller goes on. Close it, or
    use it as a context: then none of them is left. Should the driver be killed, they end within seconds.

    Args:
        devices: what to use: all there is, the first so many, or those chosen, as for
            :class:`fluid.executor.FluidExecutor`. The index of a GPU counts the visible ones. More CPU devices than
            cores may be asked for.
        preload: modules to load before the first lane is started; ``None`` for a guess. What trainables import
            is added when they are registered.
        run_dir: folder for the trials' output, logs and checkpoints; kept. ``None`` for a temporary one, which is
            deleted at the end: a sweep that is to be resumed needs that of its executor here, too.
        pin_cores: whether a CPU device's lanes run on one core only.
        grace: seconds a lane has to end by itself before it is killed.
        sharing: how lanes share a GPU, as ``packing`` of :class:`fluid.Sharing`; in turns by default. Daemons of NVIDIA
            MPS end with the backend.
        lane_policy: which trial a lane runs next if several have iterations left there; see
            :mod:`fluid.lane.policy`.
        process_group: what the devices of one trial communicate through: see :class:`fluid.executor.FluidExecutor`.
        checkpoint_memory_bytes: most bytes of host memory for checkpoints, or a text such as ``"8GB"``; ``None``, the
            default, for 0.85 of what the machine has left.

    Raises:
        InvalidFieldError: an argument cannot be used, there are fewer GPUs than asked for, or MPS was asked for and
            cannot be used.

    Example:
        >>> import fluid
        >>> from fluid.backends.local import LocalBackend
        >>> def train(config):
        ...     yield {"loss": config["lr"] ** 2}
        >>> backend = LocalBackend("cpu:0", checkpoint_memory_bytes="1GB")
        >>> with fluid.FluidExecutor(backend=backend, verbose=0):
        ...     fluid.run(train, {"lr": [0.5, 0.1]}, metric="loss", algorithm="grid", budget=1).best.config
        {'lr': 0.1}
    """

    #: There are no further devices, but those that are not needed can be parked.
    scaling_limits = ScalingLimits()

    def __init__(
        self,
        devices: DeviceChoice = None,
        *,
        preload: Sequence[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        pin_cores: bool = False,
        grace: float = DEFAULT_GRACE_S,
        sharing: str = DEFAULT_GPU_WAY,
        lane_policy: str = DEFAULT_POLICY,
        process_group: str = DEFAULT_PROCESS_GROUP,
        checkpoint_memory_bytes: int | str | None = None,
        _mps_program: str | None = None,
    ) -> None:
        grace = require_lane_options(grace=grace, lane_policy=lane_policy, process_group=process_group)
        self.lane_policy = lane_policy
        gpu_way_of(sharing)
        self._gpus = find_gpus()
        chosen = choose_devices(devices, self._gpus)
        self._bindings = bindings = _LocalBindings(
            gpus=self._gpus,
            pin_cores=pin_cores,
            threads=threads_per_gpu(len(self._gpus)),
            stand_ins=_mps_program is not None,
        )
        self._host = Host(
            HostSettings(
                session=new_session(run_dir),
                preload=tuple(modules_to_load(preload, _LIKELY)),
                policy=lane_policy,
                sharing=sharing,
                tokens=tuple(filter(None, map(bindings.token, chosen))),
                mps_program=_mps_program,
                checkpoint_memory_bytes=parse_bytes("checkpoint_memory_bytes", checkpoint_memory_bytes),
            )
        )
        #: Devices that are not used, in the order in which they were parked; and those that are about to be used again.
        self._parked: dict[int, None] = {}
        self._returning: list[int] = []
        #: Devices that were asked for while fewer were parked.
        self._missing = 0
        super().__init__(LanePool(chosen, self._host, bindings.bind, grace=grace, process_group=process_group))

    @property
    def run_folder(self) -> str:
        """Folder of the trials' output, logs and checkpoints."""
        return self._host.folders.run_folder

    @property
    def sharing(self) -> GpuSharing:
        """How lanes share a GPU: as was asked for, if that could be had."""
        return self._host.sharing

    def preload(self, modules: Sequence[str]) -> None:
        """Loads modules ahead: see :meth:`fluid.backends.base.Backend.preload`."""
        self._host.preload(modules)

    def loading(self) -> str:
        """The module that lanes wait for: see :meth:`fluid.backends.base.Backend.loading`."""
        return self._host.loading()

    def lane_room(self) -> HostRoom:
        """Returns what lanes find on this machine: see :meth:`fluid.backends.base.Backend.lane_room`."""
        return self._host.lane_room()

    def start_program(self, program: str) -> socket.socket:
        """Forks a process that is no lane: see :meth:`fluid.backends.base.Backend.start_program`."""
        return self._host.start_program(program)

    def can_give_back(self, device_id: int) -> bool:
        """Whether a device can be parked: each one can."""
        return any(device.index == device_id for device in self.devices())

    def give_back(self, device_id: int) -> None:
        """Parks a device that the engine no longer uses: no lane is left there, until it is asked for again."""
        self._parked[device_id] = None
        self._unpark()

    def ask(self, devices: int) -> None:
        """Takes parked devices again, until so many are in use; :meth:`poll` reports each as added.

        Args:
            devices: how many are to be in use, those that leave included.
        """
        self._missing = devices - (len(self.devices()) - len(self._parked))
        self._unpark()

    def _unpark(self) -> None:
        for device_id in list(self._parked)[: max(0, self._missing)]:
            del self._parked[device_id]
            self._missing -= 1
            self._returning.append(device_id)

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Waits for something to happen: see :meth:`fluid.backends.base.Backend.poll`."""
        events = super().poll(0.0 if self._returning else timeout)
        returning, self._returning = self._returning, []
        if returning:
            now = max(self.now(), events[-1].at if events else 0.0)
            events += [DeviceAdded(now, device) for device in self.devices() if device.index in returning]
        return events

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Makes further devices known: see :meth:`fluid.backends.base.Backend.add_devices`."""
        chosen = require_gpus(devices, self._gpus)
        for device in chosen:
            self._parked.pop(device.index, None)
        self._host.add_gpus(filter(None, map(self._bindings.token, chosen)))
        super().add_devices(chosen)


@dataclass(kw_only=True)
class _LocalBindings:
    """Tells how lanes are bound to devices of this machine.

    Attributes:
        gpus: the GPUs of this machine; a GPU device's index is its place among them.
        pin_cores: whether a CPU device's lanes run on one core only.
        threads: of each lane of a GPU, where ``OMP_NUM_THREADS`` does not say.
        stand_ins: whether CPU devices stand in for GPUs, in tests.
    """

    gpus: Sequence[Gpu]
    pin_cores: bool
    threads: int
    stand_ins: bool

    def bind(self, device: Device) -> DeviceBinding:
        """Returns how a lane is bound to a device."""
        is_gpu = device.kind == "gpu"
        cores = available_cores()
        return DeviceBinding(
            (device.index,),
            device.kind,
            token=self.token(device),
            threads=explicit_threads() or (self.threads if is_gpu else 1),
            cores=(cores[device.index % len(cores)],) if self.pin_cores and not is_gpu else (),
            bounded=device.memory_bytes is not None,
            variables=device_variables(device.index),
        )

    def token(self, device: Device) -> str:
        """The UUID of a GPU; empty for a CPU device, unless it stands in for one."""
        if device.kind == "gpu":
            return self.gpus[device.index].token
        return f"GPU-{device.index}" if self.stand_ins else ""
