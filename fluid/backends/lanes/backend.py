"""What the local and the Ray backend have in common, wherever their devices and processes come from."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

from fluid.backends.lanes.pool import LanePool
from fluid.elastic.messages import require_process_group
from fluid.errors import require_number, require_one_of
from fluid.keeping import WorstKept
from fluid.lane.policy import POLICIES

_Self = TypeVar("_Self", bound="LaneBackend")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _of_pool(
    method: Callable[Concatenate[LanePool, _Arguments], _Result],
) -> Callable[Concatenate[LaneBackend, _Arguments], _Result]:
    """Makes a method of a backend that calls the same one of its pool."""

    @functools.wraps(method)
    def call(self: LaneBackend, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return method(self._pool, *args, **kwargs)

    return call


class LaneBackend:
    """Implements :class:`fluid.backends.base.Backend` by a pool of lanes. Use it as a context, or close it.

    It is an object of its own because the finalizer holds the pool: one that is not closed is closed when it is
    garbage, or at the end of the interpreter.

    Args:
        pool: the lanes; the backend owns it from now on.
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

    devices = _of_pool(LanePool.devices)
    add_devices = _of_pool(LanePool.add_devices)
    now = _of_pool(LanePool.now)
    register = _of_pool(LanePool.register)
    forget = _of_pool(LanePool.forget)
    execute = _of_pool(LanePool.execute)
    poll = _of_pool(LanePool.poll)
    end = _of_pool(LanePool.end)
    wake = _of_pool(LanePool.wake)
    forward_output = _of_pool(LanePool.forward_output)
    read_output = _of_pool(LanePool.read_output)
    hear_records = _of_pool(LanePool.hear_records)

    def set_bar(self, group: str, bar: WorstKept | None, room: int | None) -> None:
        """Tells lanes what is worth keeping: see :class:`fluid.backends.retention.KeepingBackend`."""
        self._pool.retention.set_bar(group, bar, room)

    def discard_kept(self, host: str, path: str, *, demote: bool) -> None:
        """Removes a checkpoint on another machine: see :class:`fluid.backends.retention.KeepingBackend`."""
        self._pool.places.discard(host, path, demote=demote)

    def fetch_kept(self, host: str, path: str, target: str) -> None:
        """Copies a checkpoint from another machine: see :class:`fluid.backends.retention.KeepingBackend`."""
        self._pool.retention.fetch(host, path, target)

    def close(self) -> None:
        """Ends every lane; no process is left when it returns. Closing twice is harmless."""
        self._finalizer()


def require_lane_options(*, grace: float, lane_policy: str, process_group: str) -> None:
    """Checks the options of lanes that every such backend has.

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
