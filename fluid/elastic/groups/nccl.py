"""NCCL's communicators: made so that an abort ends the wait for a lost member, and ended without waiting for others."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fluid.elastic.groups.generation import GenerationGuard

#: Of PyTorch, which reads them when a process group is made. By default its watchdog ends the whole process when a peer
#: dies (2: the communicator only), and its monitor ends it when the watchdog waits for 8 minutes. Both would end the
#: other residents of the lane.
_OF_PYTORCH = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
#: Between GPUs of one machine. By default NCCL connects to its peers in the first operation (since 2.22), for which
#: training waits; 0: when the communicator is made, while another width may train.
_LOCAL = {"NCCL_RUNTIME_CONNECT": "0"}
#: Between clients of different MPS servers, of which each GPU has one. NCCL would open memory of the peer by handles of
#: CUDA IPC or cuMem, and no document says that these work from one server to another. So the members exchange through
#: memory of the host, and that in /dev/shm.
_BETWEEN_SERVERS = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}
#: Longest that members take to make a communicator, seconds. It takes seconds at most unless a member is lost.
_CONNECT_S = 120.0


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    device: torch.device,
    guard: GenerationGuard,
    is_local: bool = True,
    one_mps_server: bool = True,
) -> Any:
    """Makes a process group with its communicator, which PyTorch would else make in the first operation.

    The communicator is a blocking one, although ``ncclCommInitRank`` cannot be aborted then (NVIDIA/nccl#289).
    Non-blocking ones hang at random with NCCL 2.26, so that PyTorch stopped using them by itself
    (pytorch/pytorch#153960). Also PyTorch waits for a non-blocking one under the lock that its abort needs
    (``NCCLComm::getNcclComm`` in NCCLUtils.cpp), so that a member's death in the set-up would be noticed after
    ``TORCH_NCCL_NONBLOCKING_TIMEOUT`` only, 30 minutes by default. Here a thread of its own makes the communicator. If
    a member dies meanwhile, that thread is left behind, and ends the communicator if it is ever made; training goes on
    with another one.

    Args:
        store: shared by the members.
        rank: this member's rank.
        size: number of members; all of them call this.
        timeout: longest that one operation waits for the slowest member.
        device: this member's GPU.
        guard: broken when the wait is to end.
        is_local: whether all members are on one machine.
        one_mps_server: whether all members are clients of the same MPS server, or none is one.

    Raises:
        RuntimeError: the members could not connect, or not in time.
        GenerationBrokenError: the guard was broken.
    """
    settings = _OF_PYTORCH | (_LOCAL if is_local else {}) | ({} if one_mps_server else _BETWEEN_SERVERS)
    for name, value in settings.items():  # NCCL reads its own once, with the first communicator of the process.
        os.environ.setdefault(name, value)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 1  # Whatever TORCH_NCCL_USE_COMM_NONBLOCKING says.
    process_group = dist.ProcessGroupNCCL(store, rank, size, options)
    gpu = _numbered(device)
    errors: list[RuntimeError] = []
    done = guard.event()
    #: Acquired by the first of the two threads to decide: the communicator is connected, or left behind.
    decided = threading.Lock()

    def make(_: dist.Store) -> None:
        try:
            process_group.eager_connect_single_device(gpu)
            if not decided.acquire(blocking=False):
                abort([process_group])
        except RuntimeError as error:
            errors.append(error)
        finally:
            done.set()

    # It keeps the store, which the process group uses, also where it is left behind.
    threading.Thread(target=make, args=(store,), name="fluid-elastic-connect", daemon=True).start()
    done.wait(_CONNECT_S)
    if errors:
        raise errors[0]
    if decided.acquire(blocking=False):
        guard.check()
        raise RuntimeError(f"the members did not connect through NCCL within {_CONNECT_S:g} s")
    return process_group


def wait_for_gpu() -> None:
    """Waits until the operations have ended, which return when they are queued."""
    torch.cuda.current_stream().synchronize()


def shut_down(holder: list[Any]) -> None:
    """Ends a process group and takes it from its list; one that is only dropped warns, and aborts."""
    with suppress(RuntimeError):  # A peer is gone.
        holder[0].shutdown()
    holder.clear()


def abort(holder: list[Any]) -> None:
    """Ends a process group without waiting for its operations, and takes it from its list."""
    with suppress(RuntimeError):  # A peer is gone.
        holder[0].abort()
    holder.clear()


def _numbered(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
