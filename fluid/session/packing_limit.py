"""How many processes a device takes: clients of MPS, one in an exclusive compute mode; and how many idle lanes."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from fluid._logs import logger_of
from fluid.backends.base import Backend, HostRoom, MeasuredBackend, ReplayingBackend
from fluid.backends.hosts.lane_limits import idle_lane_limit, room_here
from fluid.engine.placing.lanes import MOST_IDLE, Lanes
from fluid.gpu.mps_support import MOST_CLIENTS, foreign_daemon
from fluid.gpu.nvml import describe_gpus

_log = logger_of("fluid.session")


class ProcessLimit(NamedTuple):
    """How many processes a GPU takes.

    Attributes:
        most: the number; ``None`` if it is not known to be limited.
        why: why not more, as a clause.
    """

    most: int | None = None
    why: str = ""


def process_limit(backend: Backend) -> ProcessLimit:
    """Returns how many processes each GPU of a backend takes.

    Limits that are found only later, such as those of other nodes' GPUs, apply once a lane cannot start
    (:meth:`fluid.devices.occupancy.Occupancy.cap`).
    """
    if isinstance(backend, ReplayingBackend):
        return ProcessLimit()  # Its devices are none of this machine.
    hosts = {device.host for device in backend.devices() if device.kind == "gpu"}
    if not hosts:
        return ProcessLimit()
    if backend.sharing.way == "mps" or foreign_daemon(os.environ) is not None:
        return ProcessLimit(MOST_CLIENTS, "an MPS server takes no more clients on a GPU")
    if hosts == {"localhost"}:
        modes = {gpu.compute_mode or "" for gpu in describe_gpus()}
        if modes and all(mode.startswith("EXCLUSIVE") for mode in modes):
            return ProcessLimit(1, f"the compute mode of the GPUs is {min(modes)}, and MPS is not used")
    return ProcessLimit()


#: Seconds between two looks at how many idle lanes a device may have.
_LOOK_S = 10.0


class IdleLanes:
    """Tells the engine how many idle lanes a device may have, as lanes come and memory goes.

    Args:
        lanes: the engine's.
        backend: where they run.
        busy: most lanes that run trials on a device at once.
    """

    def __init__(self, lanes: Lanes, backend: Backend, busy: int) -> None:
        self._lanes = lanes
        self._backend = backend
        self._busy = busy
        self._look_at = 0.0

    def look(self, now: float) -> None:
        """Looks again if it is time to; ``now`` is that, in seconds."""
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._lanes.most_idle = idle_limit(self._backend, busy=self._busy)
            # What cannot be saved is lost with its lane: only what the machine has bounds it.
            self._lanes.most_processes = idle_limit(self._backend, busy=self._busy, most=sys.maxsize)


def idle_limit(backend: Backend, *, busy: int, most: int = MOST_IDLE) -> int:
    """Returns how many idle lanes each device of a backend may have; to be asked again as lanes come and go.

    On other machines than the driver's, memory and tasks are not known: there the descriptors of the driver bound them.

    Args:
        backend: where lanes run.
        busy: most lanes that run trials on a device at once.
        most: however much room there is.
    """
    if isinstance(backend, ReplayingBackend):
        return most
    devices = backend.devices()
    room = backend.lane_room() if isinstance(backend, MeasuredBackend) else HostRoom(room_here().descriptors)
    exclusive = process_limit(backend).most == 1
    return min(
        (
            idle_lane_limit(kind, room, devices=len(devices), busy=busy, exclusive=exclusive, most=most)
            for kind in {device.kind for device in devices}
        ),
        default=0,
    )


def bounded_packing(packing: int, limit: ProcessLimit) -> int:
    """Returns ``packing``, the most trials on one device, or fewer if GPUs take fewer processes.

    Each trial on a GPU has a lane of its own, and an idle lane is used before another one starts.
    """
    if limit.most is None or packing <= limit.most:
        return packing
    _log.warning("at most %d of %d trials are packed on a GPU: %s", limit.most, packing, limit.why)
    return limit.most
