"""Makes a lane's GPU ready before the lane says that it is; a lane that cannot use its GPU ends instead.

Trials would fail there at once, so that the device would always be the most idle one and get every queued trial.
"""

from __future__ import annotations

import os
import traceback
from typing import Any

from fluid._clock import Clock, nap
from fluid.lane.allocator import expand_segments
from fluid.lane.channel import Connection
from fluid.lane.device import DeviceUnusableError, torch_with_cuda, use_gpus
from fluid.lane.device_messages import LaneUnusable
from fluid.lane.messages import LaneOptions, encode
from fluid.lane.own_memory import OwnMemory

#: Exit status of a lane that cannot use its device.
CANNOT_USE_DEVICE = 71
#: Seconds during which a client of MPS tries again while the server refuses it, and between two attempts.
_PATIENCE_S = 5.0
_PAUSE_S = 0.25
#: In errors of CUDA that pass once the MPS server has started, or the clients that failed have ended (805 and 807).
_NOT_READY = ("MPS server is not ready", "failed to connect to the MPS")


def warm_up_or_exit(options: LaneOptions, own: OwnMemory, connection: Connection, clock: Clock) -> float:
    """Returns what :func:`warm_up` does; tells the driver and ends the process if that fails."""
    try:
        return warm_up_patiently(options, own, clock)
    except DeviceUnusableError as error:
        traceback.print_exc()  # Into the lane's log.
        connection.send_bytes(encode([LaneUnusable(clock.now(), str(error), error.position)]))
        os._exit(CANNOT_USE_DEVICE)


def warm_up_patiently(options: LaneOptions, own: OwnMemory, clock: Clock, pause_s: float = _PAUSE_S) -> float:
    """Warms the device up, and tries again for a few seconds while an MPS server is not ready.

    Raises:
        DeviceUnusableError: the device cannot be used.
    """
    deadline = clock.now() + _PATIENCE_S
    while True:
        try:
            return warm_up(options, own)
        except DeviceUnusableError as error:
            passes = bool(options.environment) and any(text in str(error) for text in _NOT_READY)
            if not passes or clock.now() >= deadline:
                raise
        nap(pause_s)


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
        refusal = expand_segments(torch, os.path.dirname(options.note))
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
