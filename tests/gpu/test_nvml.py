"""Finding GPUs, and what NVML tells about them: a stand-in for its Python package answers, as this needs no GPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fluid.gpu.nvml
from fluid.gpu.nvml import find_gpus
from fluid.gpu.visible_devices import visible

UUIDS = {"GPU-a", "GPU-b", "MIG-c"}
GIB = float(1 << 30)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 1 , 0 ", [1, 0]),
        ("0,3,1", [0]),
        ("0,-1,1", [0]),
        ("1,1,0", [1]),
        ("GPU-b,MIG-c", ["GPU-b", "MIG-c"]),
        ("GPU-b,GPU-x,GPU-a", ["GPU-b"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(setting: str | None, expected: list[int | str]) -> None:
    assert visible(setting, 3, UUIDS.__contains__) == expected


def test_a_machine_may_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus() == []


# --- With a stand-in for pynvml


class NVMLError(Exception):
    """As pynvml's."""


class FakeGpu(SimpleNamespace):
    """What one GPU answers; a question that it has no answer to is not supported."""

    uuid: str
    total: int = 16 << 30
    used: int = 0


def make_pynvml(gpus: list[FakeGpu], *, driver: str | bytes = "560.35.03", broken: str = "") -> Any:
    """A module that answers as pynvml does; ``broken`` is the error of its initialisation."""
    module: Any = ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.opened, module.broken = 0, broken

    def init() -> None:
        if module.broken:
            raise NVMLError(module.broken)
        module.opened += 1

    def by_uuid(uuid: bytes) -> FakeGpu:
        assert module.opened
        for gpu in gpus:
            for part in (gpu, *getattr(gpu, "instances", ())):
                if part.uuid == uuid.decode():
                    return part
        raise NVMLError("Not Found")

    def instance(gpu: FakeGpu, index: int) -> FakeGpu:
        assert module.opened
        if index >= len(gpu.instances):
            raise NVMLError("Not Found")
        return gpu.instances[index]

    def answer(name: str) -> Callable[[FakeGpu], Any]:
        def ask(gpu: FakeGpu) -> Any:
            assert module.opened
            if not hasattr(gpu, name):
                raise NVMLError("Not Supported")
            return getattr(gpu, name)

        return ask

    def memory(gpu: FakeGpu, version: int | None = None) -> SimpleNamespace:
        reserved = answer("reserved")(gpu) if version else 0
        return SimpleNamespace(total=gpu.total, used=gpu.used - reserved)

    module.nvmlInit = init
    module.nvmlSystemGetDriverVersion = lambda: driver
    module.nvmlDeviceGetCount = lambda: len(gpus)
    module.nvmlDeviceGetHandleByIndex = gpus.__getitem__
    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlDeviceGetUUID = answer("uuid")
    module.nvmlDeviceGetName = answer("name")
    module.nvmlDeviceGetMemoryInfo = memory
    module.nvmlDeviceGetComputeMode = answer("mode")
    module.nvmlDeviceGetMigMode = answer("mig")
    module.nvmlDeviceGetUtilizationRates = answer("rates")
    module.nvmlDeviceGetCudaComputeCapability = answer("capability")
    module.nvmlDeviceGetComputeRunningProcesses = answer("processes")
    module.nvmlDeviceGetMPSComputeRunningProcesses = answer("clients")
    module.nvmlDeviceGetCpuAffinity = lambda gpu, words: answer("cpu_masks")(gpu)[:words]
    module.nvmlDeviceGetMaxMigDeviceCount = lambda gpu: 7
    module.nvmlDeviceGetMigDeviceHandleByIndex = instance
    return module


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Loads the module under test against a stand-in, or against no package at all."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def load(pynvml: Any) -> Any:
        monkeypatch.setitem(sys.modules, "pynvml", pynvml)  # None: the import fails
        spec = importlib.util.spec_from_file_location("nvml_under_test", fluid.gpu.nvml.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


FULL = FakeGpu(
    uuid="GPU-a",
    name=b"NVIDIA H200",
    total=141 << 30,
    used=5 << 30,
    mode=3,
    mig=[0, 0],
    rates=SimpleNamespace(gpu=40),
    capability=(9, 0),
    processes=[process(10, 3 << 30), process(11, None)],
)
BARE = FakeGpu(uuid="GPU-b", total=2 << 30, used=1 << 30)


def test_all_that_a_gpu_tells(nvml: Callable[..., Any]) -> None:
    fake = make_pynvml([FULL])
    module = nvml(fake)
    (state,) = module.describe_gpus()
    assert state == (
        "GPU-a",
        "NVIDIA H200",
        141 * GIB,
        5 * GIB,
        0.4,
        False,
        "EXCLUSIVE_PROCESS",
        (9, 0),
        ((10, 3 * GIB), (11, None)),
    )
    assert module.find_gpus() == [("GPU-a", 141 * GIB, "NVIDIA H200", 136 * GIB)]
    assert module.no_gpu_reason() == ""
    assert module.used_bytes("GPU-a") == 5 * GIB
    assert module.processes_on("GPU-x") is None
    assert fake.opened == 1, "opening NVML takes up to 100 ms"


def test_a_forked_process_opens_nvml_for_itself(nvml: Callable[..., Any]) -> None:
    fake = make_pynvml([BARE])
    module = nvml(fake)
    assert module.used_bytes("GPU-b") == GIB
    child = os.fork()
    if child == 0:  # no assertion: what it raises would be pytest's
        os._exit(0 if module.used_bytes("GPU-b") == GIB and fake.opened == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0 and fake.opened == 1


def test_a_driver_that_comes_later_is_found(nvml: Callable[..., Any]) -> None:
    fake = make_pynvml([BARE], broken="Driver Not Loaded")
    module = nvml(fake)
    assert module.used_bytes("GPU-b") is None
    fake.broken = ""
    assert module.used_bytes("GPU-b") == GIB


def test_what_a_driver_does_not_tell_is_none(nvml: Callable[..., Any]) -> None:
    module = nvml(make_pynvml([BARE]))
    (state,) = module.describe_gpus()
    assert state == ("GPU-b", "GPU", 2 * GIB, GIB, None, None, None, None, None)
    assert module.processes_on("GPU-b") is None
    assert module.process_bytes("GPU-b", 10) is None


def test_a_gpu_with_a_fault_is_left_out(nvml: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    fake = make_pynvml([FULL, BARE])

    def lost(gpu: FakeGpu) -> Any:
        if gpu is FULL:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(total=gpu.total, used=gpu.used)

    fake.nvmlDeviceGetMemoryInfo = lost
    assert [state.token for state in nvml(fake).describe_gpus()] == ["GPU-b"]
    assert "does not answer: GPU is lost" in caplog.text


def test_a_package_too_old_for_a_question(nvml: Callable[..., Any]) -> None:
    fake = make_pynvml([FULL])
    del fake.nvmlDeviceGetMigMode
    assert nvml(fake).describe_gpus()[0].mig is None


@pytest.mark.parametrize(("number", "name"), [(0, "DEFAULT"), (2, "PROHIBITED"), (3, "EXCLUSIVE_PROCESS"), (9, None)])
def test_compute_modes_have_names(nvml: Callable[..., Any], number: int, name: str | None) -> None:
    assert nvml(make_pynvml([FakeGpu(uuid="GPU-a", mode=number)])).describe_gpus()[0].compute_mode == name


def split(*sizes: int) -> FakeGpu:
    """A GPU that MIG has split into instances of so many GiB."""
    instances = [FakeGpu(uuid=f"MIG-{size}", name=f"H200 MIG {size}g", total=size << 30) for size in sizes]
    return FakeGpu(uuid="GPU-s", mig=[1, 1], total=141 << 30, instances=instances)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["MIG-35", "MIG-70", "GPU-b"]),
        ("1,0", ["GPU-b", "MIG-35", "MIG-70"]),
        ("GPU-s", ["MIG-35", "MIG-70"]),
        ("MIG-70", ["MIG-70"]),
        ("MIG-70,GPU-s", ["MIG-70", "MIG-35"]),
    ],
)
def test_the_instances_of_a_gpu_are_devices(
    nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, setting: str | None, expected: list[str]
) -> None:
    module = nvml(make_pynvml([split(35, 70), BARE]))
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    gpus = module.find_gpus()
    assert [gpu.token for gpu in gpus] == expected
    assert all(gpu.memory_bytes == float(gpu.token[4:]) * GIB for gpu in gpus if gpu.token.startswith("MIG"))
    assert [state.mig for state in module.describe_gpus()] == [
        True if token.startswith("MIG") else None for token in expected
    ]


def test_a_split_gpu_without_instances_cannot_be_used(nvml: Callable[..., Any]) -> None:
    module = nvml(make_pynvml([split()]))
    assert module.find_gpus() == []
    assert module.no_gpu_reason() == "MIG has split the visible GPUs, and they have no instances"


def test_a_package_that_knows_no_instances(nvml: Callable[..., Any]) -> None:
    fake = make_pynvml([split(35)])
    del fake.nvmlDeviceGetMaxMigDeviceCount
    assert [(state.token, state.mig) for state in nvml(fake).describe_gpus()] == [("GPU-s", True)]


@pytest.mark.parametrize(("used", "available"), [(0, 100.0), (10, 100.0), (55, 50.0), (100, 0.0)])
def test_memory_that_others_hold_is_not_available(nvml: Callable[..., Any], used: int, available: float) -> None:
    (gpu,) = nvml(make_pynvml([FakeGpu(uuid="GPU-a", total=100, used=used)])).find_gpus()
    assert gpu.available_bytes == pytest.approx(available)


def test_only_visible_gpus_are_described(nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = nvml(make_pynvml([FULL, BARE]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,0")
    assert [state.token for state in module.describe_gpus()] == ["GPU-b", "GPU-a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert module.describe_gpus() == []
    assert module.no_gpu_reason() == "CUDA_VISIBLE_DEVICES='' hides them all"


def test_the_memory_of_a_process(nvml: Callable[..., Any]) -> None:
    here = os.getpid()
    gpu = FakeGpu(uuid="GPU-a", processes=[process(here, 3 << 30)])
    module = nvml(make_pynvml([gpu]))
    assert module.process_bytes("GPU-a", here) == 3 * GIB
    assert module.process_bytes("GPU-a", os.getppid()) == 0.0, "it does not use the GPU"
    assert module.process_bytes("GPU-x", here) is None
    gpu.processes = [process(here, None)]
    assert module.process_bytes("GPU-a", here) is None, "the driver lists it and does not tell"


def test_clients_of_mps_are_in_a_list_of_their_own(nvml: Callable[..., Any]) -> None:
    here = os.getpid()
    gpu = FakeGpu(uuid="GPU-a", processes=[process(os.getppid(), 1 << 30)], clients=[process(here, 3 << 30)])
    module = nvml(make_pynvml([gpu]))
    assert module.process_bytes("GPU-a", here) == 3 * GIB
    gpu.processes.append(process(here, None))
    assert module.process_bytes("GPU-a", here) == 3 * GIB, "one of the lists does not tell"
    assert [each.pid for each in module.processes_on("GPU-a")] == [os.getppid(), here]
    del gpu.processes
    assert module.process_bytes("GPU-a", here) == 3 * GIB


def test_what_is_taken_of_a_gpu(nvml: Callable[..., Any]) -> None:
    module = nvml(make_pynvml([BARE]))
    assert module.used_bytes("GPU-b") == GIB
    assert module.used_bytes("GPU-x") is module.used_bytes("GPU-x", reserved=False) is None
    assert module.used_bytes("GPU-b", reserved=False) is None, "an old driver"
    assert nvml(make_pynvml([BARE], broken="NVML Shared Library Not Found")).used_bytes("GPU-b") is None


def test_what_is_taken_besides_what_the_driver_reserves(nvml: Callable[..., Any]) -> None:
    fake = make_pynvml([FakeGpu(uuid="GPU-a", used=5 << 30, reserved=1 << 30)])
    module = nvml(fake)
    assert module.used_bytes("GPU-a", reserved=False) is None, "an old package"
    fake.nvmlMemory_v2 = 2
    assert module.used_bytes("GPU-a", reserved=False) == 4 * GIB
    assert module.used_bytes("GPU-a") == 5 * GIB


def test_the_cores_of_a_gpus_numa_node(nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 100)
    module = nvml(make_pynvml([FakeGpu(uuid="GPU-a", cpu_masks=[0b101 << 61, 0b10, 1]), FakeGpu(uuid="GPU-b")]))
    assert module.cpu_cores("GPU-a") == (61, 63, 65)
    assert module.cpu_cores("GPU-b") == module.cpu_cores("GPU-none") == ()


def test_process_numbers_of_another_namespace_say_nothing(nvml: Callable[..., Any]) -> None:
    unused_pid = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    module = nvml(make_pynvml([FakeGpu(uuid="GPU-a", processes=[process(unused_pid, 1 << 30)])]))
    assert module.process_bytes("GPU-a", os.getpid()) is None


@pytest.mark.parametrize("version", ["560.35.03", b"560.35.03"])
def test_the_driver_version(nvml: Callable[..., Any], version: str | bytes) -> None:
    assert nvml(make_pynvml([], driver=version)).driver_version() == "560.35.03"


def test_no_driver(nvml: Callable[..., Any]) -> None:
    module = nvml(make_pynvml([], broken="NVML Shared Library Not Found"))
    assert module.find_gpus() == module.describe_gpus() == []
    assert module.driver_version() is None
    assert module.processes_on("GPU-a") is None
    assert module.no_gpu_reason() == "there is no NVIDIA driver (NVML Shared Library Not Found)"


def test_a_driver_without_gpus(nvml: Callable[..., Any]) -> None:
    assert nvml(make_pynvml([])).no_gpu_reason() == "the NVIDIA driver knows of no GPU"


def test_no_package(
    nvml: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = nvml(None)
    monkeypatch.setattr(module, "_PROC", str(tmp_path / "gpus"))
    assert module.find_gpus() == module.describe_gpus() == []
    assert module.driver_version() is None
    assert module.no_gpu_reason() == "there is no NVIDIA driver"
    assert caplog.text == ""
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert module.find_gpus() == []
    assert "pip install nvidia-ml-py" in caplog.text
    assert "pip install nvidia-ml-py" in module.no_gpu_reason()
