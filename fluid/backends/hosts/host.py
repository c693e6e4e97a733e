"""Starts lanes on this machine: forked from a warm server, each bound to its device. It owns the run's folders."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from fluid.backends.base import LaneConnected, LaneExited
from fluid.backends.hosts import host_memory
from fluid.backends.hosts.folders import make_run_folder
from fluid.backends.hosts.forkserver import ForkServerProcess
from fluid.backends.hosts.gpu_sharing import LaneSharing
from fluid.backends.hosts.stack_copies import request_stacks
from fluid.errors import FluidError
from fluid.gpu.nvml import Gpu
from fluid.lane.checkpoint_store import persist_checkpoints
from fluid.lane.culprit_note import read_running_trial
from fluid.lane.messages import LaneOptions
from fluid.lane.stack_dump import lane_log
from fluid.resources import Device, available_cores

#: What a module loads only once it is used, which then takes each lane seconds: PyTorch's optimizers, when one is made.
_LATE = {"torch.optim": ("torch._dynamo",)}


class ForkLauncher:
    """Implements :class:`fluid.backends.base.Launcher` by a fork server.

    Args:
        devices: what lanes can be started on at first.
        gpus: the GPUs of this machine; a GPU device's index is its place among them.
        run_dir: folder for the trials' output, logs and checkpoints; kept. ``None`` for a temporary one.
        preload: modules to load before the first lane is forked.
        pin_cores: whether a CPU device's lanes run on one core only.
        policy: which trial a lane runs next if several have iterations left.

    Attributes:
        run_folder: that folder.
        sharing: how lanes share a GPU; in turns, unless it is set before the first lane is launched.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        gpus: Sequence[Gpu],
        *,
        run_dir: str | os.PathLike[str] | None,
        preload: Sequence[str],
        pin_cores: bool,
        policy: str,
    ) -> None:
        self._gpus = gpus
        self._policy = policy
        self.sharing = LaneSharing("timeslice", {})
        self._pin_cores = pin_cores
        self._threads = _threads_per_gpu(sum(device.kind == "gpu" for device in devices))
        self._temporary = run_dir is None
        self.run_folder = make_run_folder(run_dir)
        mark = secrets.token_hex(16)
        self._memory_folder, self._memory_lock = _make_memory_folder(self.run_folder, mark, temporary=self._temporary)
        self._memory_bytes = host_memory.checkpoint_bytes(self._memory_folder) / len(devices)
        self._notes = tempfile.mkdtemp(prefix="fluid-notes-", dir=self._memory_folder or self.run_folder)
        try:
            self._server = ForkServerProcess(
                self.run_folder,
                memory_folder=self._memory_folder,
                mark=mark,
                temporary=self._temporary,
                preload=preload,
            )
        except BaseException:
            self._delete_folders()
            raise

    @property
    def wants_to_write(self) -> bool:
        """Whether requests wait for the server to read."""
        return self._server.wants_to_write

    def launch(self, lane_id: int, device: Device) -> LaneConnected:
        """Forks a lane; the connection can be used at once, before the process runs.

        Raises:
            FluidError: the run folder was deleted, so the lane could not run.
        """
        if not os.path.isdir(os.path.join(self.run_folder, "logs")):
            raise FluidError(f"the run folder {self.run_folder} is gone: it was deleted while the session ran")
        is_gpu = device.kind == "gpu"
        cores = available_cores()
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
        """Kills a lane; :meth:`poll` reports its end."""
        self._server.kill(lane_id)

    def dump_stacks(self, lane_id: int, trial_id: str) -> None:
        """Has a lane's stacks written to the log of the trial that runs there, soon."""
        request_stacks(self.run_folder, lane_id, trial_id, lambda: self._server.dump_stacks(lane_id))

    def preload(self, modules: Sequence[str]) -> None:
        """Loads what trials are going to import, before the next lane is forked."""
        self._server.preload(_with_late(modules))

    def fileno(self) -> int:
        """A descriptor that is readable when lanes have ended; -1 while the server does not run."""
        return self._server.fileno()

    def poll(self) -> list[LaneConnected | LaneExited]:
        """Returns the lanes that have ended since the last call."""
        return [
            LaneExited(lane_id, reason + self._hint(lane_id), blameless)
            for lane_id, reason, blameless in self._server.poll()
        ]

    def look(self) -> None:
        """Continues the fork server if it was stopped; it looks at the lanes itself."""
        self._server.look()

    def culprit(self, lane_id: int) -> str | None:
        """Returns the trial whose code ran when a lane died, if any."""
        return read_running_trial(self._note(lane_id))

    def abandon(self) -> None:
        """Called in a process forked from the driver: closes descriptors that are the driver's."""
        self._server.abandon()
        self._release_memory()

    def close(self) -> None:
        """Ends the server and every lane, and clears the folders; no process is left when it returns."""
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
        """Names the log that the lane wrote before it died, if it wrote anything."""
        log = lane_log(self.run_folder, lane_id)
        with suppress(OSError):
            if os.path.getsize(log) and not self._temporary:
                return f"; see {log}"
        return ""

    def _note(self, lane_id: int) -> str:
        return os.path.join(self._notes, f"lane-{lane_id}")


def _with_late(modules: Sequence[str]) -> list[str]:
    """Adds what these modules load late, at the end: lanes without it come no later than lanes with it."""
    late = [ahead for name in modules for user, ahead in _LATE.items() if f"{name}.".startswith(f"{user}.")]
    return [*modules, *itertools.chain.from_iterable(late)]


def _make_memory_folder(run_folder: str, mark: str, *, temporary: bool) -> tuple[str, int]:
    """Returns a private folder in host memory and its lock; an empty name if there can be none."""
    host_memory.sweep()
    try:
        folder = tempfile.mkdtemp(
            prefix=f"fluid-{os.getuid()}-", dir=host_memory.RAM_DISK
        )  # Only this user may read it.
        return folder, host_memory.enter(folder, run_folder, mark, temporary=temporary)
    except OSError:
        return "", -1


def _threads_per_gpu(gpus: int) -> int:
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return max(1, len(available_cores()) // max(1, gpus))
