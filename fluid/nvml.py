"""The GPUs of this machine, as NVML tells. NVML leaves CUDA alone, so asking it does no harm before a fork."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from fluid._imports import try_import

with try_import("pynvml", install="pip install nvidia-ml-py") as _imports:
    import pynvml

_log = logging.getLogger(__name__)
#: The kernel's list of GPUs: there also without any library.
_PROC = "/proc/driver/nvidia/gpus"


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        token: what to set ``CUDA_VISIBLE_DEVICES`` to, for a process to see this GPU only.
        memory_bytes: its memory.
    """

    token: str
    memory_bytes: float


def find_gpus() -> list[Gpu]:
    """Returns the GPUs that this process may use, in the order of ``CUDA_VISIBLE_DEVICES`` if that is set.

    Numbers there count in the order of the PCI bus. Where NVML or its Python package is missing the list is empty.
    """
    if not _imports.available:
        if os.path.isdir(_PROC) and os.listdir(_PROC):
            _log.warning("this machine has GPUs, but they cannot be used without: pip install nvidia-ml-py")
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []  # No driver: no GPUs.
    try:
        chosen = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), pynvml.nvmlDeviceGetCount(), _exists)
        return [_gpu(name) for name in chosen]
    finally:
        pynvml.nvmlShutdown()


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


def _exists(uuid: str) -> bool:
    try:
        pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except pynvml.NVMLError:
        return False
    return True


def _gpu(name: int | str) -> Gpu:
    handle: Any
    if isinstance(name, int):
        handle = pynvml.nvmlDeviceGetHandleByIndex(name)
    else:
        handle = pynvml.nvmlDeviceGetHandleByUUID(name.encode())
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    token = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    return Gpu(token, float(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
