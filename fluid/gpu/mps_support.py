"""Whether NVIDIA MPS can be used here, judged from what is there; nothing is started or changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from fluid.gpu.mps_control import PIPE_VARIABLE, PROGRAM, find_program
from fluid.gpu.nvml import GpuState

#: Where CUDA programs look for a daemon if nothing else is said.
DEFAULT_PIPE_FOLDER = "/tmp/nvidia-mps"
_PID_FILE = "nvidia-cuda-mps-control.pid"
_KERNEL = "/proc/sys/kernel/osrelease"
#: Before Volta, clients share one address space, and one that fails takes all others with it.
_LEAST_CAPABILITY = (7, 0)


def why_not(
    gpus: Sequence[GpuState],
    *,
    program: str | None,
    platform: str = "linux",
    wsl: bool = False,
    foreign: str | None = None,
) -> str:
    """Returns why MPS cannot be used for these GPUs, as half a sentence; empty if nothing speaks against it.

    Args:
        gpus: the GPUs that trials are to share.
        program: path of ``nvidia-cuda-mps-control``; ``None`` if it is not installed.
        platform: as ``sys.platform`` says it.
        wsl: whether this is Linux inside Windows.
        foreign: pipe folder of a daemon that Fluid did not start and CUDA programs would use.
    """
    if not gpus:
        return "there is no GPU"
    if not platform.startswith("linux"):
        return "MPS exists on Linux only"
    if wsl:
        return "MPS is not supported under WSL"
    if program is None:
        return f"{PROGRAM} is not installed (it is part of the NVIDIA driver)"
    if foreign is not None:
        return f"there is an MPS daemon already, in {foreign}: Fluid leaves it alone, and CUDA programs use it"
    return next((reason for gpu in gpus if (reason := _why_not_on(gpu))), "")


def why_not_here(gpus: Sequence[GpuState], environment: Mapping[str, str] | None = None) -> str:
    """As :func:`why_not`, for this machine.

    Args:
        gpus: the GPUs that trials are to share.
        environment: of the trials; ``None`` for that of this process.
    """
    variables = os.environ if environment is None else environment
    return why_not(
        gpus,
        program=find_program(),
        platform=sys.platform,
        wsl=is_wsl(),
        foreign=foreign_daemon(variables),
    )


def is_wsl(kernel: str = _KERNEL) -> bool:
    """Whether this is Linux inside Windows.

    Args:
        kernel: the file that names the kernel's release.
    """
    try:
        with open(kernel, encoding="utf-8") as file:
            return "microsoft" in file.read().lower()
    except OSError:
        return False


def foreign_daemon(environment: Mapping[str, str], default: str = DEFAULT_PIPE_FOLDER) -> str | None:
    """Returns the pipe folder of a daemon that CUDA programs would use by themselves; ``None`` if there is none.

    Args:
        environment: of the programs.
        default: where they look if it says nothing.
    """
    named = environment.get(PIPE_VARIABLE)
    if named:
        return named
    try:
        with open(os.path.join(default, _PID_FILE), encoding="ascii") as file:
            pid = int(file.read())
    except PermissionError:
        return default
    except (OSError, ValueError):
        return None
    return default if os.path.exists(f"/proc/{pid}") else None


def _why_not_on(gpu: GpuState) -> str:
    if gpu.mig:
        return f"{gpu.token} is split by MIG"
    if gpu.compute_mode == "PROHIBITED":
        return f"the compute mode of {gpu.token} is PROHIBITED"
    if gpu.capability is not None and gpu.capability < _LEAST_CAPABILITY:
        return f"{gpu.token} ({gpu.name}) is older than Volta: there a failing trial would take the others with it"
    if gpu.compute_mode in ("EXCLUSIVE_PROCESS", "EXCLUSIVE_THREAD") and gpu.processes:
        holder = gpu.processes[0].pid
        return f"the compute mode of {gpu.token} is {gpu.compute_mode}, and process {holder} holds it"
    return ""
