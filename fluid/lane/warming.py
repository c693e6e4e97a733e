"""Makes a lane's GPU ready before the lane says that it is; a lane that cannot use its GPU ends instead.

Trials would fail there at once, so that the device would always be the most idle one and get every queued trial.
"""

from __future__ import annotations

import os
import traceback
from typing import Any

from fluid._clock import Clock
from fluid.lane.allocator import expand_segments
from fluid.lane.channel import Connection
from fluid.lane.device import DeviceUnusableError, torch_with_cuda, use_gpus
from fluid.lane.device_messages import LaneUnusable, LaneWarming
from fluid.lane.messages import LaneOptions, encode
from fluid.lane.own_memory import OwnMemory

#: Exit status of a lane that cannot use its device, and of one that could not as an MPS server was not ready.
CANNOT_USE_DEVICE = 71
MPS_NOT_READY = 72
#: In errors of CUDA that pass once the MPS server has started, or the clients that failed have ended (805 and 807).
_NOT_READY = ("MPS server is not ready", "failed to connect to the MPS")


def warm_up_or_exit(options: LaneOptions, own: OwnMemory, connection: Connection, clock: Clock) -> float:
    """Returns what :func:`warm_up` does; tells the driver and ends the process if that fails.

    It is not tried again here: CUDA may remember in this process that it could not be initialised.
    """
    if options.kind == "gpu":
        connection.send_bytes(encode([LaneWarming(clock.now())]))
    try:
        return warm_up(options, own)
    except DeviceUnusableError as error:
        traceback.print_exc()  # Into the lane's log.
        passes = may_pass(options, str(error))
        connection.send_bytes(encode([LaneUnusable(clock.now(), str(error), error.position, passes)]))
        os._exit(MPS_NOT_READY if passes else CANNOT_USE_DEVICE)


def may_pass(options: LaneOptions, error: str) -> bool:
    """Whether an error of CUDA in a client of MPS passes within seconds."""
    return bool(options.environment) and any(text in error for text in _NOT_READY)


def warm_up(options: LaneOptions, own: OwnMemory) -> float:
    """Makes the CUDA context of a GPU's lane ahead of its first trial, if PyTorch is loaded.

    Args:
        options: the lane's.
        own: measures what the context takes.

    Returns:
        Bytes of device memory that the context takes on the first GPU; 0 where that cannot be measured.

    Raises:
        DeviceUnusableError: CUDA cannot use one of the lane's GPUs.
    """
    torch = torch_with_cuda() if options.kind == "gpu" else None
    if torch is None:
        return 0.0
    gpus = len(options.visible.split(",")) if options.visible else 1

    def make_context() -> None:
        use_gpus(torch, gpus)
        torch.cuda.empty_cache()
        refusal = expand_segments(torch, os.path.dirname(options.note), lasting=not options.environment)
        if refusal:
            _check_after(refusal, torch, gpus)
        torch.cuda.empty_cache()

    return own.around(make_context)


def _check_after(refusal: str, torch: Any, gpus: int) -> None:
    """Checks that CUDA still works after a refusal to expand segments; the next lane knows of it, and does not try."""
    try:
        use_gpus(torch, gpus)
    except DeviceUnusableError as error:
        why = f"the driver refuses segments that expand, and CUDA failed with that; further lanes do without: {refusal}"
        raise DeviceUnusableError(error.position, why) from error
