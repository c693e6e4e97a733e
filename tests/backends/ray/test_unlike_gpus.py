"""A node of a real cluster with two unlike GPUs, which Ray counts as CUDA does: a stand-in for CUDA's driver tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_cuda import FAST_TOKEN, SLOW_TOKEN, make_library

from fluid.resources import Device

ray = pytest.importorskip("ray")
from ray_drive import Drive  # noqa: E402

from fluid.backends.ray import RayBackend  # noqa: E402
from fluid.backends.ray.nodes import DeviceSlot, Node  # noqa: E402
from fluid.gpu.assigned import CUDA_S  # noqa: E402
from fluid.gpu.nvml import Gpu  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

GIB = 2.0**30


@pytest.fixture(params=["", "1"], ids=["Ray sets the variable", "Ray leaves it"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of one node, whose processes find the stand-in; Ray may be told to leave ``CUDA_VISIBLE_DEVICES``."""
    from ray.cluster_utils import Cluster

    library = make_library(tmp_path_factory.mktemp("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES")  # Ray would count no more GPUs than it names.
        patch.setenv("LD_LIBRARY_PATH", str(library))
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", request.param or "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
def test_lanes_get_the_uuid_of_the_gpu_that_ray_means(cluster: Any) -> None:
    backend = RayBackend(2, preload=[])
    try:
        tokens = {device.index: backend._devices.gpu_token(device.index) for device in backend.devices()}
        assert set(tokens.values()) == {SLOW_TOKEN, FAST_TOKEN}
        for device in backend.devices():
            is_fast = tokens[device.index] == FAST_TOKEN
            assert device.model == ("NVIDIA H200" if is_fast else "NVIDIA A100")
            assert device.memory_bytes == (140 if is_fast else 40) * GIB
            # Ray's number is CUDA's, which has the fast one first.
            assert backend._devices.visible_for(device.index) == ("0" if is_fast else "1")
        drive = Drive(backend)
        for index, lane in enumerate(drive.lanes(0, 1)):
            assert drive.evaluate(lane, gpu="os.environ['CUDA_VISIBLE_DEVICES']") == {"gpu": tokens[index]}
    finally:
        backend.close()


def test_a_device_whose_node_was_replaced_is_the_new_node_s() -> None:
    slot = DeviceSlot(Device(0, kind="gpu", tags=("mine",)), None, 0, False, "a")
    for name, model, memory in (("a", "NVIDIA A100", 40 * GIB), ("b", "NVIDIA H200", 140 * GIB)):
        slot.gpu = Gpu(f"GPU-{name}", memory, model)
        slot.settle(Node(name, "10.0.0.2", 1, True, {"GPU": 1, f"on-{name}": 1}), "10.0.0.1")
        expected = Device(0, "10.0.0.2", "gpu", memory_bytes=memory, model=model, tags=("mine", f"on-{name}"))
        assert slot.device == expected
    given = DeviceSlot(Device(0, kind="gpu", memory_bytes=GIB, model="Mine"), None, 0, False, "b", gpu=slot.gpu)
    given.settle(Node("b", "10.0.0.1", 1, True, {}), "10.0.0.1")
    assert (given.device.model, given.device.memory_bytes) == ("Mine", GIB)


def test_a_gpu_that_is_not_looked_at_in_time_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits = []

    def wait(tasks: list[Any], *, timeout: float, fetch_local: bool) -> tuple[list[Any], list[Any]]:
        waits.append(timeout)
        return [], tasks

    monkeypatch.setattr(ray, "wait", wait)
    slot = DeviceSlot(Device(0, kind="gpu"), None, 0, False, "a", look=object())
    slot.await_look()
    assert waits[0] > CUDA_S, "CUDA's first start may take a minute, and the process has to start before"
    assert "a GPU of node a was not looked at within 180 s, and cannot be used" in caplog.text
