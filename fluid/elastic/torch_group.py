"""Process groups on torch.distributed: gloo between CPUs, NCCL between GPUs, shared memory on one machine.

They are made directly, not by ``init_process_group``: a process has one default group only, while a lane hosts several
trials, and a trial may use the default group itself.
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

#: Longest that a member tries to connect to rank 0, which already listens, seconds.
_CONNECT_S = 5.0
#: Longest that members take to connect to each other after all have arrived, seconds.
_MESH_S = 15.0
#: Longest that members wait for all to arrive, unless the generation is aborted, seconds.
_ARRIVE_S = 300.0
#: Seconds between two checks for that.
_ARRIVAL_CHECK_S = 0.001
#: By default NCCL's watchdog ends the whole process when a peer dies; 2 makes it end the communicator only.
_NCCL_ON_ERROR = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")


class TorchGroup:
    """A :class:`fluid.elastic.group.Group` on torch.distributed.

    Args:
        device: the device that this process trains on.
        backend: ``"gloo"``, ``"nccl"``, or ``"auto"``: NCCL if every member has its own GPU, else shared memory if all
            are on one machine, else gloo.
        timeout: longest that one operation waits for the slowest member, seconds. The death of a process is detected
            earlier, when its connections close; the timeout is for the loss of a machine.
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
        #: Used instead of the process group if all members are on this machine.
        self._on_host: HostGroup | None = None

    @property
    def broken(self) -> bool:
        """Whether an operation of this generation has failed, or it was aborted."""
        return self._guard.is_broken

    def open_rendezvous(self, address: str, generation: int, size: int) -> str:
        """Opens a TCP store that listens on ``address`` only, at a free port."""
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
        """Meets the other members at rank 0's store and connects to them.

        Raises:
            GenerationBrokenError: not all members joined, or the generation was aborted.
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
        except RuntimeError as error:  # The base class of torch.distributed's errors.
            problem = str(error)
        if problem is not None:
            self._guard.break_()
            self._leave()
            raise GenerationBrokenError(f"generation {generation} was not formed: {problem}")
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
        """Breaks a generation; operations of this process that wait for its members raise."""
        self._guard.break_(generation)
        process_group = self._process_group
        if process_group is not None and self._is_nccl and self._guard.is_broken:
            process_group.abort()  # Its kernels would spin forever.

    def shutdown(self) -> None:
        """Leaves the generation, so that the size is 1 again."""
        self._leave()
        self._store = self._hosted = None

    def _leave(self) -> None:
        # In a list, so that the thread below drops the last reference, not this frame.
        holder, self._process_group = [self._process_group], None
        on_host, self._on_host = self._on_host, None
        self.rank, self.size = 0, 1
        if on_host is not None:
            on_host.close()
        if holder[0] is None:
            return
        if self._is_nccl and self._guard.is_broken:
            holder[0].abort()
        # Closing connections takes time, without end if an operation waits for a peer that hangs.
        threading.Thread(target=holder.clear, name="fluid-elastic-close", daemon=True).start()

    def _arrive(self, rank: int, size: int) -> tuple[bool, bool]:
        """Waits for all members; returns whether they use NCCL, and whether they may be able to share memory.

        Members connect to each other only afterwards, because connecting cannot be aborted.
        """
        self._store.set(f"device/{rank}", self._device_name())
        self._store.set(f"host/{rank}", host_token())
        arrived = self._store.add("arrived", 1)
        alarm = self._guard.event()
        for _ in range(int(_ARRIVE_S / _ARRIVAL_CHECK_S)):
            if arrived >= size:
                break
            alarm.wait(_ARRIVAL_CHECK_S)
            self._guard.check()
            arrived = self._store.add("arrived", 0)
        else:
            raise GenerationBrokenError(f"only {arrived} of {size} members arrived within {_ARRIVE_S:g} s")
        if self._backend != "auto":
            return self._backend == "nccl", False
        devices = {self._store.get(f"device/{other}") for other in range(size)}
        if b"cpu" not in devices and len(devices) == size and dist.is_nccl_available():
            return True, False
        hosts = {self._store.get(f"host/{other}") for other in range(size)}
        return False, len(hosts) == 1 and b"" not in hosts

    def _share_memory(self, rank: int, size: int) -> HostGroup | None:
        """Opens memory shared with the members, which are on one machine; ``None`` if any of them cannot."""
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
        all_share = all(self._store.get(f"shares/{other}") == b"yes" for other in range(size))
        if memory is not None:
            memory.forget_descriptor()
        if not all_share or memory is None:
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
        # NCCL needs the tensor on a GPU; gloo is fastest with tensors on the CPU.
        kind = "cuda" if self._is_nccl else "cpu"
        staged = tensor if tensor.device.type == kind else tensor.to(self._device if self._is_nccl else "cpu")
        problem = self._share(on_host, staged) if self._on_host is not None else self._wait(start, staged)
        if problem is not None:
            # Outside the except block: the error's frames would keep the connections to the peers open.
            self._guard.break_()
            raise GenerationBrokenError(f"a member of the generation failed: {problem}")
        if staged is not tensor:
            tensor.copy_(staged)
            # NCCL returns at once; the copy has waited for the result, or for the abort.
            self._guard.check()

    def _share(self, operation: Callable[[HostGroup, torch.Tensor], None], staged: torch.Tensor) -> str | None:
        """Runs an operation through shared memory; returns the reason if it failed."""
        assert self._on_host is not None
        try:
            operation(self._on_host, staged)
        except GenerationBrokenError as error:
            return str(error)
        return None

    def _wait(self, start: Callable[[torch.Tensor], Any], staged: torch.Tensor) -> str | None:
        """Runs an operation of torch.distributed; returns the reason if it failed."""
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
