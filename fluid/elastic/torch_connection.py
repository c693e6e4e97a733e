"""The connections between the members of a generation: a process group of torch.distributed, or memory that they share.

They are made while another generation still trains, if the members of the next one are known, and used again by a later
generation of the same members in the same order.
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


class TorchConnection:
    """This member's connections to the others of one generation.

    Args:
        rendezvous: of the generation.
        rank: this member's rank.
        size: number of members.
        device: the device that this process trains on.
        backend: as of :class:`fluid.elastic.torch_group.TorchGroup`.
        may_share: whether memory may be shared, if all members are on this machine.
        timeout: longest that one operation waits for the slowest member.

    Attributes:
        guard: broken as soon as an operation failed, or the connections are not to be used any more.
        is_nccl: whether the process group is NCCL's.
        process_group: of torch.distributed; ``None`` if the members share memory.
        on_host: the operations through shared memory; ``None`` if there is a process group.
        could_share: whether this member could open the memory of rank 0; ``None`` if there was none to open.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        size: int,
        *,
        device: torch.device,
        backend: str,
        may_share: bool,
        timeout: timedelta,
    ) -> None:
        self.guard = GenerationGuard()
        self.guard.start(rendezvous.generation)
        self.is_nccl = False
        self.process_group: Any = None
        self.on_host: HostGroup | None = None
        self.could_share: bool | None = None
        self._rendezvous = rendezvous
        self._rank, self._size = rank, size
        self._device, self._backend = device, backend
        self._may_share = may_share
        self._timeout = timeout
        #: Memory that this member, rank 0, has made, until all have opened it.
        self._memory: SharedMemory | None = None

    def connect(self) -> None:
        """Exchanges facts with the other members and connects to them; another thread may :meth:`close` meanwhile.

        Raises:
            GenerationBrokenError: not all members joined, or :meth:`close` was called.
        """
        problem = None
        try:
            self.guard.check()
            members = self._exchange_facts()
            devices, hosts = ({member[name] for member in members} for name in ("device", "host"))
            by_itself = "cpu" not in devices and len(devices) == self._size and dist.is_nccl_available()
            self.is_nccl = self._backend == "nccl" or (self._backend == "auto" and by_itself)
            if members[0]["memory"] and len(hosts) == 1 and not self.is_nccl:
                self.on_host = self._share_memory(members[0]["memory"])
            else:
                self.process_group = self._connect(bytes.fromhex(members[0]["secret"]))
            self.guard.check()
        except GenerationBrokenError:
            self.close()
            raise
        except RuntimeError as error:  # The base class of torch.distributed's errors.
            problem = str(error)
        if problem is not None:
            self.close()
            raise GenerationBrokenError(f"generation {self._rendezvous.generation} was not formed: {problem}")

    def abort(self) -> None:
        """Makes operations that wait for other members raise, in this process and in the others."""
        self.guard.break_()
        self._rendezvous.close()
        if self.process_group is not None and self.is_nccl:
            # Its kernels would spin forever. In a thread: an abort may wait for the other members' (NVIDIA/nccl#863),
            # and the caller is the thread that reads the messages for all residents of the lane.
            threading.Thread(target=self.process_group.abort, name="fluid-elastic-abort", daemon=True).start()

    def close(self) -> None:
        """Ends the connections; members that wait for this one raise."""
        was_broken = self.guard.is_broken
        self.guard.break_()
        self._rendezvous.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.forget_descriptor()
        on_host, self.on_host = self.on_host, None
        if on_host is not None:
            on_host.close()
        # In a list, so that the thread below drops the last reference, not this frame.
        holder, self.process_group = [self.process_group], None
        if holder[0] is None:
            return
        # Closing connections takes time, without end if an operation waits for a peer that hangs.
        end = holder.clear
        if self.is_nccl:
            end = partial(nccl.abort if was_broken else nccl.shut_down, holder)
        threading.Thread(target=end, name="fluid-elastic-close", daemon=True).start()

    def wait(self, start: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> str | None:
        """Runs an operation of the process group; returns the reason if it failed.

        One of NCCL is only queued then.
        """
        try:
            if self.is_nccl:
                start(tensor).wait()
                return None
            done = self.guard.event()
            future = start(tensor).get_future()
            # Not work.wait(), which an abort could not interrupt.
            future.add_done_callback(lambda _: done.set())
            done.wait()
            if not future.done():
                return "it was aborted"
            future.wait()
        except RuntimeError as error:
            return str(error)
        return None

    def _exchange_facts(self) -> list[dict[str, str]]:
        """Waits for all members; returns what each says of itself, and rank 0 of the generation.

        Members connect to each other only afterwards, because connecting cannot be aborted.
        """
        facts = {"device": device_name(self._device), "host": host_token() if self._may_share else ""}
        if self._rank == 0:
            facts |= {"secret": secrets.token_hex(PROOF_BYTES), "memory": ""}
            if facts["host"]:
                with suppress(OSError):  # There is not enough memory: members use gloo.
                    self._memory, facts["memory"] = SharedMemory.create(self._size)
        self._rendezvous.put(f"member/{self._rank}", json.dumps(facts).encode())
        keys = [f"member/{other}" for other in range(self._size)]
        return [json.loads(value) for value in self._rendezvous.get(keys, _ARRIVE_S)]

    def _share_memory(self, where: str) -> HostGroup:
        """Opens the memory that rank 0 has made.

        Raises:
            GenerationBrokenError: a member cannot open it, or the generation was aborted.
        """
        memory = self._memory
        if memory is None:
            try:
                memory = SharedMemory.open(where, self._size)
            except OSError as error:
                self.could_share = False  # Also by chance, if rank 0 has just left.
                raise GenerationBrokenError(f"rank {self._rank} cannot open the memory of rank 0: {error}") from None
        self.could_share = True
        group = HostGroup(memory, self._rank, self._size, self.guard.check, self._timeout.total_seconds())
        try:
            group.barrier()  # Until all have opened it.
        except GenerationBrokenError:
            group.close()
            raise
        finally:
            memory.forget_descriptor()
        return group

    def _connect(self, secret: bytes) -> Any:
        store = _Store(self._rendezvous)
        if self.is_nccl:
            is_local = self._rendezvous.address == LOOPBACK
            return nccl.connect(store, self._rank, self._size, self._timeout, self._device, self.guard, is_local)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._rendezvous.address)]
        options._timeout = timedelta(seconds=_MESH_S)
        process_group = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        process_group._set_default_timeout(self._timeout)
        self._check_peers(process_group, secret)
        return process_group

    def _check_peers(self, process_group: Any, secret: bytes) -> None:
        """Checks over every connection that a member is at its other end: gloo accepts any process.

        Raises:
            GenerationBrokenError: another process is.
        """
        sent = torch.frombuffer(bytearray(proofs_of(secret, self._rank, self._size)), dtype=torch.uint8)
        received = torch.zeros_like(sent)
        # Each pair exchanges its part directly.
        problem = self.wait(lambda staged: process_group.alltoall_base(received, staged, [], []), sent)
        if problem is not None:
            raise GenerationBrokenError(f"a member of the generation failed: {problem}")
        require_proofs(secret, self._rank, self._size, bytes(received.tolist()))


def device_name(device: torch.device) -> str:
    """Returns what tells two members' GPUs apart, or "cpu"."""
    if device.type != "cuda":
        return "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return "MIG"  # The same for all: NCCL does not connect instances of one GPU.
    return str(torch.cuda.get_device_properties(device).uuid)


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
