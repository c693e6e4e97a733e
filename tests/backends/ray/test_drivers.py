"""Drivers that end, that are killed and that lose their cluster: what they leave on the nodes of a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_drive import PATIENCE, ROOT, in_host_memory, parent_of
from waiting import eventually

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
            pids |= {event.lane_id: event.metrics.decode()["pids"] for event in done}
        print(*pids[0], *pids[index], flush=True)
        while sys.argv[2] == "run":
            backend.poll(None)
    print(ray.is_initialized(), flush=True)
"""


def start_driver(tmp_path: Path, *arguments: str, source: str = DRIVER, **environment: str) -> subprocess.Popen[str]:
    (tmp_path / "driver.py").write_text(source, encoding="utf-8")
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


#: Loses the control store (GCS) of a cluster of its own. Ray ends a process that has been without one for a minute.
WITHOUT_GCS = """
import os, sys, time
import ray
from ray.cluster_utils import Cluster
from fluid import FluidExecutor, Trial, TrialGroup
from fluid.backends.ray import RayBackend

def train(config):
    while True:
        time.sleep(0.01)
        yield {"value": 1}

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    executor = FluidExecutor(RayBackend(3, grace=0.5), verbose=0, run_dir=sys.argv[1])
    handle = executor.submit_trialgroup(TrialGroup([Trial(train, {}, budget=100_000, trial_id=name) for name in "abc"]))
    iterations = {name: [] for name in "abc"}
    killed_at = None
    for result in handle.results():
        iterations[result.trial_id].append(result.iteration)
        fewest = min(map(len, iterations.values()))
        if fewest > 0 and killed_at is None:
            killed_at = fewest
            gcs = cluster.head_node.all_processes["gcs_server"][0].process
            gcs.kill()
            gcs.wait()
        elif killed_at is not None and fewest >= killed_at + 300:  # The look at the nodes hangs since seconds.
            break
    begun = time.monotonic()
    executor.close()
    print(time.monotonic() - begun, all(got == list(range(1, len(got) + 1)) for got in iterations.values()), flush=True)
    os._exit(0)  # Ray would wait for the store.
"""


def test_without_a_gcs_a_session_goes_on_and_closes_soon(tmp_path: Path) -> None:
    with start_driver(tmp_path, source=WITHOUT_GCS, RAY_ADDRESS="") as driver:
        seconds, right = driver.communicate(timeout=PATIENCE)[0].split()[-2:]
    assert right == "True"
    # It waits for Ray so long, and no longer.
    assert float(seconds) < 10.0
