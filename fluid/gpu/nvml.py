"""The GPUs of this machine, as NVML tells. NVML leaves CUDA alone, so asking it does no harm before a fork."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fluid._imports import try_import

with try_import("pynvml", install="pip install nvidia-ml-py") as _imports:
    import pynvml

_log = logging.getLogger(__name__)
#: The kernel's list of GPUs: there also without any library.
_PROC = "/proc/driver/nvidia/gpus"

#: Compute modes, by NVML's number, as nvidia-smi names them.
COMPUTE_MODES = ("DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS")


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        token: what to set ``CUDA_VISIBLE_DEVICES`` to, for a process to see this GPU only.
        memory_bytes: its memory.
    """

    token: str
    memory_bytes: float


class GpuProcess(NamedTuple):
    """A process that uses a GPU.

    Attributes:
        pid: its number. In a container NVML may tell the host's.
        memory_bytes: what it holds there, CUDA context included; ``None`` where the driver does not tell.
    """

    pid: int
    memory_bytes: float | None


class GpuState(NamedTuple):
    """All that is asked about one GPU. What the driver does not tell is ``None``.

    Attributes:
        token: as for :class:`Gpu`: its UUID.
        name: the model.
        memory_bytes, used_bytes: its memory, and what is taken of it by everybody.
        busy: share of the last moments in which some kernel ran, 0 to 1. Not how much of the GPU it filled.
        mig: whether it is split into instances by MIG, or is such an instance.
        compute_mode: one of :data:`COMPUTE_MODES`.
        capability: CUDA compute capability, (major, minor).
        processes: who uses it for computing; under MPS clients are listed too.
    """

    token: str
    name: str
    memory_bytes: float
    used_bytes: float
    busy: float | None
    mig: bool | None
    compute_mode: str | None
    capability: tuple[int, int] | None
    processes: tuple[GpuProcess, ...] | None


def find_gpus() -> list[Gpu]:
    """Returns the GPUs that this process may use, in the order of ``CUDA_VISIBLE_DEVICES`` if that is set.

    Numbers there count in the order of the PCI bus. Where NVML or its Python package is missing the list is empty.
    """
    if not _imports.available:
        if _kernel_has_gpus():
            _log.warning("this machine has GPUs, but they cannot be used without: pip install nvidia-ml-py")
        return []
    with _session() as error:
        return [] if error else [_gpu(handle) for handle in _visible_handles()]


def describe_gpus() -> list[GpuState]:
    """Returns the state of the GPUs that :func:`find_gpus` finds, in the same order, but for those with a fault."""
    found = []
    with _session() as error:
        for handle in [] if error else _visible_handles():
            try:
                found.append(_state(handle))
            except pynvml.NVMLError as fault:
                _log.warning("a GPU is left out, as it does not answer: %s", fault)
    return found


def processes_on(token: str) -> list[GpuProcess] | None:
    """Returns who uses a GPU for computing.

    Args:
        token: its UUID.

    Returns:
        The processes; ``None`` where there is no such GPU or the driver does not tell.
    """
    with _session() as error:
        handle = None if error else _ask(lambda: pynvml.nvmlDeviceGetHandleByUUID(token.encode()))
        return None if handle is None else _processes(handle)


def process_bytes(token: str, pid: int) -> float | None:
    """Returns the bytes that a process holds on a GPU, CUDA context included.

    Args:
        token: the GPU's UUID.
        pid: the process.

    Returns:
        Bytes; 0 for a process that does not use it; ``None`` where that cannot be told, as where NVML counts processes
        of the host and this is a container.
    """
    processes = processes_on(token)
    if processes is None:
        return None
    for process in processes:
        if process.pid == pid:
            return process.memory_bytes
    # A number that no process here has is one of the host's: ours may be listed under another, too.
    return 0.0 if all(os.path.exists(f"/proc/{process.pid}") for process in processes) else None


def used_bytes(token: str) -> float | None:
    """Returns the bytes of a GPU that are taken, by whomever; ``None`` where there is no such GPU.

    Args:
        token: its UUID.
    """
    with _session() as error:
        handle = None if error else _ask(lambda: pynvml.nvmlDeviceGetHandleByUUID(token.encode()))
        return None if handle is None else _ask(lambda: float(pynvml.nvmlDeviceGetMemoryInfo(handle).used))


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver; ``None`` if there is none, or nothing to ask it with."""
    with _session() as error:
        return None if error else _ask(lambda: _text(pynvml.nvmlSystemGetDriverVersion()))


def why_no_gpus() -> str:
    """Returns why :func:`find_gpus` finds none, as half a sentence; empty if it finds some."""
    if not _imports.available:
        if _kernel_has_gpus():
            return "there are GPUs, but they cannot be used without: pip install nvidia-ml-py"
        return "there is no NVIDIA driver"
    with _session() as error:
        if error:
            return f"there is no NVIDIA driver ({error})"
        if pynvml.nvmlDeviceGetCount() == 0:
            return "the NVIDIA driver knows of no GPU"
        if not _visible_handles():
            return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} hides them all"
    return ""


def visible(setting: str | None, count: int, exists: Callable[[str], bool]) -> list[int | str]:
    """Reads ``CUDA_VISIBLE_DEVICES`` the way CUDA does: what follows the first unknown or repeated name is ignored.

    Args:
        setting: its value; ``None`` if it is not set.
        count: how many GPUs there are.
        exists: whether there is a GPU, or a part of one, of that UUID.

    Returns:
        Numbers and UUIDs.
    """
    if setting is None:
        return list(range(count))
    chosen: list[int | str] = []
    for text in setting.split(","):
        name: int | str = text.strip()
        if isinstance(name, str) and name.isdecimal():
            name = int(name)
        known = name < count if isinstance(name, int) else bool(name) and exists(name)
        if not known or name in chosen:
            break
        chosen.append(name)
    return chosen


@contextmanager
def _session() -> Iterator[str]:
    """NVML, for as long as it is needed; tells why it cannot be used, or nothing."""
    if not _imports.available:
        yield "pynvml is not installed"
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield str(error) or "NVML does not answer"
        return
    try:
        yield ""
    finally:
        pynvml.nvmlShutdown()


def _kernel_has_gpus() -> bool:
    return os.path.isdir(_PROC) and bool(os.listdir(_PROC))


def _visible_handles() -> list[Any]:
    chosen = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), pynvml.nvmlDeviceGetCount(), _exists)
    return [
        pynvml.nvmlDeviceGetHandleByIndex(name)
        if isinstance(name, int)
        else pynvml.nvmlDeviceGetHandleByUUID(name.encode())
        for name in chosen
    ]


def _exists(uuid: str) -> bool:
    return _ask(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())) is not None


def _gpu(handle: Any) -> Gpu:
    return Gpu(_text(pynvml.nvmlDeviceGetUUID(handle)), float(pynvml.nvmlDeviceGetMemoryInfo(handle).total))


def _state(handle: Any) -> GpuState:
    token, memory_bytes = _gpu(handle)
    mode = _ask(lambda: int(pynvml.nvmlDeviceGetComputeMode(handle)))
    mig = _ask(lambda: bool(pynvml.nvmlDeviceGetMigMode(handle)[0]))
    busy = _ask(lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0)
    capability = _ask(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    processes = _processes(handle)
    return GpuState(
        token,
        _ask(lambda: _text(pynvml.nvmlDeviceGetName(handle))) or "GPU",
        memory_bytes,
        float(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        busy,
        True if token.startswith("MIG-") else mig,
        COMPUTE_MODES[mode] if mode is not None and mode < len(COMPUTE_MODES) else None,
        None if capability is None else (int(capability[0]), int(capability[1])),
        None if processes is None else tuple(processes),
    )


def _processes(handle: Any) -> list[GpuProcess] | None:
    found = _ask(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if found is None:
        return None
    return [GpuProcess(int(one.pid), _bytes_or_none(one.usedGpuMemory)) for one in found]


def _bytes_or_none(value: int | None) -> float | None:
    return None if value is None else float(value)


def _ask(question: Callable[[], Any]) -> Any:
    """What NVML answers; ``None`` where this GPU or this driver cannot tell, or an old package does not ask."""
    try:
        return question()
    except (pynvml.NVMLError, AttributeError):
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
