"""How many processes a GPU takes at most."""

from __future__ import annotations

import pytest

from fluid import Device
from fluid.backends.base import GpuSharing
from fluid.backends.local import LocalBackend
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import StartLane
from fluid.engine.events import LaneReady
from fluid.gpu.nvml import GpuState
from fluid.session import options as packing_limit
from fluid.session.options import bounded_packing, idle_limit, process_limit
from tests.backends.test_base import Least


class Given(Least):
    """Has a device, and lanes that share it in a way."""

    def __init__(self, device: Device, way: str) -> None:
        self._device, self._way = device, way

    def devices(self) -> list[Device]:
        return [self._device]

    @property
    def sharing(self) -> GpuSharing:
        return GpuSharing(self._way)


@pytest.mark.parametrize(
    ("way", "modes", "foreign", "host", "packing", "expected"),
    [
        ("timeslice", ["DEFAULT"], None, "localhost", 100, 100),
        ("timeslice", ["EXCLUSIVE_PROCESS"], None, "localhost", 4, 1),
        ("timeslice", ["EXCLUSIVE_PROCESS", "DEFAULT"], None, "localhost", 4, 4),  # The one is capped later.
        ("timeslice", ["EXCLUSIVE_PROCESS"], "/tmp/nvidia-mps", "localhost", 4, 4),  # Its clients.
        ("timeslice", ["EXCLUSIVE_PROCESS"], None, "node-1", 4, 4),  # Those modes are not that node's.
        ("mps", ["EXCLUSIVE_PROCESS"], None, "localhost", 4, 4),
        ("mps", ["DEFAULT"], None, "localhost", 100, 48),
    ],
)
def test_packing_is_bounded_by_what_a_gpu_takes(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
    modes: list[str],
    foreign: str | None,
    host: str,
    packing: int,
    expected: int,
) -> None:
    states = [GpuState(f"GPU-{i}", "H200", 140e9, 0.0, None, False, mode, (9, 0), ()) for i, mode in enumerate(modes)]
    monkeypatch.setattr(packing_limit, "describe_gpus", lambda: states)
    monkeypatch.setattr(packing_limit, "foreign_daemon", lambda environment: foreign)
    backend = Given(Device(0, kind="gpu", host=host), way)
    assert bounded_packing(packing, process_limit(backend)) == expected
    assert bool(caplog.messages) == (expected < packing)


@pytest.mark.parametrize(("host", "expected"), [("localhost", 60), ("node-1", 48)])
def test_newer_drivers_take_more_clients_of_mps(monkeypatch: pytest.MonkeyPatch, host: str, expected: int) -> None:
    monkeypatch.setattr(packing_limit, "driver_version", lambda: "590.44.01")
    assert process_limit(Given(Device(0, kind="gpu", host=host), "mps")).most == expected


def test_cpus_take_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Given(Device(0), "mps")
    assert bounded_packing(100, process_limit(backend)) == 100


def test_idle_lanes_are_none_where_a_gpu_takes_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [GpuState("GPU-0", "H200", 140e9, 0.0, None, False, "EXCLUSIVE_PROCESS", (9, 0), ())]
    monkeypatch.setattr(packing_limit, "describe_gpus", lambda: states)
    monkeypatch.setattr(packing_limit, "foreign_daemon", lambda environment: None)
    for way, expected in (("timeslice", 0), ("mps", 32)):
        assert idle_limit(Given(Device(0, kind="gpu"), way), busy=4) == expected
    virtual = SimulatedBackend(lambda *_: Truth(seconds=1.0), [Device(0, kind="gpu")])
    assert process_limit(virtual).most is None and idle_limit(virtual, busy=4) == 32, "it is no GPU of this machine"


def test_idle_lanes_of_cores_are_bounded_by_what_lanes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalBackend(2) as backend:
        backend.execute([StartLane(0, 0)])
        while not any(isinstance(event, LaneReady) for event in backend.poll()):
            pass
        room = backend.lane_room()
        assert room.lanes == 1 and room.lane_bytes is not None and 1e5 < room.lane_bytes < 1e9
        for left, expected in ((0.0, 0), (20 * room.lane_bytes, (1 + 10) // 2 - 1), (1e15, 32)):
            found = room._replace(memory_left=left)
            monkeypatch.setattr(backend, "lane_room", lambda found=found: found)
            assert idle_limit(backend, busy=1) == expected
