"""Makes a lane's GPU ready before the lane says that it is; a lane that cannot use its GPU ends instead.

Trials would fail there at once, so that the device would always be the most idle one and get every queued trial.
"""

from __future__ import annotations

import os
import traceback
import warnings
from contextlib import suppress
from typing import Any

from fluid._clock import Clock
from fluid.gpu.driver_notes import read_note, write_note
from fluid.lane.channel import Connection
from fluid.lane.device.device import DeviceUnusableError, torch_with_cuda, use_gpus
from fluid.lane.device.own_memory import OwnMemory
from fluid.lane.errors import one_line
from fluid.lane.protocol import LaneOptions, LaneUnusable, LaneWarming
from fluid.wire import encode

# -- allocator -----------------------------------------------------------------------------------
#
# How PyTorch's allocator takes memory from a lane's GPU.


#: Variables by which users configure the allocator; with one of them set, it stays as they have chosen.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
#: What PyTorch raises where it knows no such setting, or the driver refuses it.
_REFUSALS = (RuntimeError, ValueError, AttributeError, AssertionError)
_SETTING = "expandable_segments"
#: Numbers in the tensor of the trial: 16 MiB, more than a segment of small tensors.
_TRIED = 1 << 22
#: Name of the note that this driver refuses them on a model of GPU, and the seconds for which it counts: the refusal
#: may be that of a sandbox around the driver, which can be renewed without it.
_KIND = "no-expandable-segments"
_LASTS_S = 24 * 3600.0


def expand_segments(torch: Any, folder: str = "", *, lasting: bool = True) -> str:
    """Lets the allocator's segments grow and shrink, so that it can return what tensors have freed.

    Otherwise a segment is kept as long as a single tensor is in it, and no other process can use the rest. Changes
    nothing if the user has configured the allocator, if this PyTorch does not support it, or if the driver refused it
    within the last day. By call rather than by variable: releases of PyTorch differ in the variables that they read,
    and warn about others. The driver maps such segments by calls of their own, which some sandboxes do not pass on.

    Args:
        torch: the module, which has no tensors on the first GPU yet, and can use it.
        folder: where the session's lanes note a refusal, too; empty for none.
        lasting: whether a refusal is noted for later sessions. Not in a client of MPS: the fault of another client may
            have come just then, and looks the same.

    Returns:
        Why the driver refuses it, after which CUDA may be of no use to this process; empty if it does not, or nothing
        was tried.
    """
    change = getattr(getattr(torch, "_C", None), "_accelerator_setAllocatorSettings", None)
    change = change or getattr(getattr(torch.cuda, "memory", None), "_set_allocator_settings", None)
    if change is None or any(name in os.environ for name in _VARIABLES):
        return ""
    model = torch.cuda.get_device_name(0)
    if _was_refused(folder, model):
        return ""
    try:
        _set(change, expand=True)
    except _REFUSALS:
        return ""
    refusal = _try(torch)
    if not refusal:
        return ""
    with suppress(*_REFUSALS):
        _set(change, expand=False)
    if "out of memory" in refusal and _try(torch):
        with suppress(*_REFUSALS):
            _set(change, expand=True)
        return ""  # The GPU is full: that says nothing about segments.
    _note(refusal, folder, model, lasting=lasting)
    return refusal


def _set(change: Any, *, expand: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(f"{_SETTING}:{expand}")


def _try(torch: Any) -> str:
    """Takes memory and gives it back, twice, as what was unmapped must come back; returns the error, if any."""
    try:
        for _ in range(2):
            taken = torch.zeros(_TRIED, device="cuda:0")
            torch.cuda.synchronize(0)
            del taken
            torch.cuda.empty_cache()
    except _REFUSALS as error:
        return one_line(error)
    return ""


def _was_refused(folder: str, model: str) -> bool:
    in_session = bool(folder) and os.path.exists(_in_session(folder, model))
    return in_session or bool(read_note(_KIND, model, lasts_s=_LASTS_S))


def _note(refusal: str, folder: str, model: str, *, lasting: bool) -> None:
    if lasting:
        write_note(_KIND, refusal, model)
    if folder:
        with suppress(OSError), open(_in_session(folder, model), "w", encoding="utf-8") as file:
            file.write(refusal)


def _in_session(folder: str, model: str) -> str:
    return os.path.join(folder, f"{_KIND}-{model.replace('/', '-')}")


# -- warming -------------------------------------------------------------------------------------


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
        connection.send_bytes(encode([LaneWarming()]))
    try:
        return warm_up(options, own)
    except DeviceUnusableError as error:
        traceback.print_exc()  # Into the lane's log.
        passes = may_pass(options, str(error))
        connection.send_bytes(encode([LaneUnusable(str(error), error.position, passes)]))
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
