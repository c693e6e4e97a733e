"""The GPUs of this machine, through NVML, which does not use CUDA and so is safe before a fork."""

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
#: The kernel's list of GPUs, which needs no library.
_PROC = "/proc/driver/nvidia/gpus"

#: nvidia-smi's names of the compute modes, by NVML's number.
COMPUTE_MODES = ("DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS")


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        token: its UUID, the value of ``CUDA_VISIBLE_DEVICES`` with which a process sees this GPU only.
        memory_bytes: its memory.
        name: the model; ``None`` if the driver does not report it.

    Example:
        >>> Gpu("GPU-5f0d", 80e9).token
        'GPU-5f0d'
    """

    token: str
    memory_bytes: float
    name: str | None = None


class GpuProcess(NamedTuple):
    """A process that uses a GPU.

    Attributes:
        pid: its process id. In a container NVML may report the host's.
        memory_bytes: memory that it holds, CUDA context included; ``None`` if the driver does not report it.

    Example:
        >>> GpuProcess(pid=1234, memory_bytes=None).pid
        1234
    """

    pid: int
    memory_bytes: float | None


class GpuState(NamedTuple):
    """The state of a GPU. Values that the driver does not report are ``None``.

    Attributes:
        token: its UUID, as in :class:`Gpu`.
        name: the model.
        memory_bytes: its memory.
        used_bytes: memory in use by all processes.
        busy: share of the last sampling period in which a kernel ran, 0 to 1; not the share of the GPU that it filled.
        mig: whether MIG splits it into instances, or it is such an instance.
        compute_mode: one of :data:`COMPUTE_MODES`.
        capability: CUDA compute capability, (major, minor).
        processes: the processes that compute on it, clients of MPS included.

    Example:
        >>> state = GpuState("GPU-5f0d", "H200", 140e9, 35e9, 0.5, False, "DEFAULT", (9, 0), ())
        >>> state.used_bytes / state.memory_bytes
        0.25
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

    Numbers in that variable are in the order of the PCI bus. Without NVML or its Python package the list is empty.

    Example:
        >>> all(gpu.memory_bytes > 0 for gpu in find_gpus())
        True
    """
    if not _imports.available:
        if _kernel_has_gpus():
            _log.warning("this machine has GPUs, but they cannot be used without: pip install nvidia-ml-py")
        return []
    with _session() as error:
        return [] if error else [_gpu(handle) for handle in _visible_handles()]


def describe_gpus() -> list[GpuState]:
    """Returns the state of the GPUs that :func:`find_gpus` finds, in the same order, without those that fail.

    Example:
        >>> all(state.used_bytes <= state.memory_bytes for state in describe_gpus())
        True
    """
    found = []
    with _session() as error:
        for handle in [] if error else _visible_handles():
            try:
                found.append(_state(handle))
            except pynvml.NVMLError as fault:
                _log.warning("leaving out a GPU that does not answer: %s", fault)
    return found


def processes_on(token: str) -> list[GpuProcess] | None:
    """Returns the processes that compute on a GPU.

    Args:
        token: its UUID.

    Returns:
        The processes; ``None`` if there is no such GPU or the driver does not report them.

    Example:
        >>> processes_on("GPU-unknown") is None
        True
    """
    with _session() as error:
        handle = None if error else _query(lambda: pynvml.nvmlDeviceGetHandleByUUID(token.encode()))
        return None if handle is None else _processes(handle)


def process_bytes(token: str, pid: int) -> float | None:
    """Returns the bytes that a process holds on a GPU, CUDA context included.

    Args:
        token: the GPU's UUID.
        pid: the process.

    Returns:
        Bytes; 0 for a process that does not use the GPU; ``None`` if unknown, as in a container where NVML reports the
        host's process ids.

    Example:
        >>> process_bytes("GPU-unknown", 1) is None
        True
    """
    processes = processes_on(token)
    if processes is None:
        return None
    for process in processes:
        if process.pid == pid:
            return process.memory_bytes
    # An id that no process here has is one of the host's: this process may be listed under another one, too.
    return 0.0 if all(os.path.exists(f"/proc/{process.pid}") for process in processes) else None


def used_bytes(token: str) -> float | None:
    """Returns the bytes of a GPU that are in use by all processes; ``None`` if there is no such GPU.

    Args:
        token: its UUID.

    Example:
        >>> used_bytes("GPU-unknown") is None
        True
    """
    with _session() as error:
        handle = None if error else _query(lambda: pynvml.nvmlDeviceGetHandleByUUID(token.encode()))
        return None if handle is None else _query(lambda: float(pynvml.nvmlDeviceGetMemoryInfo(handle).used))


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver; ``None`` if there is no driver or no pynvml.

    Example:
        >>> version = driver_version()
        >>> version is None or "." in version
        True
    """
    with _session() as error:
        return None if error else _query(lambda: _text(pynvml.nvmlSystemGetDriverVersion()))


def no_gpu_reason() -> str:
    """Returns why :func:`find_gpus` finds none, as a clause; empty if it finds some.

    Example:
        >>> (no_gpu_reason() == "") == bool(find_gpus())
        True
    """
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
    """Reads ``CUDA_VISIBLE_DEVICES`` as CUDA does: ignores everything from the first unknown or repeated name on.

    Args:
        setting: its value; ``None`` if it is not set.
        count: number of GPUs.
        exists: returns whether a GPU, or an instance of one, has that UUID.

    Returns:
        Numbers and UUIDs.

    Example:
        >>> visible("1,0,7,2", count=3, exists=lambda uuid: False)
        [1, 0]
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
    """Initializes NVML for a block; yields why it cannot be used, or an empty text."""
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
    return _query(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())) is not None


def _gpu(handle: Any) -> Gpu:
    memory_bytes = float(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    name = _query(lambda: _text(pynvml.nvmlDeviceGetName(handle)))
    return Gpu(_text(pynvml.nvmlDeviceGetUUID(handle)), memory_bytes, name or None)


def _state(handle: Any) -> GpuState:
    token, memory_bytes, name = _gpu(handle)
    mode = _query(lambda: int(pynvml.nvmlDeviceGetComputeMode(handle)))
    mig = _query(lambda: bool(pynvml.nvmlDeviceGetMigMode(handle)[0]))
    busy = _query(lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0)
    capability = _query(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    processes = _processes(handle)
    return GpuState(
        token,
        name or "GPU",
        memory_bytes,
        float(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        busy,
        True if token.startswith("MIG-") else mig,
        COMPUTE_MODES[mode] if mode is not None and mode < len(COMPUTE_MODES) else None,
        None if capability is None else (int(capability[0]), int(capability[1])),
        None if processes is None else tuple(processes),
    )


def _processes(handle: Any) -> list[GpuProcess] | None:
    found = _query(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if found is None:
        return None
    return [GpuProcess(int(one.pid), _bytes_or_none(one.usedGpuMemory)) for one in found]


def _bytes_or_none(value: int | None) -> float | None:
    return None if value is None else float(value)


def _query(question: Callable[[], Any]) -> Any:
    """Returns NVML's answer; ``None`` if the GPU, the driver or an old pynvml does not support the query."""
    try:
        return question()
    except (pynvml.NVMLError, AttributeError):
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
