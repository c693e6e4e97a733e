"""What backends whose lanes are in a pool have in common, however they come by devices and processes."""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from fluid.backends.lanes.pool import LanePool
from fluid.elastic.messages import require_process_group
from fluid.engine.commands import Command
from fluid.engine.events import Event
from fluid.errors import require_number, require_one_of
from fluid.lane.policy import POLICIES
from fluid.resources import Device
from fluid.trainables.payload import TrialPayload

_Self = TypeVar("_Self", bound="LaneBackend")


class LaneBackend:
    """Implements :class:`fluid.backends.base.Backend` by a pool of lanes. Use it as a context, or close it.

    Args:
        pool: the lanes; the backend owns it from now on, and closes it at the end of the interpreter, or when nobody
            holds the backend any more, for callers who forget.
    """

    def __init__(self, pool: LanePool) -> None:
        self._pool = pool
        self._finalizer = weakref.finalize(self, pool.close)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def devices(self) -> list[Device]:
        """Returns the devices, in order of their index."""
        return self._pool.devices()

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Makes further devices known: see :meth:`fluid.backends.base.Backend.add_devices`."""
        self._pool.add_devices(devices)

    def now(self) -> float:
        """Returns the time, seconds, on the clock of the events."""
        return self._pool.now()

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        """Says what a trial is: see :meth:`fluid.backends.base.Backend.register`."""
        self._pool.register(trial_id, payload)

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


def require_lane_options(*, grace: float, lane_policy: str, process_group: str) -> None:
    """Checks what every such backend is told about its lanes.

    Raises:
        InvalidFieldError: an argument cannot be used.
        MissingDependencyError: Horovod is asked for and not installed.
    """
    require_number("grace", grace, at_least=0.0)
    require_one_of("lane_policy", lane_policy, tuple(POLICIES))
    require_process_group(process_group)


def modules_to_load(preload: Sequence[str] | None, likely: Sequence[str]) -> list[str]:
    """Returns the modules to load for lanes from the start: those named, or the likely ones the driver has loaded."""
    return [name for name in likely if name in sys.modules] if preload is None else list(preload)


def make_run_folder(run_dir: str | os.PathLike[str] | None) -> str:
    """Returns the run's folder, which is there then: the one given, or a new temporary one."""
    folder = tempfile.mkdtemp(prefix="fluid-run-") if run_dir is None else os.path.abspath(run_dir)
    os.makedirs(folder, exist_ok=True)
    return folder
