"""Nodes of a real cluster that join and drain while a session runs, and a cluster that loses its GCS."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.executor import FluidExecutor
from fluid.trialgroup import Trial, TrialGroup

ray = pytest.importorskip("ray")
from fluid.backends.hosts.folders import HERE  # noqa: E402
from fluid.backends.ray import RayBackend  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0
#: Seconds until a node that drains is said to go: no test waits for it.
DRAIN_S = 600
OTHER_MACHINE = "127.0.0.3"
ROOT = str(Path(__file__).resolve().parents[3])


class Recorder:
    """Counts its steps, and records each in a file; takes its time until a file tells it to hurry."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        if "record" in self.config:
            if not Path(self.config["hurry"]).exists():
                threading.Event().wait(0.1)
            with open(self.config["record"], "a", encoding="utf-8") as file:
                file.write(f"{self.count}\n")
        return {"count": self.count}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "count").write_text(str(self.count), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        self.count = int((Path(folder) / "count").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster that this process is connected to, with three CPUs on one node."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def make(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., RayBackend]]:
    """Makes backends, and closes them."""
    made: list[RayBackend] = []

    def make(devices: int | None) -> RayBackend:
        made.append(RayBackend(devices, run_dir=tmp_path / f"run{len(made)}", preload=[], grace=1.0))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def eventually(condition: Callable[[], Any]) -> Any:
    """Waits until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        threading.Event().wait(0.02)
    return result


def drain(cluster: Any, ip: str) -> None:
    """Does what ``ray drain-node`` does, as a cloud's agent does before it takes a machine back."""
    from ray.core.generated import autoscaler_pb2

    (node,) = [entry["NodeID"] for entry in ray.nodes() if entry["NodeManagerAddress"] == ip and entry["Alive"]]
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + DRAIN_S) * 1000)
    accepted, why = ray._raylet.GcsClient(address=cluster.address).drain_node(node, reason, "spot", deadline_ms)
    assert accepted, why


def test_a_node_that_joins_is_used_and_emptied_when_it_drains(
    cluster: Any, make: Callable[..., RayBackend], tmp_path: Path
) -> None:
    by_number, backend = make(1), make(None)
    assert [device.index for device in backend.devices()] == [0, 1]
    hurry = tmp_path / "hurry"
    records = [tmp_path / f"record-{index}" for index in range(4)]
    trials = [Trial(Recorder, {"record": str(record), "hurry": str(hurry)}, budget=400) for record in records]
    with FluidExecutor(backend, verbose=0, run_dir=tmp_path / "run", packing="off") as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        node = cluster.add_node(num_cpus=2, node_ip_address=OTHER_MACHINE)
        try:
            eventually(lambda: [device.host for device in executor.devices] == [HERE] * 2 + [OTHER_MACHINE] * 2)
            assert next(result for result in handle.results() if {2, 3} & set(result.device_ids))
            drain(cluster, OTHER_MACHINE)
            eventually(lambda: [device.host for device in executor.devices] == [HERE] * 2)
            hurry.touch()
            assert handle.wait(PATIENCE)
        finally:
            cluster.remove_node(node)
        assert set(handle.states.values()) == {"DONE"}
    for record in records:
        steps = [int(line) for line in record.read_text(encoding="utf-8").split()]
        assert steps == list(range(1, 401)), "each iteration was run once"
    # What was asked for by number stays as it is.
    assert by_number.poll(0.0) == []
    assert [device.host for device in by_number.devices()] == [HERE]


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
    (tmp_path / "driver.py").write_text(WITHOUT_GCS, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": ROOT, "RAY_ADDRESS": ""}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as driver:
        seconds, right = driver.communicate(timeout=PATIENCE)[0].split()[-2:]
    assert right == "True"
    # It waits for Ray so long, and no longer.
    assert float(seconds) < 10.0
