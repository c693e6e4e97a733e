"""MPS on two nodes of a real cluster: each GPU has a daemon of its own.

CPU devices stand in for GPUs, and the daemon is real in all but that; see tests/backends/hosts/test_mps_sharing.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mps_program import Fake
from ray_drive import OTHER_MACHINE, THIS_MACHINE, Drive
from waiting import eventually

from fluid.backends.base import GpuSharing
from fluid.engine.commands import RunIteration
from fluid.engine.events import IterationDone, LaneLost
from fluid.resources import Device

ray = pytest.importorskip("ray")

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SEEN = {"pipe": "os.environ.get('CUDA_MPS_PIPE_DIRECTORY')", "gpu": "os.environ['CUDA_VISIBLE_DEVICES']"}


def daemon_of(pipe: str) -> int:
    return int(Path(pipe, "nvidia-cuda-mps-control.pid").read_text(encoding="ascii"))


def test_memory_of_rays_object_store_is_left_to_it(make: Callable[..., Drive]) -> None:
    drive = make(1)
    drive.lanes(0)
    launcher = drive.backend._launcher
    (node,) = (node for node in ray.nodes() if node["NodeID"] == drive.backend._devices.node)
    assert launcher._own._settings.reserved_bytes == node["Resources"]["object_store_memory"] > 0


def test_a_fault_ends_the_lanes_of_its_node_only(make: Callable[..., Drive], tmp_path: Path, processes: Any) -> None:
    devices = [Device(0, host=THIS_MACHINE), Device(1, host=OTHER_MACHINE)]
    drive = make(devices, sharing="mps", _mps_program=str(Fake(tmp_path).program))
    assert drive.backend.sharing == GpuSharing("mps")
    here, there, beside = drive.lanes(0, 1, 1)
    seen = [drive.evaluate(lane, **SEEN) for lane in (here, there, beside)]
    assert [each["gpu"] for each in seen] == ["GPU-0", "GPU-1", "GPU-1"]
    pipes = [each["pipe"] for each in seen]
    assert pipes[0] != pipes[1] == pipes[2]
    daemons = [daemon_of(pipe) for pipe in pipes[:2]]
    processes.watch(daemons[1])

    drive.start("bystander", here, 1)
    drive.start("culprit", there, 1)
    culprit = drive.until(IterationDone, trial_id="culprit").metrics["pid"]
    Path(pipes[1], "fault").touch()
    os.kill(culprit, signal.SIGKILL)
    lost = {drive.until(LaneLost).lane_id for _ in range(2)}
    assert lost == {there, beside}
    (again,) = drive.lanes(1)  # It is not started before the daemon is back.
    assert drive.evaluate(again, **SEEN) == seen[1], "new lanes find the daemon where it was"
    assert processes.have_ended(), "the old daemon"
    drive.do(RunIteration("bystander", (here,), 1))
    drive.until(IterationDone, trial_id="bystander", iteration=2)
    assert daemon_of(pipes[0]) == daemons[0]

    processes.watch(*map(daemon_of, pipes[:2]))
    drive.backend.close()
    assert processes.have_ended()
    eventually(lambda: not any(map(os.path.exists, pipes)))
