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
from typing import Any

import torch
import torch.distributed as dist

from fluid.elastic.groups import nccl
from fluid.elastic.groups.generation import GenerationBrokenError, GenerationGuard
from fluid.elastic.groups.host_group import HostGroup, SharedMemory, host_token
from fluid.elastic.groups.rendezvous import PROOF_BYTES, Rendezvous, proofs_of, require_proofs
from fluid.elastic.messages import LOOPBACK

# -- torch connection ----------------------------------------------------------------------------
#
# The connections between the members of a generation: a process group of torch.distributed, or memory that they share.
#
# They are made while another generation still trains, if the members of the next one are known, and used again by a
# later generation of the same members in the same order.


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
        backend: as of :class:`fluid.elastic.groups.torch_group.TorchGroup`.
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
        self._rank = rank
        self._size = size
        self._device = device
        self._backend = backend
        self._may_share = may_share
        self._timeout = timeout
        #: Memory that this member, rank 0, has made, until all have opened it.
        self._memory: SharedMemory | None = None
        #: Of the process group, whose C++ code calls its methods, and does not keep what Python has of it.
        self._store: _Store | None = None

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
                one_server = len({member["server"] for member in members}) == 1
                self.process_group = self._connect(bytes.fromhex(members[0]["secret"]), one_server)
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
            self._end_in_thread("abort", nccl.abort, [self.process_group])

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
        end: Callable[[list[Any]], None] = list.clear
        if self.is_nccl:
            end = nccl.abort if was_broken else nccl.shut_down
        self._end_in_thread("close", end, holder)

    def _end_in_thread(self, name: str, end: Callable[[list[Any]], None], holder: list[Any]) -> None:
        """The thread keeps this object, and so the store, which the process group may use until it is gone."""
        threading.Thread(target=self._end, args=(end, holder), name=f"fluid-elastic-{name}", daemon=True).start()

    def _end(self, end: Callable[[list[Any]], None], holder: list[Any]) -> None:
        end(holder)

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
        facts["server"] = _mps_server()
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

    def _connect(self, secret: bytes, one_server: bool) -> Any:
        store = self._store = _Store(self._rendezvous)
        if self.is_nccl:
            facts = self._rendezvous.address == LOOPBACK, one_server
            return nccl.connect(store, self._rank, self._size, self._timeout, self._device, self.guard, *facts)
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


def _mps_server() -> str:
    """Tells apart the MPS servers whose clients the members of one machine are; empty without MPS."""
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")


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

    def clone(self) -> _Store:
        return self


# -- torch group ---------------------------------------------------------------------------------


#: After so many generations in which a process could not open rank 0's memory, its trial's members use gloo.
_MOST_FAILURES = 2


class TorchGroup:
    """A :class:`fluid.elastic.groups.group.Group` on torch.distributed.

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
        #: Those of the current generation, and the generation that they were made for.
        self._current: TorchConnection | None = None
        self._current_number = 0
        #: Made for a generation to come, or used by an earlier one, by the generation that they were made for.
        self._kept: dict[int, TorchConnection] = {}
        self._lock = threading.Lock()
        #: Generations in a row in which this process could not open rank 0's memory.
        self._failures_to_share = 0

    @property
    def broken(self) -> bool:
        """Whether an operation of this generation has failed, or it was aborted."""
        return self._guard.is_broken

    def connect(self, rendezvous: Rendezvous, rank: int, size: int) -> None:
        """Connects to the members of a generation to come, in another thread than the one that trains.

        Raises:
            GenerationBrokenError: not all members joined, or the connections are not wanted any more.
        """
        connection = self._connection(rendezvous, rank, size)
        with self._lock:
            self._kept[rendezvous.generation] = connection
        try:
            connection.connect()
        except GenerationBrokenError:
            self.disconnect(rendezvous.generation)
            raise
        finally:
            self._note_sharing(connection)

    def disconnect(self, generation: int) -> None:
        """Closes connections that are kept; may be called in any thread."""
        with self._lock:
            connection = self._kept.pop(generation, None)
        if connection is not None:
            connection.close()

    def configure(self, rendezvous: Rendezvous, rank: int, size: int, connection: int = 0) -> None:
        """Enters a generation, with connections that are kept, or else connects to the other members.

        Raises:
            GenerationBrokenError: not all members joined, or the generation was aborted.
        """
        generation = rendezvous.generation
        self._set_aside()
        self._guard.start(generation)
        try:
            self._guard.check()
            if connection:
                with self._lock:
                    self._current = self._kept.pop(connection, None)
                if self._current is None:
                    raise GenerationBrokenError(f"the connections {connection} of generation {generation} are closed")
            else:
                self._current = self._connection(rendezvous, rank, size)
            self._current_number = connection or generation
            self._guard.check()  # An abort that came before had nothing to interrupt.
            if not connection:
                self._current.connect()
                self._note_sharing(self._current)
        except GenerationBrokenError:
            if self._current is not None:
                self._note_sharing(self._current)
            self._guard.break_()
            self._leave()
            raise
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by its sum over the members, the same bits everywhere."""
        self._run(tensor, HostGroup.all_reduce, self._sum)

    def can_overlap(self, tensor: torch.Tensor) -> bool:
        """Whether a sum of such a tensor runs beside the computation: with gloo on CPUs, and NCCL on GPUs."""
        return self._process_group is not None and self._is_where_needed(tensor)

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Starts :meth:`all_reduce`; returns the function that waits for it."""
        connection = self._current
        if connection is None or not self.can_overlap(tensor):
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
        return lambda: self._raise_if(connection.wait(lambda _: works.pop(), tensor))

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
        connection = self._current
        if connection is not None and self._guard.is_broken:
            connection.abort()

    def shutdown(self) -> None:
        """Leaves the generation, so that the size is 1 again."""
        self._leave()

    # -- connections -----------------------------------------------------------------------------------------

    @property
    def _process_group(self) -> Any:
        connection = self._current
        return None if connection is None else connection.process_group

    @property
    def _is_nccl(self) -> bool:
        connection = self._current
        return connection is not None and connection.is_nccl

    def _connection(self, rendezvous: Rendezvous, rank: int, size: int) -> TorchConnection:
        may_share = self._backend == "auto" and self._device.type == "cpu" and self._failures_to_share < _MOST_FAILURES
        return TorchConnection(
            rendezvous,
            rank,
            size,
            device=self._device,
            backend=self._backend,
            may_share=may_share and rendezvous.address == LOOPBACK,
            timeout=self._timeout,
        )

    def _note_sharing(self, connection: TorchConnection) -> None:
        if connection.could_share is not None:
            self._failures_to_share = 0 if connection.could_share else self._failures_to_share + 1
            connection.could_share = None

    def _set_aside(self) -> None:
        """Leaves a generation whose connections may be used again; those of a broken one are closed."""
        current, self._current = self._current, None
        if current is not None and self._guard.is_broken:
            current.guard.break_()
            current.close()
        elif current is not None:
            with self._lock:
                self._kept[self._current_number] = current
        self.rank, self.size = 0, 1

    def _leave(self) -> None:
        current, self._current = self._current, None
        with self._lock:
            kept, self._kept = self._kept, {}
        self.rank, self.size = 0, 1
        for connection in ([] if current is None else [current]) + list(kept.values()):
            if self._guard.is_broken:
                connection.guard.break_()  # A member may be lost: an orderly end would wait for it.
            connection.close()

    # -- operations ------------------------------------------------------------------------------------------

    def _run(
        self,
        tensor: torch.Tensor,
        on_host: Callable[[HostGroup, torch.Tensor], None],
        start: Callable[[torch.Tensor], Any],
    ) -> None:
        """Runs one operation and waits for it, or until the generation is aborted."""
        connection = self._current
        if self.size == 1 or connection is None:
            return
        if self.on_operation is not None:
            self.on_operation()
        self._guard.check()
        here = self._is_where_needed(tensor)
        staged = tensor if here else tensor.to(self._device if connection.is_nccl else "cpu")
        shared = connection.on_host
        self._raise_if(_share(shared, on_host, staged) if shared is not None else connection.wait(start, staged))
        if here:
            return
        if connection.is_nccl:
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


def _share(shared: HostGroup, operation: Callable[[HostGroup, torch.Tensor], None], staged: torch.Tensor) -> str | None:
    """Runs an operation through shared memory; returns the reason if it failed."""
    try:
        operation(shared, staged)
    except GenerationBrokenError as error:
        return str(error)
    return None
