"""The GPUs of this machine, through NVML, which does not use CUDA and so is safe before a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import starmap
from typing import Any, NamedTuple

from fluid._imports import try_import
from fluid._logs import logger_of
from fluid.gpu.visible_devices import visible
from fluid.resources import DEFAULT_MEMORY_WATERMARK

_INSTALL = "pip install nvidia-ml-py"
with try_import("pynvml", install=_INSTALL) as _imports:
    import pynvml

_log = logger_of(__name__)
#: The kernel's list of GPUs, which needs no library.
_PROC = "/proc/driver/nvidia/gpus"

#: nvidia-smi's names of the compute modes, by NVML's number.
COMPUTE_MODES = ("DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS")


class Gpu(NamedTuple):
    """A GPU, or an instance of one that MIG has split.

    Attributes:
        token: its UUID, the value of ``CUDA_VISIBLE_DEVICES`` with which a process sees this GPU only.
        memory_bytes: its memory.
        name: the model; ``None`` if the driver does not report it.
        free_bytes: memory that no process held when this was read; ``None`` if unknown.

    Example:
        >>> Gpu("GPU-5f0d", 80e9, free_bytes=36e9).available_bytes
        40000000000.0
    """

    token: str
    memory_bytes: float
    name: str | None = None
    free_bytes: float | None = None

    @property
    def available_bytes(self) -> float:
        """The memory to plan with: of this, the share that trials may fill (the watermark) is free.

        It is all memory unless other processes hold more than the rest.
        """
        free = self.memory_bytes if self.free_bytes is None else self.free_bytes
        return min(self.memory_bytes, free / DEFAULT_MEMORY_WATERMARK)


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

    Numbers in that variable are in the order of the PCI bus. A GPU that MIG has split is replaced by its instances: a
    CUDA process could use only the first of them. Without NVML or its Python package the list is empty.

    Example:
        >>> all(gpu.memory_bytes > 0 for gpu in find_gpus())
        True
    """
    if not _imports.available and _kernel_has_gpus():
        _log.warning("this machine has GPUs, which cannot be used: pynvml %s; %s", _imports.problem, _INSTALL)
    return find_named(os.environ.get("CUDA_VISIBLE_DEVICES"))


def find_named(names: str | None) -> list[Gpu]:
    """Returns the GPUs that :func:`find_gpus` would find if ``CUDA_VISIBLE_DEVICES`` were this; ``None`` for all.

    Example:
        >>> find_named("GPU-unknown")
        []
    """
    return [] if _session.problem() else [_gpu(handle) for handle in _visible_handles(names)]


def describe_gpus() -> list[GpuState]:
    """Returns the state of the GPUs that :func:`find_gpus` finds, in the same order, without those that fail.

    Example:
        >>> all(state.used_bytes <= state.memory_bytes for state in describe_gpus())
        True
    """
    found = []
    for handle in [] if _session.problem() else _visible_handles(os.environ.get("CUDA_VISIBLE_DEVICES")):
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
    handle = find_handle(token)
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
    if (processes := processes_on(token)) is None:
        return None
    for process in processes:
        if process.pid == pid:
            return process.memory_bytes
    # An id that no process here has is one of the host's: this process may be listed under another one, too.
    return 0.0 if all(os.path.exists(f"/proc/{process.pid}") for process in processes) else None


def used_bytes(token: str, *, reserved: bool = True) -> float | None:
    """Returns the bytes of a GPU that are in use by all processes; ``None`` if unknown, or there is no such GPU.

    Args:
        token: its UUID.
        reserved: whether to count what the driver reserves for itself; old drivers do not tell these bytes apart.

    Example:
        >>> used_bytes("GPU-unknown") is None
        True
    """
    handle = find_handle(token)
    if reserved or handle is None:
        return None if handle is None else query(lambda: float(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
    used: float | None = query(lambda: float(pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used))
    return used


def cpu_cores(token: str) -> tuple[int, ...]:
    """Returns the CPU cores of the NUMA node of a GPU; none if they are unknown.

    Args:
        token: its UUID.

    Example:
        >>> cpu_cores("GPU-unknown")
        ()
    """
    handle, words = find_handle(token), ((os.cpu_count() or 1) + 63) // 64
    masks = None if handle is None else query(lambda: list(pynvml.nvmlDeviceGetCpuAffinity(handle, words)))
    return tuple(64 * word + bit for word, mask in enumerate(masks or ()) for bit in range(64) if mask >> bit & 1)


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver; ``None`` if there is no driver or no pynvml.

    Example:
        >>> version = driver_version()
        >>> version is None or "." in version
        True
    """
    return None if _session.problem() else query(lambda: _text(pynvml.nvmlSystemGetDriverVersion()))


def no_gpu_reason() -> str:
    """Returns why :func:`find_gpus` finds none, as a clause; empty if it finds some.

    Example:
        >>> (no_gpu_reason() == "") == bool(find_gpus())
        True
    """
    if not _imports.available:
        if _kernel_has_gpus():
            return f"there are GPUs, but pynvml {_imports.problem}; {_INSTALL}"
        return "there is no NVIDIA driver"
    if problem := _session.problem():
        return f"there is no NVIDIA driver ({problem})"
    if pynvml.nvmlDeviceGetCount() == 0:
        return "the NVIDIA driver knows of no GPU"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not _visible_handles(shown):
        if _chosen_handles(shown):
            return "MIG has split the visible GPUs, and they have no instances"
        return f"CUDA_VISIBLE_DEVICES={shown!r} hides them all"
    return ""


def find_handle(token: str) -> Any:
    """Returns NVML's handle of the GPU with this UUID; ``None`` if there is none, or NVML cannot be used.

    Example:
        >>> find_handle("GPU-unknown") is None
        True
    """
    return None if _session.problem() else query(lambda: pynvml.nvmlDeviceGetHandleByUUID(token.encode()))


def query(question: Callable[[], Any]) -> Any:
    """Returns NVML's answer; ``None`` if the GPU, the driver or an old pynvml does not support the query.

    Example:
        >>> query(lambda: 7)
        7
    """
    try:
        return question()
    except (pynvml.NVMLError, AttributeError):
        return None


class _NvmlSession:
    """The process's NVML session: the first question opens it, and it stays open until the process ends.

    Opening takes 10 to 100 ms, and without persistence mode the driver may initialise the GPU each time.
    """

    def __init__(self) -> None:
        #: The process that opened it: a forked child opens its own.
        self._pid: int | None = None

    def problem(self) -> str:
        """Opens the session if it is not open; returns why NVML cannot be used, or an empty text."""
        if not _imports.available:
            return f"pynvml {_imports.problem}"
        if self._pid != os.getpid():
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                return str(error) or "NVML does not answer"
            self._pid = os.getpid()
        return ""


_session = _NvmlSession()


def _kernel_has_gpus() -> bool:
    return os.path.isdir(_PROC) and bool(os.listdir(_PROC))


def _visible_handles(names: str | None) -> list[Any]:
    """Handles of the GPUs of these names; of a GPU that MIG has split, those of its instances."""
    found: dict[str, Any] = {}  # An instance may be named beside its GPU.
    for handle in _chosen_handles(names):
        for part in _instances(handle):
            found.setdefault(_text(pynvml.nvmlDeviceGetUUID(part)), part)
    return list(found.values())


def _instances(handle: Any) -> list[Any]:
    """The MIG instances of a GPU; the GPU itself if MIG has not split it."""
    if not query(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]):
        return [handle]
    count = query(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    if count is None:
        return [handle]
    return [part for index in range(count) if (part := _instance(handle, index)) is not None]


def _instance(handle: Any, index: int) -> Any:
    """A MIG instance of a GPU; ``None`` if none has that number."""
    return query(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))


def _chosen_handles(names: str | None) -> list[Any]:
    chosen = visible(names, pynvml.nvmlDeviceGetCount(), find_handle)
    return [
        pynvml.nvmlDeviceGetHandleByIndex(name)
        if isinstance(name, int)
        else pynvml.nvmlDeviceGetHandleByUUID(name.encode())
        for name in chosen
    ]


def _gpu(handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = query(lambda: _text(pynvml.nvmlDeviceGetName(handle)))
    free_bytes = max(0.0, float(memory.total - memory.used))
    return Gpu(_text(pynvml.nvmlDeviceGetUUID(handle)), float(memory.total), name or None, free_bytes)


def _state(handle: Any) -> GpuState:
    token, memory_bytes, name, free_bytes = _gpu(handle)
    mode = query(lambda: int(pynvml.nvmlDeviceGetComputeMode(handle)))
    mig = query(lambda: bool(pynvml.nvmlDeviceGetMigMode(handle)[0]))
    busy = query(lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0)
    capability = query(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    processes = _processes(handle)
    return GpuState(
        token,
        name or "GPU",
        memory_bytes,
        memory_bytes - (free_bytes or 0.0),
        busy,
        True if token.startswith("MIG-") else mig,
        COMPUTE_MODES[mode] if mode is not None and mode < len(COMPUTE_MODES) else None,
        None if capability is None else (int(capability[0]), int(capability[1])),
        None if processes is None else tuple(processes),
    )


def _processes(handle: Any) -> list[GpuProcess] | None:
    """The processes with a CUDA context; NVML lists clients of MPS apart, or in both lists, depending on the driver."""
    lists = (
        query(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        query(lambda: pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)),
    )
    if lists[0] is None and lists[1] is None:
        return None
    found: dict[int, float | None] = {}
    for process in [*(lists[0] or ()), *(lists[1] or ())]:
        known = [float(each) for each in (found.get(process.pid), process.usedGpuMemory) if each is not None]
        found[int(process.pid)] = max(known, default=None)
    return list(starmap(GpuProcess, found.items()))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
