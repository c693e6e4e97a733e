"""How many processes can share a GPU at most: clients of MPS, or one in an exclusive compute mode."""

from __future__ import annotations

import os
from typing import NamedTuple

from fluid._logs import logger_of
from fluid.backends.base import Backend
from fluid.backends.virtual import ReplayingBackend
from fluid.gpu.mps_support import MOST_CLIENTS, foreign_daemon
from fluid.gpu.nvml import describe_gpus

_log = logger_of("fluid.session")


class ProcessLimit(NamedTuple):
    """How many processes a GPU takes.

    Attributes:
        most: the number; ``None`` if it is not known to be limited.
        why: why not more, as a clause.
    """

    most: int | None = None
    why: str = ""


def process_limit(backend: Backend) -> ProcessLimit:
    """Returns how many processes each GPU of a backend takes.

    Limits that are found only later, such as those of other nodes' GPUs, apply once a lane cannot start
    (:meth:`fluid.planning.occupancy.Occupancy.cap`).
    """
    if isinstance(backend, ReplayingBackend):
        return ProcessLimit()  # Its devices are none of this machine.
    hosts = {device.host for device in backend.devices() if device.kind == "gpu"}
    if not hosts:
        return ProcessLimit()
    if backend.sharing.way == "mps" or foreign_daemon(os.environ) is not None:
        return ProcessLimit(MOST_CLIENTS, "an MPS server takes no more clients on a GPU")
    if hosts == {"localhost"}:
        modes = {gpu.compute_mode or "" for gpu in describe_gpus()}
        if modes and all(mode.startswith("EXCLUSIVE") for mode in modes):
            return ProcessLimit(1, f"the compute mode of the GPUs is {min(modes)}, and MPS is not used")
    return ProcessLimit()


def bounded_packing(packing: int, limit: ProcessLimit) -> int:
    """Returns ``packing``, the most trials on one device, or fewer if GPUs take fewer processes.

    Each trial on a GPU has a lane of its own, and an idle lane is used before another one starts.
    """
    if limit.most is None or packing <= limit.most:
        return packing
    _log.warning("at most %d of %d trials are packed on a GPU: %s", limit.most, packing, limit.why)
    return limit.most
