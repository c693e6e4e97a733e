"""How many idle lanes a device may have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fluid.backends.base import HostRoom
from fluid.backends.hosts.lane_limits import idle_lane_limit, private_bytes, room_here
from fluid.engine.placing.lanes import MOST_IDLE


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (HostRoom(), 32),
        (HostRoom(descriptors=1024, tasks=4096), 32),
        (HostRoom(descriptors=256), 32 - 1),  # Half of 256 among 4 devices, less the one that is busy.
        (HostRoom(descriptors=64), 8 - 1),
        (HostRoom(tasks=128), 8 - 1),  # Two tasks each.
        (HostRoom(descriptors=4), 0),
        (HostRoom(memory_left=4e9), 32),  # No lane was measured.
        (HostRoom(memory_left=400e6, lane_bytes=10e6, lanes=8), (8 + 20) // 4 - 1),
        (HostRoom(memory_left=0.0, lane_bytes=10e6, lanes=8), 2 - 1),
    ],
)
def test_what_bounds_the_lanes_of_a_core(room: HostRoom, expected: int) -> None:
    assert idle_lane_limit("cpu", room, devices=4) == expected


def test_what_bounds_the_lanes_of_a_gpu() -> None:
    assert idle_lane_limit("gpu", HostRoom(memory_left=0.0, lane_bytes=1e9, lanes=1)) == MOST_IDLE
    assert idle_lane_limit("gpu", HostRoom(), busy=20) == 28, "of 48 clients of MPS"
    assert idle_lane_limit("gpu", HostRoom(), busy=48) == 0
    assert idle_lane_limit("gpu", HostRoom(), processes=1) == 0
    assert idle_lane_limit("gpu", HostRoom(tasks=200, lane_tasks=10), devices=2) == 5 - 1


def test_memory_that_a_lane_takes_is_measured() -> None:
    data = os.urandom(1 << 20) * 32
    found = private_bytes(os.getpid())
    assert found is not None and found >= len(data)
    assert private_bytes(2**22 + 1) is None, "there is no such process"
    room = room_here([os.getpid(), 2**22 + 1])
    assert room.lane_bytes is not None and room.lane_bytes >= len(data)
    assert room.lanes == 2 and room.descriptors and room.memory_left
    assert room.lane_tasks and room.lane_tasks >= len(os.listdir("/proc/self/task")), "and what the tests have started"


def test_what_a_lane_s_trial_has_started_counts() -> None:
    alone = room_here([os.getpid()])
    text = "data = bytearray(32 << 20); data[::4096] = b'x' * len(data[::4096]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        room = room_here([os.getpid()])
        child.kill()
    assert alone.lane_tasks and room.lane_tasks == alone.lane_tasks + 1
    assert alone.lane_bytes and room.lane_bytes and room.lane_bytes > alone.lane_bytes + (16 << 20)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/pids.max": "max", "a/pids.max": "500"}, 500),
        ("0::/a/b\n", {"a/b/pids.max": "300", "a/pids.max": "500"}, 300),
        ("3:cpu,pids:/a\n2:memory:/a\n", {"pids/a/pids.max": "70", "memory/a/pids.max": "5"}, 70),
        ("0::/elsewhere\n", {"pids.max": "90"}, 90),  # In a container.
        ("0::/a\n", {}, None),
    ],
)
def test_limits_of_tasks_of_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups, encoding="ascii")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")
    assert room_here(root=str(tmp_path)).tasks == expected
