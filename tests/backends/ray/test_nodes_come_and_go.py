"""Nodes of a real cluster that join, drain and go while a session runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_drive import OTHER_MACHINE, PATIENCE, Counter, Drive
from waiting import eventually

from fluid.engine.commands import Resize, Save, StartLane
from fluid.engine.events import DeviceAdded, DeviceLost, IterationDone, LaneLost, ResizeDone, TrialSaved, TrialStarted
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.resources import Device
from fluid.trialgroup import Trial, TrialGroup

ray = pytest.importorskip("ray")
from fluid.backends.hosts.folders import HERE  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


#: Seconds until a node that drains is said to go: no test waits for it.
DRAIN_S = 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster that this process is connected to, with four CPUs on one node."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    assert ray.is_initialized(), "a backend has ended Ray, which it had not started"
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def other_node(cluster: Any) -> Iterator[Any]:
    """A node that has the address of another machine."""
    node = cluster.add_node(num_cpus=2, node_ip_address=OTHER_MACHINE, resources={"there": 10})
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node)


def test_each_gpus_lanes_see_that_gpu(
    cluster: Any, make: Callable[..., Drive], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # Ray starts no node with more GPUs than it names.
    node = cluster.add_node(num_cpus=0, num_gpus=2)
    try:
        drive = make(None)
        assert [device.kind for device in drive.backend.devices()] == ["gpu", "gpu"]
        for lane in drive.lanes(0, 0, 1):
            drive.start(f"t{lane}", lane, 1)
        seen = [drive.until(IterationDone, trial_id=f"t{lane}").metrics["visible"] for lane in range(3)]
        assert seen[0] == seen[1] and {seen[0], seen[2]} == {"0", "1"}
        drive.backend.close()
    finally:
        cluster.remove_node(node)
    eventually(lambda: "GPU" not in ray.cluster_resources())


def test_a_node_that_goes_takes_its_devices_and_trials_go_on(
    cluster: Any, other_node: Any, make: Callable[..., Drive], tmp_path: Path
) -> None:
    backend = make(None).backend
    hosts = {device.index: device.host for device in backend.devices()}
    assert sorted(hosts.values()) == [OTHER_MACHINE] * 2 + [HERE] * 4
    trials = [Trial(Counter, {"seconds": 0.02}, budget=60, trial_id=f"t{index}") for index in range(6)]
    with FluidExecutor(backend, verbose=0, run_dir=tmp_path / "run") as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        where = dict.fromkeys((HERE, OTHER_MACHINE), False)
        for result in handle.results():
            where[hosts[result.device_ids[0]]] = True
            if all(where.values()):
                break
        cluster.remove_node(other_node, allow_graceful=False)
        assert handle.wait(PATIENCE)
        assert set(handle.states.values()) == {"DONE"}
        for trial in trials:
            counts = [r.metrics["count"] for r in handle.results() if r.trial_id == trial.id]
            assert counts == list(range(1, 61))
        eventually(lambda: {device.host for device in executor.devices} == {HERE})


def test_a_lost_device_is_reported_before_its_lanes(cluster: Any, other_node: Any, make: Callable[..., Drive]) -> None:
    drive = make([Device(0, host=ray.util.get_node_ip_address()), Device(4, host=OTHER_MACHINE)])
    assert [device.host for device in drive.backend.devices()] == [HERE, OTHER_MACHINE]
    here, there = drive.lanes(0, 4)
    drive.start("a", there, 10**9, seconds=0.01)
    drive.until(IterationDone, trial_id="a")
    drive.do(Save("a", (there,)))
    checkpoint = drive.until(TrialSaved, trial_id="a").checkpoint
    assert (checkpoint.host, checkpoint.in_memory) == (OTHER_MACHINE, True)
    # As when it is switched off: Ray itself takes half a minute to notice.
    cluster.remove_node(other_node, allow_graceful=False)
    lost = drive.until(DeviceLost)
    assert lost.device_id == 4
    assert not any(isinstance(event, LaneLost) and event.at < lost.at for event in drive.seen)
    # What that machine kept is not used, though the engine asks for it.
    drive.start("a", here, 1, checkpoint)
    assert drive.until(TrialStarted, trial_id="a", lane_id=here).iteration == 0
    drive.do(StartLane(99, 4))
    assert drive.until(LaneLost, lane_id=99).reason, "the launch fails one way or another; Ray says how"


def test_another_node_makes_up_for_one_that_went(cluster: Any, other_node: Any, make: Callable[..., Drive]) -> None:
    drive = make(5)
    (there,) = [device for device in drive.backend.devices() if device.host == OTHER_MACHINE]
    cluster.remove_node(other_node)
    assert drive.until(DeviceLost).device_id == there.index
    node = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.4")
    try:
        device = drive.until(DeviceAdded).device
        assert (device.index, device.host) == (there.index, "127.0.0.4")
        (lane,) = drive.lanes(device.index)
        drive.start("a", lane, 1)
        drive.until(IterationDone, trial_id="a")
        drive.backend.close()
    finally:
        cluster.remove_node(node)


def test_what_joins_later_can_be_used(cluster: Any, make: Callable[..., Drive]) -> None:
    drive = make(4)
    assert drive.backend.discover() == []
    with pytest.raises(InvalidFieldError, match="Ray has not reserved it"):
        drive.backend.add_devices([Device(4)])
    node = cluster.add_node(num_cpus=1, node_ip_address=OTHER_MACHINE)
    try:
        (found,) = eventually(drive.backend.discover)
        assert (found.index, found.host) == (4, OTHER_MACHINE)
        drive.backend.add_devices([found])
        first, second = drive.lanes(0, 4)
        # It moves there and back.
        drive.start("a", first, 2)
        drive.until(IterationDone, trial_id="a", iteration=2)
        drive.do(Resize("a", (second,), (first,), iterations=2))
        drive.until(ResizeDone)
        assert drive.until(IterationDone, trial_id="a", iteration=4).metrics["count"] == 4
        drive.do(Resize("a", (first,), (second,), iterations=1))
        assert drive.until(IterationDone, trial_id="a", iteration=5).metrics["count"] == 5
        drive.backend.close()
    finally:
        cluster.remove_node(node)


def drain(cluster: Any, node: Any) -> None:
    """Does what ``ray drain-node`` does, as a cloud's agent does before it takes a machine back."""
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + DRAIN_S) * 1000)
    accepted, why = ray._raylet.GcsClient(address=cluster.address).drain_node(node.node_id, reason, "spot", deadline_ms)
    assert accepted, why


def test_a_node_that_joins_is_used_and_emptied_when_it_drains(
    cluster: Any, make: Callable[..., Drive], tmp_path: Path
) -> None:
    by_number, backend = make(2, run_dir=tmp_path / "other").backend, make(None).backend
    assert [device.index for device in backend.devices()] == [0, 1]
    trials = [Trial(Counter, {"seconds": 0.05}, budget=100_000, trial_id=f"t{index}") for index in range(4)]
    with FluidExecutor(backend, verbose=0, run_dir=tmp_path / "run", packing="off") as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        node = cluster.add_node(num_cpus=2, node_ip_address=OTHER_MACHINE)
        try:
            eventually(lambda: [device.host for device in executor.devices] == [HERE] * 2 + [OTHER_MACHINE] * 2)
            assert next(result for result in handle.results() if {2, 3} & set(result.device_ids))
            drain(cluster, node)
            eventually(lambda: [device.host for device in executor.devices] == [HERE] * 2)
            for trial in trials:
                handle.stop(trial.id)
            assert handle.wait(PATIENCE)
        finally:
            cluster.remove_node(node)
    for trial in trials:
        steps = (tmp_path / "run" / "trials" / trial.id / "output.log").read_text(encoding="utf-8").splitlines()
        assert steps == [f"step {number}" for number in range(1, len(steps) + 1)], "each iteration was run once"
    assert by_number.poll(0.0) == [], "what was asked for by number stays as it is"
    assert [device.host for device in by_number.devices()] == [HERE] * 2
