"""The interface of a process group, as elastic training uses it; each communication library has an adapter."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from fluid.elastic.rendezvous import Rendezvous

Backend = Literal["torch", "gloo", "nccl", "horovod"]

_SIOCGIFADDR = 0x8915
#: Any port would do.
_DISCARD_PORT = 9


class Group(Protocol):
    """A process group: the processes that train one trial, in a series of generations.

    A generation is a fixed set of members with ranks. Before the first :meth:`configure` the size is 1, at which all
    operations do nothing. ``fluid.elastic.make_group.make_group`` makes one by name.

    Example:
        A metric that all members sum up by themselves; at size 1 the sum is the value:

        >>> import torch
        >>> from fluid.elastic import Group
        >>> from fluid.elastic.make_group import make_group
        >>> def total(group: Group, value: float) -> float:
        ...     tensor = torch.tensor([value])
        ...     group.all_reduce(tensor)
        ...     return tensor.item()
        >>> total(make_group("gloo", "cpu"), 2.5)
        2.5
    """

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of members."""
        ...

    def configure(self, rendezvous: Rendezvous, rank: int, size: int) -> None:
        """Leaves the previous generation and joins the members of this one; all of them call it.

        Args:
            rendezvous: of this generation.
            rank: this member's rank.
            size: number of members, at least 2.

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


def own_address_towards(address: str) -> str:
    """Returns this machine's address on the route to another one, at which that one reaches it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _DISCARD_PORT))  # A datagram socket: nothing is sent.
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Returns the name of the network interface with an IPv4 address; ``"lo"`` if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue  # It has no address.
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return "lo"
