"""The embedded backend: lanes are processes of this machine, forked from a warm server. Needs nothing but Python."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress

from fluid.backends.base import LaneConnected, LaneExited, Sharing
from fluid.backends.lanes import host_memory
from fluid.backends.lanes.backend import LaneBackend, make_run_folder, modules_to_load, require_lane_options
from fluid.backends.lanes.forkserver import ForkServer
from fluid.backends.lanes.gpu_sharing import WAYS, LaneSharing
from fluid.backends.lanes.pool import DEFAULT_GRACE_S, LanePool
from fluid.elastic.messages import DEFAULT_PROCESS_GROUP
from fluid.errors import InvalidFieldError, require_integer, require_one_of
from fluid.gpu.nvml import Gpu, find_gpus
from fluid.lane.checkpoint_store import persist_checkpoints
from fluid.lane.culprit_note import read_running_trial
from fluid.lane.messages import LaneOptions
from fluid.lane.policy import DEFAULT_POLICY
from fluid.resources import Cluster, Device

#: Loaded for lanes from the start, if the driver has loaded them; the rest is read from the trainables.
_LIKELY = ("numpy", "torch", "torchvision", "ray.tune")
#: What a module loads only once it is used, which then takes each lane seconds: PyTorch's optimizers, when one is made.
_LATE = {"torch.optim": ("torch._dynamo",)}
#: Share of what is free on the RAM disk that checkpoints may take, all lanes together.
_MEMORY_SHARE = 0.5


class LocalBackend(LaneBackend):
    """Runs trials on the GPUs of this machine, or on its CPU cores where it has none.

    Processes start when it is made, so that what they import is loaded while the caller goes on. Close it, or
    use it as a context: then none of them is left. Should the driver be killed, they end within seconds.

    Args:
        devices: what to use: all there is, the first so many, or those given. The index of a GPU counts the
            visible ones. More CPU devices than cores may be asked for.
        preload: modules to load before the first lane is started; ``None`` for a guess. What trainables import
            is added when they are registered.
        run_dir: folder for the trials' output, logs and checkpoints; kept. ``None`` for a temporary one.
        pin_cores: whether a CPU device's lanes run on one core only.
        grace: seconds a lane has to end by itself before it is killed.
        sharing: how lanes share a GPU: ``"timeslice"`` in turns, ``"mps"`` by NVIDIA MPS, whose daemon ends with the
            backend, ``"auto"`` by MPS where it can be used, or else in turns.
        lane_policy: which trial a lane runs next if several have iterations left there; see
            :mod:`fluid.lane.policy`.
        process_group: what the devices of one trial talk through: see :class:`fluid.executor.FluidExecutor`.

    Raises:
        InvalidFieldError: an argument cannot be used, there are fewer GPUs than asked for, or MPS was asked for and
            cannot be used.
    """

    def __init__(
        self,
        devices: int | Iterable[Device] | None = None,
        *,
        preload: Sequence[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        pin_cores: bool = False,
        grace: float = DEFAULT_GRACE_S,
        sharing: str = "timeslice",
        lane_policy: str = DEFAULT_POLICY,
        process_group: str = DEFAULT_PROCESS_GROUP,
        _mps_program: str | None = None,
    ) -> None:
        require_lane_options(grace=grace, lane_policy=lane_policy, process_group=process_group)
        require_one_of("sharing", sharing, WAYS)
        self._gpus = gpus = find_gpus()
        chosen = choose_devices(devices, gpus)
        launcher = _Launcher(chosen, gpus, run_dir, modules_to_load(preload, _LIKELY), pin_cores, lane_policy)
        self._run_folder = launcher.run_folder
        try:
            # While the fork server loads its modules.
            tokens = _tokens(chosen, gpus, stand_ins=_mps_program is not None)
            self._sharing = launcher.sharing = LaneSharing(sharing, tokens, program=_mps_program)
        except BaseException:
            launcher.close()
            raise
        watchdog = self._sharing.watchdog
        super().__init__(LanePool(chosen, launcher, grace=grace, process_group=process_group, watchdog=watchdog))

    @property
    def run_folder(self) -> str:
        """Folder of the trials' output, logs and checkpoints."""
        return self._run_folder

    @property
    def sharing(self) -> Sharing:
        """How lanes share a GPU: as was asked for, if that could be had."""
        return self._sharing.sharing

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Makes further devices known: see :meth:`fluid.backends.base.Backend.add_devices`."""
        chosen = list(devices)
        _check_gpus(chosen, self._gpus)
        super().add_devices(chosen)


def choose_devices(devices: int | Iterable[Device] | None, gpus: Sequence[Gpu]) -> list[Device]:
    """Returns the devices to use: see :class:`LocalBackend`.

    Raises:
        InvalidFieldError: there are not as many GPUs.
    """
    if devices is None or isinstance(devices, int):
        if not gpus:
            count = len(_cores()) if devices is None else require_integer("devices", devices, at_least=1)
            return list(Cluster.of(count, kind="cpu").devices)
        count = len(gpus) if devices is None else require_integer("devices", devices, at_least=1)
        if count > len(gpus):
            raise InvalidFieldError("devices", devices, f"there are {len(gpus)} GPUs")
        return [Device(index, kind="gpu", memory_bytes=gpus[index].memory_bytes) for index in range(count)]
    chosen = list(Cluster.of(devices).devices)
    _check_gpus(chosen, gpus)
    return chosen


def _check_gpus(devices: Iterable[Device], gpus: Sequence[Gpu]) -> None:
    for device in devices:
        if device.kind == "gpu" and device.index >= len(gpus):
            raise InvalidFieldError("devices", device, f"there are {len(gpus)} GPUs")


def _tokens(devices: Iterable[Device], gpus: Sequence[Gpu], *, stand_ins: bool) -> dict[int, str]:
    """UUIDs of the GPUs among the devices, by index; in tests CPU cores may stand in for some."""
    named = {device.index: gpus[device.index].token for device in devices if device.kind == "gpu"}
    return {device.index: f"GPU-{device.index}" for device in devices} | named if stand_ins else named


class _Launcher:
    """Forks lanes and says which device is theirs. It owns the run's folders."""

    def __init__(
        self,
        devices: Sequence[Device],
        gpus: Sequence[Gpu],
        run_dir: str | os.PathLike[str] | None,
        preload: Sequence[str],
        pin_cores: bool,
        policy: str,
    ) -> None:
        self._gpus = gpus
        self._policy = policy
        #: Nothing is shared before it is set.
        self.sharing = LaneSharing("timeslice", {})
        self._pin_cores = pin_cores
        self._threads = _threads_per_gpu(sum(device.kind == "gpu" for device in devices))
        self._temporary = run_dir is None
        self.run_folder = make_run_folder(run_dir)
        self._memory_folder, self._memory_lock = _make_memory_folder(self.run_folder, temporary=self._temporary)
        memory_bytes = shutil.disk_usage(self._memory_folder).free * _MEMORY_SHARE if self._memory_folder else 0.0
        self._memory_bytes = memory_bytes / len(devices)
        self._notes = tempfile.mkdtemp(prefix="fluid-notes-", dir=self._memory_folder or self.run_folder)
        try:
            self._server = ForkServer(
                self.run_folder,
                memory_folder=self._memory_folder,
                temporary=self._temporary,
                preload=preload,
            )
        except BaseException:
            self._delete_folders()
            raise

    @property
    def wants_to_write(self) -> bool:
        return self._server.wants_to_write

    def launch(self, lane_id: int, device: Device) -> LaneConnected:
        is_gpu = device.kind == "gpu"
        cores = _cores()
        options = LaneOptions(
            lane_id,
            kind=device.kind,
            visible=self._gpus[device.index].token if is_gpu else "",
            threads=self._threads if is_gpu else 1,
            core=cores[device.index % len(cores)] if self._pin_cores and not is_gpu else None,
            run_folder=self.run_folder,
            memory_folder=self._memory_folder,
            memory_bytes=self._memory_bytes,
            note=self._note(lane_id),
            policy=self._policy,
            environment=self.sharing.lane_environment(device.index),
            bounded=device.memory_bytes is not None,
        )
        return LaneConnected(lane_id, self._server.fork(options))

    def kill(self, lane_id: int) -> None:
        self._server.kill(lane_id)

    def preload(self, modules: Sequence[str]) -> None:
        self._server.preload(_with_late(modules))

    def fileno(self) -> int:
        return self._server.fileno()

    def news(self) -> list[LaneConnected | LaneExited]:
        return [LaneExited(lane_id, reason + self._hint(lane_id)) for lane_id, reason in self._server.news()]

    def culprit(self, lane_id: int) -> str | None:
        return read_running_trial(self._note(lane_id))

    def abandon(self) -> None:
        self._server.abandon()
        self._release_memory()

    def close(self) -> None:
        try:
            self._server.close()
        finally:
            self._delete_folders()

    def _delete_folders(self) -> None:
        shutil.rmtree(self._notes, ignore_errors=True)
        persist_checkpoints(self._memory_folder, self.run_folder, temporary=self._temporary)
        self._release_memory()

    def _release_memory(self) -> None:
        lock, self._memory_lock = self._memory_lock, -1
        if lock >= 0:
            os.close(lock)

    def _hint(self, lane_id: int) -> str:
        """Points to what the lane wrote before it died, if anything."""
        log = os.path.join(self.run_folder, "logs", f"lane-{lane_id}.log")
        with suppress(OSError):
            if os.path.getsize(log) and not self._temporary:
                return f"; see {log}"
        return ""

    def _note(self, lane_id: int) -> str:
        return os.path.join(self._notes, f"lane-{lane_id}")


def _with_late(modules: Sequence[str]) -> list[str]:
    """Adds what these modules load late; last, so that lanes without it would not come later than those with it."""
    late = [ahead for name in modules for user, ahead in _LATE.items() if f"{name}.".startswith(f"{user}.")]
    return [*modules, *itertools.chain.from_iterable(late)]


def _make_memory_folder(run_folder: str, *, temporary: bool) -> tuple[str, int]:
    """Returns a private folder in host memory and its lock; an empty name if there can be none."""
    host_memory.sweep()
    try:
        folder = tempfile.mkdtemp(prefix=f"fluid-{os.getuid()}-", dir=host_memory.RAM_DISK)  # Nobody else may read it.
        return folder, host_memory.enter(folder, run_folder, temporary=temporary)
    except OSError:
        return "", -1


def _threads_per_gpu(gpus: int) -> int:
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return max(1, len(_cores()) // max(1, gpus))


def _cores() -> list[int]:
    """The CPU cores that this process may use: fewer, in a container, than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
