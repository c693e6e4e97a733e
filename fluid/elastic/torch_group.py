"""Process groups on torch.distributed: gloo between CPUs, NCCL between GPUs, shared memory on one machine.

They are made directly, not by ``init_process_group``: a process has one default group only, while a lane hosts several
trials, and a trial may use the default group itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from fluid.elastic import nccl
from fluid.elastic.generation import GenerationBrokenError, GenerationGuard
from fluid.elastic.host_group import HostGroup
from fluid.elastic.messages import LOOPBACK
from fluid.elastic.rendezvous import Rendezvous
from fluid.elastic.torch_connection import TorchConnection

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
