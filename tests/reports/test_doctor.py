"""fluid doctor: what is read off the machine, and what is said about it."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fluid._imports import install_command
from fluid.backends.local import choose_devices
from fluid.cli import main
from fluid.gpu.nvml import GpuProcess, GpuState
from fluid.reports.doctor import (
    Machine,
    Package,
    advise,
    as_json,
    examine,
    find_package,
    machine_report,
    ray_is_supported,
    read_cpu_quota,
    read_memory_limit,
    read_torch_cuda,
)
from tests.json_fields import undescribed

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
GPU = GpuState("GPU-a", "NVIDIA H200", 141.0 * GIB, 2.0 * GIB, 0.25, False, "DEFAULT", (9, 0), ())
PACKAGES = {
    "torch": Package("torch", "2.13.0", "12.8"),
    "horovod": Package("horovod", "0.28.1"),
    "ray": Package("ray", "2.60.0"),
    "nvidia-ml-py": Package("nvidia-ml-py", "12.575.51"),
}
#: A machine that lacks nothing.
BEST = Machine(
    fluid="0.2.0",
    python="3.11.7",
    system="Linux 6.8",
    cores=16,
    machine_cores=16,
    cpu_quota=None,
    memory=128 * GIB,
    memory_limit=None,
    shm=64 * GIB,
    shm_free=60 * GIB,
    open_files=65536,
    gpus=(GPU, GPU._replace(token="GPU-b")),
    driver="560.35.03",
    no_gpus="",
    mps_program="/usr/bin/nvidia-cuda-mps-control",
    no_mps="",
    packages=PACKAGES,
)
#: One that has only its CPU.
BARE = replace(
    BEST,
    gpus=(),
    driver=None,
    no_gpus="there is no NVIDIA driver",
    mps_program=None,
    no_mps="there is no GPU",
    shm=None,
    shm_free=None,
    packages={name: Package(name, None) for name in PACKAGES},
)


# --- What is read off the machine


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu.max": "100 0"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
    ],
)
def test_cpu_quotas_of_both_kinds_of_cgroup(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path, files)
    assert read_cpu_quota(str(tmp_path)) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "1073741824\n"}, GIB),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({"memory/memory.limit_in_bytes": "2147483648\n"}, 2 * GIB),
    ],
)
def test_memory_limits_of_both_kinds_of_cgroup(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    write(tmp_path, files)
    assert read_memory_limit(str(tmp_path)) == limit


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\n", "12.8"),
        ("cuda = '11.8'\nhip = None\n", "11.8"),
        ("cuda: Optional[str] = None\n", None),
        ("__version__ = '2.13.0'\n", None),
        ("cuda = (", None),
    ],
)
def test_the_cuda_of_pytorch_without_importing_it(tmp_path: Path, text: str, cuda: str | None) -> None:
    (tmp_path / "version.py").write_text(text)
    assert read_torch_cuda(tmp_path / "version.py") == cuda
    assert read_torch_cuda(tmp_path / "missing.py") is None


def test_packages_are_found_by_what_pip_wrote_down() -> None:
    assert find_package("pytest") == Package("pytest", pytest.__version__)
    assert find_package("no-such-package") == Package("no-such-package", None)


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("2.8.1", False),
        ("2.9.0", True),
        ("2.60.0", True),
        ("2.60.0rc1", True),
        ("2.61.0", False),
        ("3.0.0.dev0", False),
        ("nightly", None),
    ],
)
def test_the_range_of_ray(version: str, supported: bool | None) -> None:
    assert ray_is_supported(version) is supported


def test_this_machine() -> None:
    machine = examine()
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert machine.open_files == (None if files == resource.RLIM_INFINITY else files)
    assert bool(machine.no_gpus) is not bool(machine.gpus)
    assert machine.packages.keys() == PACKAGES.keys()


def test_it_is_right_about_what_fluid_uses() -> None:
    from fluid.gpu.nvml import find_gpus

    advice = advise(examine())
    chosen = choose_devices(None, find_gpus())
    assert (advice.devices, advice.kind) == (len(chosen), chosen[0].kind)


# --- What is said


def test_a_machine_that_lacks_nothing() -> None:
    advice = advise(BEST)
    assert (advice.devices, advice.kind) == (2, "gpu")
    assert advice.uses == [
        "Fluid would use 2 GPUs, with devices=None.",
        "Trials packed on a GPU can run side by side under MPS, or share it by time slices.",
        "Trials would run in local processes, or on Ray 2.60.0 if it is connected or with backend='ray'.",
    ]
    assert advice.not_used == advice.warnings == []


def test_a_machine_with_nothing_but_its_cpu() -> None:
    advice = advise(BARE)
    assert (advice.devices, advice.kind) == (16, "cpu")
    assert advice.warnings == []
    said = " ".join(advice.not_used)
    for part in ("No GPU is used: there is no NVIDIA driver.", "MPS", "PyTorch", "Ray", "Horovod", "/dev/shm"):
        assert part in said


def changed(machine: Machine, **fields: Any) -> Machine:
    """A machine with other fields; those of packages are their versions, those of ``gpu`` the first GPU's."""
    packages = {name: replace(machine.packages[name], version=fields.pop(name)) for name in PACKAGES if name in fields}
    if "gpu" in fields:
        fields["gpus"] = (machine.gpus[0]._replace(**fields.pop("gpu")), *machine.gpus[1:])
    return replace(machine, packages={**machine.packages, **packages}, **fields)


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (changed(BEST, ray="2.8.0"), "Ray 2.8.0 is outside of 2.9 to 2.60, the first and the last that were tested."),
        (changed(BEST, ray="nightly"), "Ray nightly is outside of"),
        (changed(BEST, open_files=256), "A process may open only 256 files"),
        (changed(BEST, shm_free=64 << 20), "/dev/shm has little free space (64 MiB)"),
        (changed(BEST, gpu={"processes": (GpuProcess(77, 1e9),)}), "GPU-a is in use (process 77)"),
        (
            changed(BEST, gpu={"compute_mode": "EXCLUSIVE_PROCESS"}, no_mps="it is not installed"),
            "without MPS only one process can use the GPU",
        ),
        (changed(BARE, cpu_quota=2.5), "use devices=2, or trials will slow each other down"),
        (
            replace(BEST, packages={**PACKAGES, "torch": Package("torch", "2.13.0+cpu")}),
            "PyTorch 2.13.0+cpu was built without CUDA",
        ),
    ],
)
def test_what_may_go_wrong_is_a_warning(machine: Machine, said: str) -> None:
    (warning,) = advise(machine).warnings
    assert said in warning


def test_why_mps_could_not_be_used() -> None:
    advice = advise(changed(BEST, no_mps="GPU-a is split by MIG"))
    assert "MPS cannot be used: GPU-a is split by MIG." in advice.not_used
    assert "Trials packed on a GPU would share it by time slices." in advice.uses
    assert advice.warnings == []


# --- How it is printed


def printed(machine: Machine, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(machine_report(machine, advise(machine)), crop=False)
    return captured.get()


def test_the_report_names_what_there_is() -> None:
    text = printed(BEST)
    for part in ("16 cores", "128 GiB", "64 GiB, 60 GiB free", "560.35.03", "NVIDIA H200", "GPU-a", "141 GiB", "25 %"):
        assert part in text
    assert "2.13.0, for CUDA 12.8" in text
    text = printed(changed(BARE, cores=4, cpu_quota=2.5, memory_limit=8 * GIB, open_files=None))
    for part in ("4 cores of 16, limited to the CPU time of 2.5", "limited to 8 GiB", "no limit", "not installed"):
        assert part in text


@pytest.mark.parametrize("machine", [BEST, BARE])
def test_narrow_terminals(machine: Machine) -> None:
    assert all(len(line) <= 50 for line in printed(machine, 50).splitlines())


@pytest.mark.parametrize("width", [20, 40, 50, 60, 70, 80, 200])
def test_no_line_is_broken_within_a_command(width: int) -> None:
    machine = replace(BEST, open_files=256, packages={**PACKAGES, "ray": Package("ray", None)})
    shown = printed(machine, width)
    assert install_command("ray").partition(" in ")[0] in shown
    assert "ulimit -n 1024" in shown


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    said = advise(examine())
    assert {f"+ {text}" for text in said.uses} | {f"- {text}" for text in said.not_used} <= set(lines)


def test_sentences_are_whole() -> None:
    advice = advise(changed(BARE, open_files=256, cpu_quota=1.0))
    for sentence in [*advice.uses, *advice.not_used, *advice.warnings]:
        assert sentence.endswith((".", "'ray[tune]>=2.9'."))
        assert "  " not in sentence
        assert not sentence.endswith("..")


@pytest.mark.parametrize("machine", [BEST, BARE, changed(BEST, gpu={"mig": None, "processes": None, "busy": None})])
def test_json_is_json_and_complete(machine: Machine) -> None:
    data = json.loads(json.dumps(as_json(machine, advise(machine)), allow_nan=False))
    assert data["advice"]["devices"] == advise(machine).devices
    assert len(data["gpus"]) == len(machine.gpus)
    assert data["mps"]["usable"] is not bool(machine.no_mps)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.reports.doctor.examine", lambda: BARE)
    assert main(["doctor"]) == 0
    assert "Fluid would use 16 CPU cores as devices" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads(json.dumps(as_json(BARE, advise(BARE))))
    assert said.err == ""


def test_the_command_here_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom fluid.cli import main\nstatus = main(['doctor', '--json'])\n"
        "print(status, sorted({'torch', 'ray', 'horovod'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == "0 []\n"
    assert json.loads(done.stdout)["fluid"]


def test_every_field_is_described() -> None:
    data = as_json(BEST, advise(BEST))
    inner = [data[name] for name in ("cpu", "memory", "shm", "mps", "advice")]
    assert undescribed({*data, *data["gpus"][0], *(name for fields in inner for name in fields)}, as_json) == set()
