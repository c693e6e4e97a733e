"""How many processes can share a GPU at most: clients of MPS, or one in an exclusive compute mode."""

from __future__ import annotations

import logging
import os

from fluid.backends.base import Backend
from fluid.gpu.mps_support import MOST_CLIENTS, foreign_daemon
from fluid.gpu.nvml import describe_gpus

_log = logging.getLogger("fluid.session")


def bounded_packing(packing: int, backend: Backend) -> int:
    """Returns ``packing``, the most trials on one device, or fewer if the backend's GPUs take fewer processes.

    Each trial on a GPU has a lane of its own, and an idle lane is used before another one starts. Limits that are found
    only later, such as those of other nodes' GPUs, apply once a lane cannot start
    (:meth:`fluid.planning.occupancy.Occupancy.cap`).
    """
    hosts = {device.host for device in backend.devices() if device.kind == "gpu"}
    if not hosts:
        return packing
    limit, why = packing, ""
    if backend.sharing.way == "mps" or foreign_daemon(os.environ) is not None:
        limit, why = MOST_CLIENTS, "an MPS server takes no more clients on a GPU"
    elif hosts == {"localhost"}:
        modes = {gpu.compute_mode or "" for gpu in describe_gpus()}
        if modes and all(mode.startswith("EXCLUSIVE") for mode in modes):
            limit, why = 1, f"the compute mode of the GPUs is {min(modes)}, and MPS is not used"
    if packing > limit:
        _log.warning("at most %d of %d trials are packed on a GPU: %s", limit, packing, why)
    return min(packing, limit)
