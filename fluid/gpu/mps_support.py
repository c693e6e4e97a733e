"""Whether NVIDIA MPS can be used on this machine. Starts and changes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from fluid.gpu.mps_control import PIPE_VARIABLE, PROGRAM, find_program
from fluid.gpu.nvml import GpuState

#: Where CUDA programs look for a daemon by default.
DEFAULT_PIPE_FOLDER = "/tmp/nvidia-mps"
#: Where MPS keeps the memory that its processes share.
SHARED_MEMORY = "/dev/shm"
#: Clients that an MPS server accepts on one GPU, from Volta on.
MOST_CLIENTS = 48
#: The same from a driver on, that of CUDA 13.1 (NVIDIA, Multi-Process Service, Client-Server Connection Limits).
_MORE_CLIENTS, _MORE_SINCE = 60, 590
_PID_FILE = "nvidia-cuda-mps-control.pid"
_KERNEL = "/proc/sys/kernel/osrelease"
#: Volta's. On older GPUs clients share one address space, and the failure of one ends all.
_LEAST_CAPABILITY = (7, 0)


def unsupported_reason(
    gpus: Sequence[GpuState],
    *,
    program: str | None,
    platform: str = "linux",
    wsl: bool = False,
    foreign: str | None = None,
    shared_memory: bool = True,
) -> str:
    """Returns why MPS cannot be used for these GPUs, as a clause; empty if it can.

    Args:
        gpus: the GPUs that trials are to share.
        program: path of ``nvidia-cuda-mps-control``; ``None`` if it was not found.
        platform: ``sys.platform``.
        wsl: whether this is the Windows Subsystem for Linux.
        foreign: pipe folder of a daemon that CUDA programs would use, and that Fluid did not start; ``None`` for none.
        shared_memory: whether processes can share memory in ``/dev/shm``.
    """
    if not gpus:
        return "there is no GPU"
    if not platform.startswith("linux"):
        return "MPS is supported on Linux only"
    if wsl:
        return "MPS is not supported under WSL"
    if program is None:
        return f"{PROGRAM} is not installed (it is part of the NVIDIA driver)"
    if not shared_memory:
        return f"MPS needs {SHARED_MEMORY}, which is missing or cannot be written to"
    if foreign is not None:
        return f"an MPS daemon that Fluid did not start is in use, in {foreign}"
    return next((reason for gpu in gpus if (reason := _unsupported_reason_of(gpu))), "")


def unsupported_reason_here(gpus: Sequence[GpuState], environment: Mapping[str, str] | None = None) -> str:
    """As :func:`unsupported_reason`, for this machine.

    Args:
        gpus: the GPUs that trials are to share.
        environment: the trials'; ``None`` for that of this process.
    """
    variables = os.environ if environment is None else environment
    return unsupported_reason(
        gpus,
        program=find_program(),
        platform=sys.platform,
        wsl=is_wsl(),
        foreign=foreign_daemon(variables),
        shared_memory=os.access(SHARED_MEMORY, os.W_OK | os.X_OK),
    )


def most_clients(version: str | None) -> int:
    """Returns how many clients an MPS server accepts on one GPU.

    Args:
        version: of the GPU driver; ``None`` if it is unknown.

    Example:
        >>> most_clients("580.159.04"), most_clients("590.44.01")
        (48, 60)
    """
    major = (version or "").partition(".")[0]
    return _MORE_CLIENTS if major.isdigit() and int(major) >= _MORE_SINCE else MOST_CLIENTS


def is_wsl(kernel: str = _KERNEL) -> bool:
    """Whether this is the Windows Subsystem for Linux.

    Args:
        kernel: the file with the kernel's release.
    """
    try:
        with open(kernel, encoding="utf-8") as file:
            return "microsoft" in file.read().lower()
    except OSError:
        return False


def foreign_daemon(environment: Mapping[str, str], default: str = DEFAULT_PIPE_FOLDER) -> str | None:
    """Returns the pipe folder of the daemon that CUDA programs use by default; ``None`` if there is none.

    Args:
        environment: the programs'.
        default: the folder if the environment names none.
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


def _unsupported_reason_of(gpu: GpuState) -> str:
    if gpu.mig:
        return f"{gpu.token} is an instance of MIG" if gpu.token.startswith("MIG-") else f"{gpu.token} is split by MIG"
    if gpu.compute_mode == "PROHIBITED":
        return f"the compute mode of {gpu.token} is PROHIBITED"
    if gpu.capability is not None and gpu.capability < _LEAST_CAPABILITY:
        return f"{gpu.token} ({gpu.name}) is older than Volta: a failing trial would end the others"
    if gpu.compute_mode in ("EXCLUSIVE_PROCESS", "EXCLUSIVE_THREAD") and gpu.processes:
        holder = gpu.processes[0].pid
        return f"the compute mode of {gpu.token} is {gpu.compute_mode}, and process {holder} holds it"
    return ""
