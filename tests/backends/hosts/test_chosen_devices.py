"""Which devices a user chose, in every form that FluidExecutor(devices=) takes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fluid.backends.local import choose_devices
from fluid.backends.ray import RayBackend
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.gpu.nvml import Gpu
from fluid.resources import Device

GPUS = [Gpu("GPU-a", 10.0), Gpu("GPU-b", 20.0)]
CORES = len(os.sched_getaffinity(0))


def test_a_number_of_devices_or_the_devices_themselves() -> None:
    assert choose_devices(None, GPUS) == [
        Device(0, kind="gpu", memory_bytes=10.0),
        Device(1, kind="gpu", memory_bytes=20.0),
    ]
    assert [device.index for device in choose_devices(1, GPUS)] == [0]
    assert len(choose_devices(None, [])) == CORES
    assert [device.kind for device in choose_devices(64, [])] == ["cpu"] * 64
    assert choose_devices([Device(3)], GPUS) == [Device(3)]
    for wrong in (0, -1, 3, [Device(2, kind="gpu")], []):
        with pytest.raises(InvalidFieldError):
            choose_devices(wrong, GPUS)


def test_more_cpu_devices_than_a_machine_has_processes_for_are_refused() -> None:
    most = max(1024, 16 * CORES)
    assert len(choose_devices(most, [])) == most
    for many in (most + 1, 10**6, [Device(index) for index in range(most + 1)], [f"cpu:{i}" for i in range(most + 1)]):
        with pytest.raises(InvalidFieldError, match=f"at most {most:,} CPU devices") as caught:
            choose_devices(many, [])
        assert caught.value.field == "devices"
    with pytest.raises(InvalidFieldError, match="there are 2 GPUs"):
        choose_devices(10**6, GPUS)


def test_memory_that_other_processes_hold_is_not_planned_with(caplog: pytest.LogCaptureFixture) -> None:
    gib = 2.0**30
    gpu = Gpu("GPU-a", 80 * gib, "A100", free_bytes=36 * gib)
    assert choose_devices("all", [gpu, gpu._replace(free_bytes=79 * gib)]) == [
        Device(0, kind="gpu", memory_bytes=40 * gib, model="A100"),
        Device(1, kind="gpu", memory_bytes=80 * gib, model="A100"),
    ]
    assert caplog.messages == ["other processes hold 44.0 of 80.0 GiB of GPU-a"]


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ([0], [("gpu", 0)]),
        ([1, 0], [("gpu", 0), ("gpu", 1)]),
        ("1", [("gpu", 1)]),
        ("0,1", [("gpu", 0), ("gpu", 1)]),
        ("cuda:1", [("gpu", 1)]),
        ("gpu:0, cpu:2", [("gpu", 0), ("cpu", 2)]),
        (["cuda:1"], [("gpu", 1)]),
        (["cuda:1", 0], [("gpu", 0), ("gpu", 1)]),
        ("all", [("gpu", 0), ("gpu", 1)]),
        ("cuda", [("gpu", 0), ("gpu", 1)]),
        ("cpu", [("cpu", core) for core in range(CORES)]),
    ],
)
def test_devices_by_index_and_by_name(devices: Any, chosen: list[tuple[str, int]]) -> None:
    found = choose_devices(devices, GPUS)
    assert [(device.kind, device.index) for device in found] == chosen
    assert all(device.memory_bytes == GPUS[device.index].memory_bytes for device in found if device.kind == "gpu")


def test_without_gpus_an_index_is_that_of_a_core() -> None:
    assert choose_devices([1, 0], []) == [Device(0), Device(1)]
    assert choose_devices("all", []) == [Device(core) for core in range(CORES)]


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ("cuda:2", "there are 2 GPUs"),
        ([0, 2], "there are 2 GPUs"),
        ("mps", "must be a number of devices"),
        ("", "must be a number of devices"),
        ("cuda:", "must be a number of devices"),
        ("cuda:-1", "must be a number of devices"),
        ([-1], "must be at least 0"),
        ([0.5], "must be a whole number"),
        ([True], "must be a number"),
        ([0, 0], "occur more than once"),
        ("cpu:99999999999", "must be below"),
        (1.5, "must be a whole number"),
        ({}, "at least one device"),
    ],
)
def test_a_choice_that_cannot_be_had_is_named(devices: Any, reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as raised:
        choose_devices(devices, GPUS)
    assert raised.value.field == "devices"


def test_more_gpus_than_there_are_tells_how_to_ask_for_cpus() -> None:
    with pytest.raises(InvalidFieldError, match="devices=4: there is 1 GPU; for CPU devices pass") as raised:
        choose_devices(4, GPUS[:1])
    advised = eval(str(raised.value).partition("pass devices=")[2].partition(", or")[0])
    assert choose_devices(advised, GPUS[:1]) == [Device(core) for core in range(4)]


def test_an_executor_takes_indices() -> None:
    with FluidExecutor(backend="local", devices=[1], verbose=0) as executor:
        assert executor.devices == [Device(1)]
    with pytest.raises(InvalidFieldError, match="devices='cuda:7'"):
        FluidExecutor(backend="local", devices="cuda:7", verbose=0)


@pytest.mark.ray
@pytest.mark.parametrize("devices", [[0, 1], "cuda:1", 1.5])
def test_ray_chooses_its_devices_itself(devices: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"devices=.*Ray chooses the devices"):
        RayBackend(devices)
