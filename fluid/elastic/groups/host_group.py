"""Collective operations between processes of one machine, through shared memory.

Elastic trials on CPUs communicate after every batch, often only a few kilobytes. Through sockets an operation takes
about a millisecond, mostly to wake threads; through shared memory it takes microseconds. Every member sums all parts
itself, in the order of the ranks, so that all have the same bits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
from collections.abc import Callable
from typing import Any

import torch

from fluid._clock import MonotonicClock, nap
from fluid.elastic.groups.generation import GenerationBrokenError

#: Most bytes that a member passes on in one step.
CHUNK = 2**20
#: Bytes of a cache line; each number that other members read has a line of its own.
_LINE = 64
_NUMBERS_PER_LINE = _LINE // 8
# Waiting backs off: spin _SPINS times, then sched_yield for _YIELDING_S, then sleep _NAP_S between checks for dead
# peers.
_SPINS = 500
_YIELDING_S = 0.002
_NAP_S = 0.0002
#: Most views of the memory that are cached.
_KEPT_VIEWS = 64


def host_token() -> str:
    """Returns a token that is equal for processes that can share memory; empty where that is not supported.

    It is supported on processors that keep the order of writes only: nothing else orders the data and the step numbers.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "memfd_create"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    except OSError:
        return ""


class SharedMemory:
    """Memory that the members of a generation share; freed with the last process that has it open.

    Rank 0 makes it with :meth:`create`; the others open it with :meth:`open`.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, _length(size))
        #: The step of each rank, then for each rank whether it has left.
        self.numbers = memoryview(self._map)[: 2 * size * _LINE].cast("q")
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._begin = 2 * size * _LINE

    @classmethod
    def create(cls, size: int) -> tuple[SharedMemory, str]:
        """Makes memory for so many members; also returns its location for :meth:`open`.

        Raises:
            OSError: there is not enough memory.
        """
        name = f"fluid-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, _length(size))
            return cls(descriptor, size), f"{name} /proc/{os.getpid()}/fd/{descriptor}"
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, where: str, size: int) -> SharedMemory:
        """Opens the memory that rank 0 made.

        Raises:
            OSError: it does not exist, or cannot be reached.
        """
        name, _, path = where.partition(" ")
        if not path or not os.readlink(path).startswith(f"/memfd:{name}"):
            raise FileNotFoundError(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def slot(self, rank: int, parity: int) -> torch.Tensor:
        """Returns one of the two buffers of a rank, ``uint8 (CHUNK,)``, which alternate from step to step."""
        begin = self._begin + (2 * rank + parity) * CHUNK
        return self._bytes[begin : begin + CHUNK]

    def forget_descriptor(self) -> None:
        """Closes the descriptor through which other processes opened it; the memory stays."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _length(size: int) -> int:
    return 2 * size * _LINE + 2 * size * CHUNK


class HostGroup:
    """The collective operations of a generation whose members share memory.

    A member finishes a step when it has read the others' slots. Each rank has two slots, so that its data of one step
    stays readable until all others are in the step after the next.

    Args:
        memory: shared by all members.
        rank: this member's rank.
        size: number of members.
        check: raises if the generation is broken.
        timeout: longest that one operation may take, seconds.
    """

    def __init__(
        self, memory: SharedMemory, rank: int, size: int, check: Callable[[], None], timeout: float = 1800.0
    ) -> None:
        self._memory = memory
        self._numbers = memory.numbers
        self._rank = rank
        self._size = size
        self._others = [other for other in range(size) if other != rank]
        self._check = check
        self._timeout = timeout
        self._step = 0
        self._clock = MonotonicClock()
        self._views: dict[Any, list[torch.Tensor]] = {}

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor on the CPU by its sum over the members.

        Raises:
            GenerationBrokenError: a member has left, or the generation was aborted.
        """
        for part in _parts(tensor):
            self._step += 1
            slots = self._slots(part)
            slots[self._rank].copy_(part)
            self._enter()
            for other in self._others:
                self._await(other, self._step)
            torch.add(slots[0], slots[1], out=part)
            for slot in slots[2:]:
                part.add_(slot)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor on the CPU by rank 0's.

        Raises:
            GenerationBrokenError: as for :meth:`all_reduce`.
        """
        self.barrier()
        for number, part in enumerate(_parts(tensor)):
            self._step += 1
            slot = self._slots(part)[0]
            if self._rank == 0:
                for other in self._others:
                    # Until it has read the previous data of this slot.
                    self._await(other, self._step - 2 if number >= 2 else 0)
                slot.copy_(part)
            else:
                self._await(0, self._step)
                part.copy_(slot)
            self._enter()
        self.barrier()

    def barrier(self) -> None:
        """Returns once all members have called it.

        Raises:
            GenerationBrokenError: as for :meth:`all_reduce`.
        """
        self._step += 1
        self._enter()
        for other in self._others:
            self._await(other, self._step)

    def close(self) -> None:
        """Leaves the generation; members that wait for this one raise."""
        self._numbers[(self._size + self._rank) * _NUMBERS_PER_LINE] = 1
        self._views.clear()

    def _enter(self) -> None:
        self._numbers[self._rank * _NUMBERS_PER_LINE] = self._step

    def _await(self, other: int, step: int) -> None:
        """Waits until another member has reached a step."""
        numbers, place = self._numbers, other * _NUMBERS_PER_LINE
        for _ in range(_SPINS):
            if numbers[place] >= step:
                return
        begun = self._clock.now()
        while numbers[place] < step:
            waited = self._clock.now() - begun
            if waited < _YIELDING_S:
                os.sched_yield()
                nap(0.0)  # Releases the interpreter lock too, for the thread that reads an Abort.
                continue
            self._check()
            if numbers[(self._size + other) * _NUMBERS_PER_LINE] and numbers[place] < step:
                raise GenerationBrokenError(f"rank {other} has left the generation")
            if waited > self._timeout:
                raise GenerationBrokenError(f"rank {other} did not answer within {self._timeout:g} s")
            nap(_NAP_S)

    def _slots(self, part: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' slots for this step, as tensors of the type and length of ``part``."""
        key = (self._step & 1, part.dtype, len(part))
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            length = len(part) * part.element_size()
            views = [self._memory.slot(rank, self._step & 1)[:length].view(part.dtype) for rank in range(self._size)]
            self._views[key] = views
        return views


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # Through .data: the tensor may be part of a graph, and autograd must not record this.
    flat = tensor.data.view(-1)
    return flat.split(CHUNK // flat.element_size()) if flat.numel() * flat.element_size() > CHUNK else (flat,)
