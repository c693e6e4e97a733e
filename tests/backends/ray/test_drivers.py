"""Drivers that end, and that are killed: what they leave on the nodes of a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_drive import PATIENCE, ROOT, eventually, in_host_memory, parent_of

ray = pytest.importorskip("ray")

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


DRIVER = """
import os, sys, ray
from fluid.backends.ray import RayBackend
from fluid.engine.commands import StartLane, StartTrial
from fluid.engine.events import IterationDone
from fluid.trainables.payload import payload_of
class Pid:
    def __init__(self, config): pass
    def step(self): return {"pids": [os.getpid(), os.getppid()]}
if __name__ == "__main__":
    with RayBackend(None, run_dir=sys.argv[1], preload=[]) as backend:
        for index in (0, len(backend.devices()) - 1):
            backend.execute([StartLane(index, index)])
            backend.register(f"t{index}", payload_of(Pid, {}))
            backend.execute([StartTrial(f"t{index}", (index,), iterations=10**9 if sys.argv[2] == "run" else 1)])
        pids = {}
        while len(pids) < 2:
            done = [event for event in backend.poll(60) if isinstance(event, IterationDone)]
            pids |= {event.lane_id: event.metrics["pids"] for event in done}
        print(*pids[0], *pids[index], flush=True)
        while sys.argv[2] == "run":
            backend.poll(None)
    print(ray.is_initialized(), flush=True)
"""


def start_driver(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": ROOT, **environment}
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "run"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_a_killed_driver_leaves_nothing_on_any_node_within_ten_seconds(
    cluster: Any, tmp_path: Path, processes: Any
) -> None:
    with start_driver(tmp_path, "run", RAY_ADDRESS=cluster.address) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        lanes_and_servers = [*pids, *map(parent_of, (pids[1], pids[3]))]
        processes.watch(*lanes_and_servers, parent_of(parent_of(pids[3])))
        driver.kill()
    assert processes.have_ended(within=10.0)
    eventually(lambda: not in_host_memory(tmp_path))
    eventually(lambda: ray.available_resources().get("CPU") == 6)


def test_ray_is_started_where_there_is_none_and_ended_again(tmp_path: Path, processes: Any) -> None:
    with start_driver(tmp_path, "end", RAY_ADDRESS="") as driver:
        out, _ = driver.communicate(timeout=PATIENCE)
    *pids, is_initialized = out.split()
    assert is_initialized == "False" and driver.returncode == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
