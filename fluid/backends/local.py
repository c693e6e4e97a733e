"""The embedded backend: lanes are processes of this machine, forked from a warm server. Needs nothing but Python."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from fluid.backends.base import LaneConnected, LaneExited
from fluid.backends.forkserver import ForkServer
from fluid.backends.pool import DEFAULT_GRACE_S, LanePool
from fluid.engine.commands import Command
from fluid.engine.events import Event
from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.lane_messages import LaneOptions
from fluid.lane_note import read_note
from fluid.lane_store import settle
from fluid.nvml import Gpu, find_gpus
from fluid.resources import Cluster, Device

#: Loaded for lanes from the start, if the driver has loaded them; the rest is read from the trainables.
_LIKELY = ("numpy", "torch", "torchvision")
_RAM_DISK = "/dev/shm"
#: Share of what is free on the RAM disk that checkpoints may take, all lanes together.
_MEMORY_SHARE = 0.5


class LocalBackend:
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

    Raises:
        InvalidFieldError: an argument cannot be used, or there are fewer GPUs than asked for.
    """

    def __init__(
        self,
        devices: int | Iterable[Device] | None = None,
        *,
        preload: Sequence[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        pin_cores: bool = False,
        grace: float = DEFAULT_GRACE_S,
    ) -> None:
        require_number("grace", grace, at_least=0.0)
        self._gpus = gpus = find_gpus()
        chosen = choose_devices(devices, gpus)
        modules = [name for name in _LIKELY if name in sys.modules] if preload is None else list(preload)
        launcher = _Launcher(chosen, gpus, run_dir, modules, pin_cores)
        self._run_folder = launcher.run_folder
        self._pool = LanePool(chosen, launcher, grace=grace)
        # Also at the end of the interpreter, for callers who forget.
        self._finalizer = weakref.finalize(self, self._pool.close)

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def run_folder(self) -> str:
        """Folder of the trials' output, logs and checkpoints."""
        return self._run_folder

    def devices(self) -> list[Device]:
        """Returns the devices, in order of their index."""
        return self._pool.devices()

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Makes further devices known: see :meth:`fluid.backends.base.Backend.add_devices`."""
        chosen = list(devices)
        _check_gpus(chosen, self._gpus)
        self._pool.add_devices(chosen)

    def now(self) -> float:
        """Returns the time, seconds, on the clock of the events."""
        return self._pool.now()

    def register(self, trial_id: str, trainable: Any, config: Mapping[str, Any]) -> None:
        """Says what a trial is: see :meth:`fluid.backends.base.Backend.register`."""
        self._pool.register(trial_id, trainable, config)

    def forget(self, trial_id: str) -> None:
        """Says that no command will name a trial any more; its checkpoints are deleted."""
        self._pool.forget(trial_id)

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out: see :meth:`fluid.backends.base.Backend.execute`."""
        self._pool.execute(commands)

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Waits for something to happen: see :meth:`fluid.backends.base.Backend.poll`."""
        return self._pool.poll(timeout)

    def wake(self) -> None:
        """Makes :meth:`poll` return; may be called from any thread."""
        self._pool.wake()

    def close(self) -> None:
        """Ends every lane; no process is left when it returns. Closing twice is harmless."""
        self._finalizer()


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


class _Launcher:
    """Forks lanes and says which device is theirs. It owns the run's folders."""

    def __init__(
        self,
        devices: Sequence[Device],
        gpus: Sequence[Gpu],
        run_dir: str | os.PathLike[str] | None,
        preload: Sequence[str],
        pin_cores: bool,
    ) -> None:
        self._gpus = gpus
        self._pin_cores = pin_cores
        self._threads = _threads_per_gpu(sum(device.kind == "gpu" for device in devices))
        self._temporary = run_dir is None
        self.run_folder = tempfile.mkdtemp(prefix="fluid-run-") if run_dir is None else os.path.abspath(run_dir)
        os.makedirs(self.run_folder, exist_ok=True)
        self._memory_folder, memory_bytes = _make_memory_folder()
        self._memory_bytes = memory_bytes / len(devices)
        self._notes = tempfile.mkdtemp(prefix="fluid-notes-", dir=self._memory_folder or self.run_folder)
        try:
            self._server = ForkServer(
                self.run_folder, memory_folder=self._memory_folder, temporary=self._temporary, preload=preload
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
        )
        return LaneConnected(lane_id, self._server.fork(options))

    def kill(self, lane_id: int) -> None:
        self._server.kill(lane_id)

    def preload(self, modules: Sequence[str]) -> None:
        self._server.preload(modules)

    def fileno(self) -> int:
        return self._server.fileno()

    def news(self) -> list[LaneConnected | LaneExited]:
        return [LaneExited(lane_id, reason + self._hint(lane_id)) for lane_id, reason in self._server.news()]

    def culprit(self, lane_id: int) -> str | None:
        return read_note(self._note(lane_id))

    def abandon(self) -> None:
        self._server.abandon()

    def close(self) -> None:
        try:
            self._server.close()
        finally:
            self._delete_folders()

    def _delete_folders(self) -> None:
        shutil.rmtree(self._notes, ignore_errors=True)
        settle(self._memory_folder, self.run_folder, temporary=self._temporary)

    def _hint(self, lane_id: int) -> str:
        """Points to what the lane wrote before it died, if anything."""
        log = os.path.join(self.run_folder, "logs", f"lane-{lane_id}.log")
        with suppress(OSError):
            if os.path.getsize(log) and not self._temporary:
                return f"; see {log}"
        return ""

    def _note(self, lane_id: int) -> str:
        return os.path.join(self._notes, f"lane-{lane_id}")


def _make_memory_folder() -> tuple[str, float]:
    """Returns a private folder in host memory, empty if there can be none, and how many bytes to keep there."""
    try:
        folder = tempfile.mkdtemp(prefix=f"fluid-{os.getuid()}-", dir=_RAM_DISK)  # Nobody else may read it.
        return folder, shutil.disk_usage(folder).free * _MEMORY_SHARE
    except OSError:
        return "", 0.0


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
