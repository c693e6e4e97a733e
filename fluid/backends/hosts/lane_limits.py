"""How many idle lanes a device may have: processes that keep a paused trial, and take memory, descriptors and tasks."""

from __future__ import annotations

import os
import resource
import statistics
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from fluid.backends.base import HostRoom
from fluid.engine.placing.lanes import MOST_IDLE
from fluid.gpu.mps_support import MOST_CLIENTS
from fluid.processes.below import with_all_below
from fluid.processes.memory_left import memory_left

#: Descriptors that a lane takes in the driver, and the tasks that it has at least: the second is of its connection.
_DESCRIPTORS, _TASKS = 1, 2
#: Share that lanes may take of descriptors and tasks, and of the memory that is left.
_SHARE = 0.5
#: Most lanes that are measured.
_SAMPLE = 8


def idle_lane_limit(
    kind: str,
    room: HostRoom,
    *,
    devices: int = 1,
    busy: int = 1,
    processes: int = MOST_CLIENTS,
    most: int = MOST_IDLE,
) -> int:
    """Returns how many idle lanes a device may have; what their trials hold on a GPU bounds them besides.

    Args:
        kind: of the device, ``"cpu"`` or ``"gpu"``.
        room: on its machine.
        devices: that share the machine.
        busy: most lanes that run trials on a device at once.
        processes: most that a GPU takes.
        most: idle lanes, however much room there is.
    """
    shared = []
    if room.descriptors is not None:
        shared.append(_SHARE * room.descriptors / _DESCRIPTORS)
    if room.tasks is not None:
        shared.append(_SHARE * room.tasks / (room.lane_tasks or _TASKS))
    if kind == "cpu" and room.memory_left is not None and room.lane_bytes:
        # The lanes that there are have taken their part of what was left.
        shared.append(room.lanes + _SHARE * room.memory_left / room.lane_bytes)
    limits = [most, *(int(lanes / devices) - busy for lanes in shared)]
    if kind == "gpu":
        limits.append(processes - busy)
    return max(0, min(limits))


def room_here(lanes: Iterable[int] = (), root: str = "/") -> HostRoom:
    """Returns what there is on this machine, seen from this process.

    Args:
        lanes: processes of the lanes here.
        root: folder with ``proc`` and ``sys``.
    """
    lanes = list(lanes)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A lane may keep processes that its trial has started, such as a script.
    sampled = [with_all_below([process], root) for process in lanes[:_SAMPLE]]
    sizes = [sum(known) for each in sampled if (known := _known(private_bytes(process, root) for process in each))]
    tasks = [number for each in sampled if (number := sum(_tasks_of(process, root) for process in each))]
    return HostRoom(
        descriptors=None if soft == resource.RLIM_INFINITY else soft,
        tasks=min(_task_limits(root), default=None),
        memory_left=memory_left(root),
        lane_bytes=statistics.median(sizes) if sizes else None,
        lane_tasks=statistics.median(tasks) if tasks else None,
        lanes=len(lanes),
    )


def _known(sizes: Iterable[float | None]) -> list[float]:
    return [size for size in sizes if size is not None]


def private_bytes(process: int, root: str = "/") -> float | None:
    """Returns the bytes that a process shares with no other; ``None`` if it is gone, or the system does not say."""
    try:
        with open(os.path.join(root, f"proc/{process}/smaps_rollup"), encoding="ascii", errors="replace") as file:
            return sum(1024.0 * int(line.split()[1]) for line in file if line.startswith("Private_"))
    except OSError:
        return None


def _tasks_of(process: int, root: str) -> int:
    """How many tasks a process has; 0 if it is gone."""
    try:
        return len(os.listdir(os.path.join(root, f"proc/{process}/task")))
    except OSError:
        return 0


def _task_limits(root: str) -> Iterator[int]:
    """The limits of tasks of this process's control groups, version 1 or 2, each and those above it."""
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="ascii") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers and "pids" not in controllers.split(","):
            continue
        mounted, group = "sys/fs/cgroup/pids" if controllers else "sys/fs/cgroup", path.strip("/")
        while True:
            limit = Path(root, mounted, group, "pids.max")
            with suppress(OSError, ValueError):  # Also "max", for no limit.
                yield int(limit.read_text(encoding="ascii"))
            if not group:
                break
            group = os.path.dirname(group)
