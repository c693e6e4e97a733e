"""A search on four nodes, one fault each: every iteration is reported once, and right; nothing is left at the end.

Two of the nodes are at the driver's address, with a host in the driver's process and one in an actor; the others stand
for further machines.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_drive import OTHER_MACHINE, PATIENCE, THIRD_MACHINE, THIS_MACHINE, Counter, in_host_memory, parent_of
from waiting import eventually

from fluid.executor import FluidExecutor
from fluid.resources import Device
from fluid.trialgroup import Trial, TrialGroup

ray = pytest.importorskip("ray")
from fluid.backends.ray import RayBackend  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ITERATIONS = 40
#: A node that a test adds and kills: Ray takes half a minute to notice, in which the others are not concerned.
KILLED_MACHINE = "127.0.0.5"


@pytest.fixture(scope="module")
def cluster(four_nodes: Any) -> Iterator[Any]:
    """The shared cluster of four nodes, to which this process is connected."""
    ray.init(address=four_nodes.address, log_to_driver=False, logging_level="ERROR")
    yield four_nodes
    ray.shutdown()


def on(*machines: str) -> list[Device]:
    """A device on a node of each machine; each node has but one."""
    return [Device(index, host=machine) for index, machine in enumerate(machines)]


def server_of(lane: int) -> int:
    return parent_of(lane)


def host_of(lane: int) -> int:
    """The process of a lane's host: above the guardian, which is above the fork server and its heirs."""
    process = server_of(lane)
    while Path(f"/proc/{process}/comm").read_text(encoding="utf-8").strip() != "fluid-guard":
        process = parent_of(process)
    return parent_of(process)


def search(backend: RayBackend, run: Path, inject: Callable[[dict[int, int]], Any], processes: Any) -> None:
    """Runs trials; once each device has had a result, ``inject`` gets the last one's process, by device."""
    # Their processes stay, so that none is gone before the last device has had a result.
    options: dict[str, Any] = {"budget": ITERATIONS, "follow_up_iterations": 1}
    trials = [Trial(Counter, {"seconds": 0.02}, trial_id=f"t{index}", **options) for index in range(8)]
    with FluidExecutor(backend, verbose=0, run_dir=run) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        lanes: dict[int, int] = {}
        for result in handle.results():
            lanes[result.device_ids[0]] = result.metrics["pid"]
            if len(lanes) == 4:
                break
        processes.watch(*lanes.values())
        inject(lanes)
        assert handle.wait(PATIENCE)
        assert set(handle.states.values()) == {"DONE"}
        results = list(handle.results())
    for trial in trials:
        own = [result for result in results if result.trial_id == trial.id]
        assert [result.iteration for result in own] == list(range(1, ITERATIONS + 1))
        assert [result.metrics["count"] for result in own] == list(range(1, ITERATIONS + 1))


@pytest.mark.parametrize(
    ("device", "victim"),
    [(2, lambda lane: lane), (3, server_of), (2, host_of), ("here", host_of)],
    ids=["lane", "fork server", "host", "host beside the driver's"],
)
def test_after_a_process_was_killed_each_iteration_is_reported_once(
    cluster: Any, tmp_path: Path, processes: Any, device: Any, victim: Callable[[int], int]
) -> None:
    devices = on(THIS_MACHINE, THIS_MACHINE, OTHER_MACHINE, THIRD_MACHINE)
    backend = RayBackend(devices, run_dir=tmp_path / "run", preload=[])

    def kill(lanes: dict[int, int]) -> None:
        hosts = {index: host_of(lane) for index, lane in lanes.items()}
        assert len(set(hosts.values())) == 4 and os.getpid() in (hosts[0], hosts[1])
        beside = 1 if hosts[0] == os.getpid() else 0
        os.kill(victim(lanes[beside if device == "here" else device]), signal.SIGKILL)

    search(backend, tmp_path / "run", kill, processes)
    assert processes.have_ended(within=PATIENCE)
    eventually(lambda: not in_host_memory(tmp_path))


def test_after_a_node_was_killed_each_iteration_is_reported_once(cluster: Any, tmp_path: Path, processes: Any) -> None:
    node = cluster.add_node(num_cpus=1, node_ip_address=KILLED_MACHINE)
    devices = on(THIS_MACHINE, THIS_MACHINE, OTHER_MACHINE, KILLED_MACHINE)
    backend = RayBackend(devices, run_dir=tmp_path / "run", preload=[])
    search(backend, tmp_path / "run", lambda _: cluster.remove_node(node, allow_graceful=False), processes)
    assert processes.have_ended(within=PATIENCE)
