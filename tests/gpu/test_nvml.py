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
from fluid.gpu.nvml import find_gpus, visible

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
    module.open = 0

    def init() -> None:
        if broken:
            raise NVMLError(broken)
        module.open += 1

    def shutdown() -> None:
        module.open -= 1

    def by_uuid(uuid: bytes) -> FakeGpu:
        assert module.open == 1
        for gpu in gpus:
            if gpu.uuid == uuid.decode():
                return gpu
        raise NVMLError("Not Found")

    def answer(name: str) -> Callable[[FakeGpu], Any]:
        def ask(gpu: FakeGpu) -> Any:
            assert module.open == 1
            if not hasattr(gpu, name):
                raise NVMLError("Not Supported")
            return getattr(gpu, name)

        return ask

    module.nvmlInit, module.nvmlShutdown = init, shutdown
    module.nvmlSystemGetDriverVersion = lambda: driver
    module.nvmlDeviceGetCount = lambda: len(gpus)
    module.nvmlDeviceGetHandleByIndex = gpus.__getitem__
    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlDeviceGetUUID = answer("uuid")
    module.nvmlDeviceGetName = answer("name")
    module.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(total=gpu.total, used=gpu.used)
    module.nvmlDeviceGetComputeMode = answer("mode")
    module.nvmlDeviceGetMigMode = answer("mig")
    module.nvmlDeviceGetUtilizationRates = answer("rates")
    module.nvmlDeviceGetCudaComputeCapability = answer("capability")
    module.nvmlDeviceGetComputeRunningProcesses = answer("processes")
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
    assert module.find_gpus() == [("GPU-a", 141 * GIB, "NVIDIA H200")]
    assert module.no_gpu_reason() == ""
    assert fake.open == 0, "NVML was let go of each time"


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


def test_mig_is_known_of_the_whole_and_of_its_parts(nvml: Callable[..., Any]) -> None:
    module = nvml(make_pynvml([FakeGpu(uuid="GPU-a", mig=[1, 1]), FakeGpu(uuid="MIG-c")]))
    assert [state.mig for state in module.describe_gpus()] == [True, True]


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


def test_what_is_taken_of_a_gpu(nvml: Callable[..., Any]) -> None:
    module = nvml(make_pynvml([BARE]))
    assert module.used_bytes("GPU-b") == GIB
    assert module.used_bytes("GPU-x") is None
    assert nvml(make_pynvml([BARE], broken="NVML Shared Library Not Found")).used_bytes("GPU-b") is None


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
