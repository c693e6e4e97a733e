"""Process groups on torch.distributed: gloo between CPUs, NCCL between GPUs, shared memory on one machine.

They are made directly, not by ``init_process_group``: a process has one default group only, while a lane hosts several
trials, and a trial may use the default group itself.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fluid.elastic import nccl
from fluid.elastic.generation import GenerationBrokenError, GenerationGuard
from fluid.elastic.host_group import HostGroup, SharedMemory, host_token
from fluid.elastic.messages import LOOPBACK
from fluid.elastic.rendezvous import PROOF_BYTES, Rendezvous, proofs_of, require_proofs

#: Longest that members take to connect to each other after all have arrived, seconds.
_MESH_S = 15.0
#: Longest that members wait for all to arrive, unless the generation is aborted, seconds.
_ARRIVE_S = 300.0
#: After so many generations in which a process could not open rank 0's memory, its trial's members use gloo.
_MOST_FAILURES = 2


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
        self.on_operation: Callable[[], None] | None = None
        self._device = torch.device(device)
        self._backend = backend
        self._timeout = timedelta(seconds=timeout)
        self._guard = GenerationGuard()
        self._is_nccl = False
        self._rendezvous: Rendezvous | None = None
        #: Memory that this member, rank 0, has made, until all have opened it.
        self._memory: SharedMemory | None = None
        #: Generations in a row in which this process could not open rank 0's memory.
        self._failures_to_share = 0
        self._process_group: Any = None
        #: Used instead of the process group if all members are on this machine.
        self._on_host: HostGroup | None = None

    @property
    def broken(self) -> bool:
        """Whether an operation of this generation has failed, or it was aborted."""
        return self._guard.is_broken

    def configure(self, rendezvous: Rendezvous, rank: int, size: int) -> None:
        """Exchanges facts with the other members and connects to them.

        Raises:
            GenerationBrokenError: not all members joined, or the generation was aborted.
        """
        self._leave()
        self._rendezvous = rendezvous
        self._guard.start(rendezvous.generation)
        problem = None
        try:
            self._guard.check()
            members = self._exchange_facts(rank, size)
            devices, hosts = ({member[name] for member in members} for name in ("device", "host"))
            by_itself = "cpu" not in devices and len(devices) == size and dist.is_nccl_available()
            self._is_nccl = self._backend == "nccl" or (self._backend == "auto" and by_itself)
            if members[0]["memory"] and len(hosts) == 1 and not self._is_nccl:
                self._on_host = self._share_memory(members[0]["memory"], rank, size)
            else:
                self._process_group = self._connect(rendezvous, bytes.fromhex(members[0]["secret"]), rank, size)
        except GenerationBrokenError:
            self._guard.break_()
            self._leave()
            raise
        except RuntimeError as error:  # The base class of torch.distributed's errors.
            problem = str(error)
        if problem is not None:
            self._guard.break_()
            self._leave()
            raise GenerationBrokenError(f"generation {rendezvous.generation} was not formed: {problem}")
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by its sum over the members, the same bits everywhere."""
        self._run(tensor, HostGroup.all_reduce, self._sum)

    def can_overlap(self, tensor: torch.Tensor) -> bool:
        """Whether a sum of such a tensor runs beside the computation: with gloo on CPUs, and NCCL on GPUs."""
        return self._process_group is not None and self._is_where_needed(tensor)

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Starts :meth:`all_reduce`; returns the function that waits for it."""
        if not self.can_overlap(tensor):
            self.all_reduce(tensor)
            return lambda: None
        self._guard.check()
        works, problem = [], None
        try:
            works.append(self._sum(tensor))
        except RuntimeError as error:
            problem = str(error)
        self._raise_if(problem)
        # Taken from the list: the frames of an error must not hold it, as it keeps connections open.
        return lambda: self._raise_if(self._wait(lambda _: works.pop(), tensor))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's."""
        self._run(tensor, HostGroup.broadcast, lambda staged: self._process_group.broadcast([staged]))

    def barrier(self) -> None:
        """Returns once all members have called it."""
        if self.size > 1:
            token = torch.ones(1)
            self.all_reduce(token)
            if token.item() != self.size:
                # An aborted kernel of NCCL ends as if it had finished, and leaves any value.
                self._guard.break_()
                raise GenerationBrokenError("a member of the generation failed: an operation was aborted")

    def confirm(self) -> None:
        """Returns once all operations so far have finished without an error."""
        if self._is_nccl:
            self.barrier()  # A communicator runs no operation after one that was aborted.

    def abort(self, generation: int) -> None:
        """Breaks a generation; operations of this process that wait for its members raise."""
        self._guard.break_(generation)
        rendezvous, process_group = self._rendezvous, self._process_group
        if rendezvous is not None and self._guard.is_broken:
            rendezvous.close()
        if process_group is not None and self._is_nccl and self._guard.is_broken:
            process_group.abort()  # Its kernels would spin forever.

    def shutdown(self) -> None:
        """Leaves the generation, so that the size is 1 again."""
        self._leave()

    def _leave(self) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.forget_descriptor()
        # In a list, so that the thread below drops the last reference, not this frame.
        holder, self._process_group = [self._process_group], None
        on_host, self._on_host = self._on_host, None
        self.rank, self.size = 0, 1
        if on_host is not None:
            on_host.close()
        if holder[0] is None:
            return
        # Closing connections takes time, without end if an operation waits for a peer that hangs.
        end = holder.clear
        if self._is_nccl:
            if self._guard.is_broken:
                holder[0].abort()
            else:
                end = partial(nccl.shut_down, holder)
        threading.Thread(target=end, name="fluid-elastic-close", daemon=True).start()

    def _exchange_facts(self, rank: int, size: int) -> list[dict[str, str]]:
        """Waits for all members; returns what each says of itself, and rank 0 of the generation.

        Members connect to each other only afterwards, because connecting cannot be aborted.
        """
        assert self._rendezvous is not None
        may_share = self._backend == "auto" and self._device.type == "cpu" and self._failures_to_share < _MOST_FAILURES
        may_share &= self._rendezvous.address == LOOPBACK
        facts = {"device": self._device_name(), "host": host_token() if may_share else ""}
        if rank == 0:
            facts |= {"secret": secrets.token_hex(PROOF_BYTES), "memory": ""}
            if facts["host"]:
                with suppress(OSError):  # There is not enough memory: members use gloo.
                    self._memory, facts["memory"] = SharedMemory.create(size)
        self._rendezvous.put(f"member/{rank}", json.dumps(facts).encode())
        keys = [f"member/{other}" for other in range(size)]
        return [json.loads(value) for value in self._rendezvous.get(keys, _ARRIVE_S)]

    def _share_memory(self, where: str, rank: int, size: int) -> HostGroup:
        """Opens the memory that rank 0 has made.

        Raises:
            GenerationBrokenError: a member cannot open it, or the generation was aborted.
        """
        memory = self._memory
        if memory is None:
            try:
                memory = SharedMemory.open(where, size)
            except OSError as error:
                self._failures_to_share += 1  # Also by chance, if rank 0 has just left.
                raise GenerationBrokenError(f"rank {rank} cannot open the memory of rank 0: {error}") from None
        self._failures_to_share = 0
        group = HostGroup(memory, rank, size, self._guard.check, self._timeout.total_seconds())
        try:
            group.barrier()  # Until all have opened it.
        except GenerationBrokenError:
            group.close()
            raise
        finally:
            memory.forget_descriptor()
        return group

    def _device_name(self) -> str:
        if self._device.type != "cuda":
            return "cpu"
        if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
            return "MIG"  # The same for all: NCCL does not connect instances of one GPU.
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def _connect(self, rendezvous: Rendezvous, secret: bytes, rank: int, size: int) -> Any:
        if self._is_nccl:
            return nccl.connect(_Store(rendezvous), rank, size, self._timeout, self._device, self._guard)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=rendezvous.address)]
        options._timeout = timedelta(seconds=_MESH_S)
        process_group = dist.ProcessGroupGloo(_Store(rendezvous), rank, size, options)
        process_group._set_default_timeout(self._timeout)
        self._check_peers(process_group, secret, rank, size)
        return process_group

    def _check_peers(self, process_group: Any, secret: bytes, rank: int, size: int) -> None:
        """Checks over every connection that a member is at its other end: gloo accepts any process.

        Raises:
            GenerationBrokenError: another process is.
        """
        sent = torch.frombuffer(bytearray(proofs_of(secret, rank, size)), dtype=torch.uint8)
        received = torch.zeros_like(sent)
        # Each pair exchanges its part directly.
        problem = self._wait(lambda staged: process_group.alltoall_base(received, staged, [], []), sent)
        if problem is not None:
            raise GenerationBrokenError(f"a member of the generation failed: {problem}")
        require_proofs(secret, rank, size, bytes(received.tolist()))

    def _run(
        self,
        tensor: torch.Tensor,
        on_host: Callable[[HostGroup, torch.Tensor], None],
        start: Callable[[torch.Tensor], Any],
    ) -> None:
        """Runs one operation and waits for it, or until the generation is aborted."""
        if self.size == 1:
            return
        if self.on_operation is not None:
            self.on_operation()
        self._guard.check()
        here = self._is_where_needed(tensor)
        staged = tensor if here else tensor.to(self._device if self._is_nccl else "cpu")
        problem = self._share(on_host, staged) if self._on_host is not None else self._wait(start, staged)
        self._raise_if(problem)
        if here:
            return
        if self._is_nccl:
            nccl.wait_for_gpu()
            self._guard.check()
        is_source = self.rank == 0 and on_host is HostGroup.broadcast
        if staged is not tensor and not is_source:
            tensor.copy_(staged)

    def _sum(self, tensor: torch.Tensor) -> Any:
        return self._process_group.allreduce([tensor])

    def _raise_if(self, problem: str | None) -> None:
        # Called outside except blocks: the error's frames would keep the connections to the peers open.
        if problem is not None:
            self._guard.break_()
            raise GenerationBrokenError(f"a member of the generation failed: {problem}")

    def _is_where_needed(self, tensor: torch.Tensor) -> bool:
        """Whether an operation takes this tensor: NCCL one on a GPU; gloo is fastest with tensors on the CPU."""
        return bool(tensor.device.type == ("cuda" if self._is_nccl else "cpu"))

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


class _Store(dist.Store):  # type: ignore[misc]
    """Shows torch.distributed the rendezvous as a store; it has what the process groups here use."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._known[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._rendezvous.put(f"store/{key}", self._known[key])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=_MESH_S)) -> None:
        new = [key for key in keys if key not in self._known]
        if new:
            values = self._rendezvous.get([f"store/{key}" for key in new], timeout.total_seconds())
            self._known |= zip(new, values, strict=True)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)
