"""The interface of a process group, as elastic training uses it; each communication library has an adapter."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from typing import TYPE_CHECKING, Literal, Protocol

from fluid.errors import FluidError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from fluid.elastic.groups.rendezvous import Rendezvous


Backend = Literal["torch", "gloo", "nccl", "horovod"]

#: The system call that lists the addresses of this machine (netdevice(7)), and the bytes of an entry.
_SIOCGIFCONF, _ENTRY_BYTES = 0x8912, 40
_MOST_ADDRESSES = 256


class Group(Protocol):
    """A process group: the processes that train one trial, in a series of generations.

    A generation is a fixed set of members with ranks. Before the first :meth:`configure` the size is 1, at which all
    operations do nothing. ``fluid.elastic.groups.make.make_group`` makes one by name.

    Example:
        A metric that all members sum up by themselves; at size 1 the sum is the value:

        >>> import torch
        >>> from fluid.elastic import Group
        >>> from fluid.elastic.groups.make import make_group
        >>> def total(group: Group, value: float) -> float:
        ...     tensor = torch.tensor([value])
        ...     group.all_reduce(tensor)
        ...     return tensor.item()
        >>> total(make_group("gloo", "cpu"), 2.5)
        2.5
    """

    #: Called before any other operation, while sums were started that are not waited for yet.
    on_operation: Callable[[], None] | None

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of members."""
        ...

    def connect(self, rendezvous: Rendezvous, rank: int, size: int) -> None:
        """Connects to the members of a generation to come, while this process trains; called in a thread of its own.

        Args:
            rendezvous: of that generation, which need not come about.
            rank: this member's rank there.
            size: number of members, at least 2.

        Raises:
            GenerationBrokenError: not all members connected, :meth:`disconnect` was called, or this library cannot.
        """
        ...

    def disconnect(self, generation: int) -> None:
        """Closes the connections that were made for a generation, and that the current one does not use."""
        ...

    def configure(self, rendezvous: Rendezvous, rank: int, size: int, connection: int = 0) -> None:
        """Leaves the previous generation and joins the members of this one; all of them call it.

        Args:
            rendezvous: of this generation.
            rank: this member's rank.
            size: number of members, at least 2.
            connection: the generation for which these members, with these ranks, connected to each other before; 0 if
                they are to connect now. Connections stay until :meth:`disconnect`, or until the group is broken or
                shut down.

        Raises:
            GenerationBrokenError: not all members joined, or the generation was aborted.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by its sum over the members, the same bits everywhere.

        Raises:
            GenerationBrokenError: a member failed.
        """
        ...

    def can_overlap(self, tensor: torch.Tensor) -> bool:
        """Whether :meth:`start_all_reduce` of such a tensor runs beside the caller's computation."""
        ...

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Starts :meth:`all_reduce`; returns the function that waits for it. Does not call :attr:`on_operation`.

        Raises:
            GenerationBrokenError: a member failed; the function raises it too.
        """
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's.

        Raises:
            GenerationBrokenError: a member failed.
        """
        ...

    def barrier(self) -> None:
        """Returns once all members have called it.

        Raises:
            GenerationBrokenError: a member failed.
        """
        ...

    def confirm(self) -> None:
        """Returns once all operations so far have finished without an error; all members call this.

        An operation on tensors of a GPU may return before that.

        Raises:
            GenerationBrokenError: a member failed.
        """
        ...

    @property
    def broken(self) -> bool:
        """Whether an operation of this generation has failed, or it was aborted."""
        ...

    def abort(self, generation: int) -> None:
        """Breaks a generation, so that operations that wait raise. May be called in any thread, at any time."""
        ...

    def shutdown(self) -> None:
        """Leaves the generation; the size is 1 again. Members that wait for this one raise."""
        ...


def interface_of(address: str) -> str:
    """Returns the name of the network interface that has an IPv4 address.

    Raises:
        FluidError: none has it.
    """
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    table = array.array("B", bytes(_MOST_ADDRESSES * _ENTRY_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(table), table.buffer_info()[0])
        (filled, _) = struct.unpack("iL", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    for begin in range(0, filled, _ENTRY_BYTES):
        name, own = table[begin : begin + 16].tobytes(), table[begin + 20 : begin + 24].tobytes()
        if socket.inet_ntoa(own) == address:
            return name.partition(b"\0")[0].decode().partition(":")[0]  # A further address may be labelled "eth0:1".
    raise FluidError(f"address={address!r}: no network interface of this machine has it")
