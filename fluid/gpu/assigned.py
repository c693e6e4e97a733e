"""Which GPU another program means by what it sets ``CUDA_VISIBLE_DEVICES`` to, as Ray does for its processes.

Ray counts a node's GPUs from 0, or passes on the names that the node's own ``CUDA_VISIBLE_DEVICES`` has
(``ray/_private/accelerators/nvidia_gpu.py``, ``worker.get_gpu_ids``). It does not say in which order it counts: the
number means what CUDA takes it for in Ray's processes. CUDA counts by the PCI bus, as NVML does, if
``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``; by default it has the fastest first (CUDA C++ Programming Guide, CUDA
Environment Variables).
"""

from __future__ import annotations

import json
import os
import subprocess

from fluid._logs import logger_of
from fluid.gpu.nvml import Gpu, find_named
from fluid.processes.interpreters import start_program

_log = logger_of(__name__)
#: Seconds for a process to start CUDA. Without persistence mode, the driver initialises all GPUs first, which can
#: take a minute.
CUDA_S = 120.0
#: What begins the name of a GPU, and of an instance of one that MIG has split.
_PREFIXES = ("GPU-", "MIG-")


def find_assigned(name: str) -> tuple[Gpu | None, str]:
    """Returns the GPU that a process of this machine sees if ``CUDA_VISIBLE_DEVICES`` is this.

    Args:
        name: a number or a UUID.

    Returns:
        The GPU, ``None`` if neither NVML nor CUDA knows it, and why it may be another one; empty if it is certain.

    Example:
        >>> find_assigned("GPU-unknown")
        (None, '')
    """
    by_bus, there = find_named(name), find_named(None)
    counts_by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(there) == 1
    if by_bus and (counts_by_bus or not name.isdecimal()):
        return by_bus[0], ""
    seen = _ask_cuda(name)
    if seen is not None:
        tokens = [prefix + seen.token for prefix in _PREFIXES]
        known = next((found[0] for token in tokens if (found := find_named(token))), None)
        return known or seen._replace(token=tokens[0]), ""
    if not by_bus:
        return None, ""
    if len({gpu.name for gpu in there}) == 1:
        return by_bus[0], ""  # GPUs that are alike have no other order.
    models = ", ".join(sorted({str(gpu.name) for gpu in there}))
    doubt = f"GPU {name} of unlike ones ({models}) is {by_bus[0].token} by the PCI bus, and CUDA cannot be asked"
    return by_bus[0], f"{doubt}: start Ray there with CUDA_DEVICE_ORDER=PCI_BUS_ID"


def _ask_cuda(name: str) -> Gpu | None:
    """The GPU of that name, by its UUID without a prefix; ``None`` if there is no CUDA, or it does not answer."""
    pipe, environment = subprocess.PIPE, {**os.environ, "CUDA_VISIBLE_DEVICES": name}
    try:
        with start_program("fluid.gpu.cuda_first_gpu", stdout=pipe, stderr=pipe, env=environment) as program:
            try:
                answer, problem = program.communicate(timeout=CUDA_S)
            except BaseException:
                program.kill()
                raise
        if program.returncode:
            _log.debug("CUDA cannot be asked for GPU %s: %s", name, problem.decode(errors="replace").strip())
            return None
        token, memory_bytes, model = json.loads(answer)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        _log.debug("CUDA cannot be asked for GPU %s: %s", name, error)
        return None
    return Gpu(str(token), float(memory_bytes), str(model) or None)
