"""The machine: what decides whether MPS can be used, and what NVML and the driver report."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

from fluid.gpu.mps_control import find_program
from fluid.gpu.mps_support import unsupported_reason_here
from fluid.gpu.nvml import describe_gpus, driver_version, find_gpus
from fluid.resources import available_cores
from gpu_day_stages.place import Place, seconds_of
from gpu_day_stages.results import Figures

_COMMANDS = {
    "nvidia_smi": ("nvidia-smi",),
    "topology": ("nvidia-smi", "topo", "-m"),
    "limits": ("bash", "-c", "ulimit -a"),
    "doctor": (sys.executable, "-m", "fluid.cli", "doctor"),
}
#: Variables with one of these beginnings decide what CUDA and PyTorch do.
_VARIABLES = ("CUDA", "NVIDIA", "TORCH", "PYTORCH", "NCCL")
_LONGEST_OUTPUT = 4000


def identify(place: Place) -> dict[str, Any]:
    """Returns what figures depend on. Figures of two runs belong together if this is equal."""
    gpus = describe_gpus() if place.gpus else []
    return {
        "gpus": [gpu.name for gpu in gpus if gpu.token in place.gpus],
        "driver": driver_version() if place.gpus else None,
        "cores": len(available_cores()),
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def facts(place: Place, figures: Figures) -> None:
    """Records the machine."""
    figures["import_torch_s"] = seconds_of(lambda: importlib.import_module("torch"))  # The first one compiles modules.
    for name, command in _COMMANDS.items():
        figures[name] = _output(*command)
    figures["kernel"] = platform.release()
    figures["mps_program"] = find_program()
    figures.attempt("mps_unsupported", lambda: unsupported_reason_here(describe_gpus()))
    figures["find_gpus_ms"] = 1e3 * seconds_of(find_gpus, 3)
    figures["shared_memory_bytes"] = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
    figures["user"] = os.getuid()
    figures["variables"] = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    figures["packages"] = {name: _version(name) for name in ("numpy", "msgspec", "cloudpickle", "rich", "nvidia-ml-py")}


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()[-_LONGEST_OUTPUT:]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
