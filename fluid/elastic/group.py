"""What elastic training needs of a library for collective operations; the libraries are adapters to it."""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
from typing import TYPE_CHECKING, Literal, Protocol

from fluid.errors import FluidError, InvalidFieldError

if TYPE_CHECKING:
    import torch

Backend = Literal["torch", "gloo", "nccl", "horovod"]

_SIOCGIFADDR = 0x8915


class GenerationBrokenError(FluidError):
    """A member of the generation failed, or somebody aborted it; the survivors go on in a new one."""


class Group(Protocol):
    """The processes that train one trial, in one generation after the other.

    A generation is one set of members with ranks; it never changes, but is followed by another. One that nothing
    was configured for has size 1, where all operations do nothing.
    """

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of members."""
        ...

    def open_rendezvous(self, address: str, generation: int, size: int) -> str:
        """Opens the meeting point of a generation; called by its rank 0, before anybody configures it.

        It lives in rank 0 and dies with it: then the generation is broken anyhow, and the next one has its own.

        Args:
            address: the address of this machine under which the other members reach it.
            generation: number of the generation.
            size: how many members it will have.

        Returns:
            Where the members meet, for :meth:`configure`.
        """
        ...

    def configure(self, rendezvous: str, generation: int, rank: int, size: int) -> None:
        """Leaves the generation before and meets the members of this one; all of them call it.

        Raises:
            GenerationBrokenError: not all members came, or the generation was aborted.
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
        """Breaks a generation: what waits for its members raises. May be called in any thread, and too late."""
        ...

    def shutdown(self) -> None:
        """Leaves the generation, so that the size is 1 again. Others who wait for this member raise."""
        ...


class GenerationGuard:
    """Says, across threads, which generation is current and whether it has been broken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        #: All generations up to here are broken: an abort may come before the generation was configured.
        self._broken = -1
        self._waiting: threading.Event | None = None

    def start(self, generation: int) -> None:
        """Makes a generation the current one."""
        with self._lock:
            self._generation = generation

    def break_(self, generation: int | None = None) -> None:
        """Breaks a generation, by default the current one, and wakes whoever waits in it."""
        with self._lock:
            self._broken = max(self._broken, self._generation if generation is None else generation)
            if self._is_broken() and self._waiting is not None:
                self._waiting.set()

    @property
    def is_broken(self) -> bool:
        """Whether the current generation is broken."""
        with self._lock:
            return self._is_broken()

    def check(self) -> None:
        """Raises GenerationBrokenError if the current generation is broken."""
        if self.is_broken:
            raise GenerationBrokenError(f"generation {self._generation} was aborted")

    def event(self) -> threading.Event:
        """A new event to wait for, which is also set if the generation breaks."""
        with self._lock:
            self._waiting = threading.Event()
            if self._is_broken():
                self._waiting.set()
            return self._waiting

    def _is_broken(self) -> bool:
        return self._generation <= self._broken


def split_address(rendezvous: str) -> tuple[str, int]:
    """Reads ``"address:port"``.

    Raises:
        InvalidFieldError: it is something else.
    """
    address, colon, port = rendezvous.rpartition(":")
    if not colon or not address or not port.isdecimal():
        raise InvalidFieldError("meeting", rendezvous, "must be an address and a port, '127.0.0.1:1234'")
    return address, int(port)


def own_address_towards(address: str, port: int) -> str:
    """The address under which this machine reaches another one, and is reached by it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # Of a datagram socket: nothing is sent.
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the network interface that has an IPv4 address; ``"lo"`` if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue  # It has no address.
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return "lo"
