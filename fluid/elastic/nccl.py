"""NCCL's communicators: made so that an abort ends the wait for a lost member, and ended without waiting for others."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fluid.elastic.generation import GenerationGuard

#: Settings of ProcessGroupNCCL, which reads them when it is made. By default its watchdog ends the whole process when a
#: peer dies (2: the communicator only), and its monitor ends the process when the watchdog waits for 8 minutes. Both
#: would end the other residents of the lane.
_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def connect(
    store: dist.Store, rank: int, size: int, timeout: timedelta, device: torch.device, guard: GenerationGuard
) -> Any:
    """Makes a process group with its communicator, which PyTorch would else make in the first operation.

    Args:
        store: shared by the members.
        rank: this member's rank.
        size: number of members; all of them call this.
        timeout: longest that one operation waits for the slowest member.
        device: this member's GPU.
        guard: of the generation.

    Raises:
        RuntimeError: the members could not connect.
        GenerationBrokenError: the generation was aborted. A thread may then be left that waits for the lost member, as
            NCCL cannot be interrupted while it connects.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    process_group = dist.ProcessGroupNCCL(store, rank, size, options)
    gpu = _numbered(device)
    errors: list[RuntimeError] = []
    connected = threading.Event()
    done = guard.event()

    def make() -> None:
        try:
            process_group.eager_connect_single_device(gpu)
            connected.set()
        except RuntimeError as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=make, name="fluid-elastic-connect", daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]
    if not connected.is_set():
        guard.check()
    return process_group


def wait_for_gpu() -> None:
    """Waits until the operations have ended, which return when they are queued."""
    torch.cuda.current_stream().synchronize()


def shut_down(holder: list[Any]) -> None:
    """Ends a process group and takes it from its list; one that is only dropped warns, and aborts."""
    with suppress(RuntimeError):  # A peer is gone.
        holder[0].shutdown()
    holder.clear()


def _numbered(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
