"""The embedded backend: lanes are processes of this machine, forked from a warm server. Needs nothing but Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from fluid.backends.base import Sharing
from fluid.backends.hosts.gpu_sharing import WAYS, LaneSharing
from fluid.backends.hosts.host import ForkLauncher
from fluid.backends.lanes.backend import LaneBackend, modules_to_load, require_lane_options
from fluid.backends.lanes.pool import DEFAULT_GRACE_S, LanePool
from fluid.elastic.messages import DEFAULT_PROCESS_GROUP
from fluid.errors import InvalidFieldError, require_integer, require_one_of
from fluid.gpu.nvml import Gpu, find_gpus
from fluid.lane.policy import DEFAULT_POLICY
from fluid.resources import Cluster, Device, available_cores

#: Loaded for lanes from the start, if the driver has loaded them; the rest is read from the trainables.
_LIKELY = ("numpy", "torch", "torchvision", "ray.tune")


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
        process_group: what the devices of one trial communicate through: see :class:`fluid.executor.FluidExecutor`.

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
        launcher = ForkLauncher(
            chosen,
            gpus,
            run_dir=run_dir,
            preload=modules_to_load(preload, _LIKELY),
            pin_cores=pin_cores,
            policy=lane_policy,
        )
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
            count = len(available_cores()) if devices is None else require_integer("devices", devices, at_least=1)
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
