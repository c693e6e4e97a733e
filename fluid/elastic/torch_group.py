"""The process groups of torch.distributed, gloo between CPUs and NCCL between GPUs, and memory on one machine.

They are made directly, not by ``init_process_group``: there may be only one default group in a process, while a
lane hosts several trials, and a trial may want the default group for itself.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fluid.elastic.group import GenerationBrokenError, GenerationGuard, own_address_towards, split_address
from fluid.elastic.host_group import HostGroup, SharedMemory, host_token

#: Rank 0 listens before anybody is told where: who cannot connect within this time finds it dead. Seconds.
_CONNECT_S = 5.0
#: Once all members have said that they are there, they connect within this time. Seconds.
_MESH_S = 15.0
#: How long members wait for each other's first sign, if nobody aborts the generation. Seconds.
_ARRIVE_S = 300.0
_LOOK_S = 0.001
#: Without this, NCCL's watchdog ends the whole process when a peer dies; 2 makes it end the communicator only.
_NCCL_ON_ERROR = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")


class TorchGroup:
    """A :class:`fluid.elastic.group.Group` on torch.distributed.

    Args:
        device: the device that this process trains on.
        backend: ``"gloo"``, ``"nccl"``, or ``"auto"`` for NCCL where every member has a GPU of its own, else memory
            that they share where all are on one machine, else gloo.
        timeout: how long one operation may wait for the slowest member, seconds. A member that dies is noticed
            when its connections close; this is for those that vanish with their machine.
    """

    def __init__(self, device: torch.device | str = "cpu", backend: str = "auto", timeout: float = 1800.0) -> None:
        self.rank = 0
        self.size = 1
        self._device = torch.device(device)
        self._backend = backend
        self._timeout = timedelta(seconds=timeout)
        self._guard = GenerationGuard()
        self._is_nccl = False
        self._store: Any = None
        self._hosted: Any = None
        self._process_group: Any = None
        #: Talks to the others instead, where they are all on this machine.
        self._on_host: HostGroup | None = None

    @property
    def broken(self) -> bool:
        """Whether an operation of this generation has failed, or it was aborted."""
        return self._guard.is_broken

    def open_rendezvous(self, address: str, generation: int, size: int) -> str:
        """Opens a store that listens on ``address`` only, at a free port."""
        with socket.create_server((address, 0)) as server:
            port = int(server.getsockname()[1])
            self._hosted = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_CONNECT_S),
                master_listen_fd=server.detach(),
            )
        return f"{address}:{port}"

    def configure(self, rendezvous: str, generation: int, rank: int, size: int) -> None:
        """Meets the other members at rank 0's store and connects to all of them.

        Raises:
            GenerationBrokenError: not all members came, or the generation was aborted.
        """
        self._leave()
        self._guard.start(generation)
        address, port = split_address(rendezvous)
        problem = None
        try:
            store = self._hosted
            if rank != 0 or store is None:
                store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
            self._store = dist.PrefixStore(f"fluid/{generation}", store)
            self._is_nccl, may_share = self._arrive(rank, size)
            self._on_host = self._share_memory(rank, size) if may_share else None
            if self._on_host is None:
                self._process_group = self._connect(address, port, rank, size)
        except GenerationBrokenError:
            self._leave()
            raise
        except RuntimeError as error:  # Of torch.distributed, whose own errors derive from it.
            problem = str(error)
        if problem is not None:
            self._guard.break_()
            self._leave()
            raise GenerationBrokenError(f"generation {generation} did not come together: {problem}")
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by its sum over the members, the same bits everywhere."""
        self._run(tensor, HostGroup.all_reduce, lambda staged: self._process_group.allreduce([staged]))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's."""
        self._run(tensor, HostGroup.broadcast, lambda staged: self._process_group.broadcast([staged]))

    def barrier(self) -> None:
        """Returns once all members have called it."""
        if self.size > 1:
            token = torch.zeros(1, device=self._device if self._is_nccl else "cpu")
            self.all_reduce(token)
            token.item()  # NCCL returns at once; its result does not.
            self._guard.check()

    def abort(self, generation: int) -> None:
        """Breaks a generation; what waits for its members, in this process, raises."""
        self._guard.break_(generation)
        process_group = self._process_group
        if process_group is not None and self._is_nccl and self._guard.is_broken:
            process_group.abort()  # Its kernels would spin for ever.

    def shutdown(self) -> None:
        """Leaves the generation, so that the size is 1 again."""
        self._leave()
        self._store = self._hosted = None

    def _leave(self) -> None:
        # In a list, so that the thread below drops the last reference, and not this frame.
        holder, self._process_group = [self._process_group], None
        on_host, self._on_host = self._on_host, None
        self.rank, self.size = 0, 1
        if on_host is not None:
            on_host.close()
        if holder[0] is None:
            return
        if self._is_nccl and self._guard.is_broken:
            holder[0].abort()
        # Closing connections takes some time, and for ever if an operation waits for a peer that hangs.
        threading.Thread(target=holder.clear, name="fluid-elastic-burial", daemon=True).start()

    def _arrive(self, rank: int, size: int) -> tuple[bool, bool]:
        """Waits until all members are there; returns whether they use NCCL, and whether they could share memory.

        They connect to each other only then: in the middle of that, nobody can be called back.
        """
        self._store.set(f"device/{rank}", self._device_name())
        self._store.set(f"host/{rank}", host_token())
        arrived = self._store.add("arrived", 1)
        alarm = self._guard.event()
        for _ in range(int(_ARRIVE_S / _LOOK_S)):
            if arrived >= size:
                break
            alarm.wait(_LOOK_S)
            self._guard.check()
            arrived = self._store.add("arrived", 0)
        else:
            raise GenerationBrokenError(f"only {arrived} of {size} members came within {_ARRIVE_S:g} s")
        if self._backend != "auto":
            return self._backend == "nccl", False
        devices = {self._store.get(f"device/{other}") for other in range(size)}
        if b"cpu" not in devices and len(devices) == size and dist.is_nccl_available():
            return True, False
        hosts = {self._store.get(f"host/{other}") for other in range(size)}
        return False, len(hosts) == 1 and b"" not in hosts

    def _share_memory(self, rank: int, size: int) -> HostGroup | None:
        """Members that found out that they are on one machine try to share memory; ``None`` if any of them cannot."""
        memory: SharedMemory | None = None
        if rank == 0:
            where = "nowhere"
            with suppress(OSError):
                memory, where = SharedMemory.create(size)
            self._store.set("memory", where)
        else:
            with suppress(OSError):
                memory = SharedMemory.open(self._store.get("memory").decode(), size)
        self._store.set(f"shares/{rank}", "no" if memory is None else "yes")
        everybody = all(self._store.get(f"shares/{other}") == b"yes" for other in range(size))
        if memory is not None:
            memory.forget_descriptor()
        if not everybody or memory is None:
            return None
        return HostGroup(memory, rank, size, self._guard.check, self._timeout.total_seconds())

    def _device_name(self) -> str:
        if self._device.type != "cuda":
            return "cpu"
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def _connect(self, address: str, port: int, rank: int, size: int) -> Any:
        if self._is_nccl:
            os.environ.setdefault(*_NCCL_ON_ERROR)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(self._store, rank, size, options)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address_towards(address, port))]
        options._timeout = timedelta(seconds=_MESH_S)
        process_group = dist.ProcessGroupGloo(self._store, rank, size, options)
        process_group._set_default_timeout(self._timeout)
        return process_group

    def _run(
        self,
        tensor: torch.Tensor,
        on_host: Callable[[HostGroup, torch.Tensor], None],
        start: Callable[[torch.Tensor], Any],
    ) -> None:
        """Runs one operation and waits for it, or until the generation is aborted."""
        if self.size == 1:
            return
        self._guard.check()
        # NCCL moves what is on a GPU, gloo is at its best with what is not.
        kind = "cuda" if self._is_nccl else "cpu"
        staged = tensor if tensor.device.type == kind else tensor.to(self._device if self._is_nccl else "cpu")
        problem = self._share(on_host, staged) if self._on_host is not None else self._wait(start, staged)
        if problem is not None:
            # Outside of the except block: the error's frames would keep the connections to the peers open.
            self._guard.break_()
            raise GenerationBrokenError(f"a member of the generation failed: {problem}")
        if staged is not tensor:
            tensor.copy_(staged)
            # NCCL returns at once; only now the result is there, or nothing is if it was aborted.
            self._guard.check()

    def _share(self, operation: Callable[[HostGroup, torch.Tensor], None], staged: torch.Tensor) -> str | None:
        """Returns what went wrong."""
        assert self._on_host is not None
        try:
            operation(self._on_host, staged)
        except GenerationBrokenError as error:
            return str(error)
        return None

    def _wait(self, start: Callable[[torch.Tensor], Any], staged: torch.Tensor) -> str | None:
        """Returns what went wrong."""
        try:
            if self._is_nccl:
                start(staged).wait()
                return None
            done = self._guard.event()
            future = start(staged).get_future()
            # Not work.wait(), which an abort could not interrupt.
            future.add_done_callback(lambda _: done.set())
            done.wait()
            if not future.done():
                return "it was aborted"
            future.wait()
        except RuntimeError as error:
            return str(error)
        return None
