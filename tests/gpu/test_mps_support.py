"""Whether MPS could be used, judged from facts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fluid.gpu.mps_support import foreign_daemon, is_wsl, unsupported_reason, unsupported_reason_here
from fluid.gpu.nvml import GpuProcess, GpuState

GPU = GpuState("GPU-a", "NVIDIA H200", 1e9, 0.0, 0.0, False, "DEFAULT", (9, 0), ())
PROGRAM = "/usr/bin/nvidia-cuda-mps-control"


@pytest.mark.parametrize(
    "gpu",
    [
        GPU,
        GPU._replace(processes=(GpuProcess(7, 1e6),)),
        GPU._replace(compute_mode="EXCLUSIVE_PROCESS"),
        GPU._replace(capability=(7, 0)),
        GPU._replace(mig=None, compute_mode=None, capability=None, processes=None, busy=None),
    ],
)
def test_nothing_speaks_against_it(gpu: GpuState) -> None:
    assert unsupported_reason([gpu], program=PROGRAM) == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mig": True}, "GPU-a is split by MIG"),
        ({"compute_mode": "PROHIBITED"}, "PROHIBITED"),
        ({"capability": (6, 1)}, "older than Volta"),
        ({"compute_mode": "EXCLUSIVE_PROCESS", "processes": (GpuProcess(7, 1e6),)}, "process 7 holds it"),
    ],
)
def test_one_gpu_that_cannot_is_enough(changed: dict[str, Any], said: str) -> None:
    assert said in unsupported_reason([GPU, GPU._replace(**changed)], program=PROGRAM)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"program": None}, "nvidia-cuda-mps-control is not installed"),
        ({"platform": "darwin"}, "on Linux only"),
        ({"wsl": True}, "WSL"),
        ({"shared_memory": False}, "needs /dev/shm"),
        ({"foreign": "/tmp/nvidia-mps"}, "Fluid did not start is in use, in /tmp/nvidia-mps"),
    ],
)
def test_machines_that_cannot(facts: dict[str, Any], said: str) -> None:
    assert said in unsupported_reason([GPU], **{"program": PROGRAM, **facts})


def test_no_gpu() -> None:
    assert unsupported_reason([], program=None) == "there is no GPU"


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.gpu.mps_support.is_wsl", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("fluid.gpu.mps_control.FOLDERS", ())
    environment = {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}
    assert "is not installed" in unsupported_reason_here([GPU], environment)
    (tmp_path / "nvidia-cuda-mps-control").touch(0o755)
    assert "in /run/mps" in unsupported_reason_here([GPU], environment)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/other")
    assert "in /run/other" in unsupported_reason_here([GPU])
    monkeypatch.setattr("fluid.gpu.mps_support.SHARED_MEMORY", str(tmp_path / "missing"))
    assert "which is missing" in unsupported_reason_here([GPU])


@pytest.mark.parametrize(
    ("release", "expected"),
    [("5.15.153.1-microsoft-standard-WSL2\n", True), ("4.4.0-19041-Microsoft", True), ("6.8.0-45-generic", False)],
)
def test_linux_inside_windows(tmp_path: Path, release: str, expected: bool) -> None:
    (tmp_path / "osrelease").write_text(release)
    assert is_wsl(str(tmp_path / "osrelease")) is expected
    assert not is_wsl(str(tmp_path / "missing"))


def test_a_daemon_of_somebody_else(tmp_path: Path) -> None:
    default, pid = str(tmp_path), tmp_path / "nvidia-cuda-mps-control.pid"
    assert foreign_daemon({}, default) is None
    assert foreign_daemon({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}, default) == "/run/mps"
    pid.write_text(f"{os.getpid()}\n")
    assert foreign_daemon({}, default) == default
    assert foreign_daemon({"CUDA_MPS_PIPE_DIRECTORY": ""}, default) == default
    pid.write_text(str(int(Path("/proc/sys/kernel/pid_max").read_text()) + 1))
    assert foreign_daemon({}, default) is None, "it has ended"
    pid.write_text("nonsense")
    assert foreign_daemon({}, default) is None
