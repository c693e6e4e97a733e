"""A lane's device: binds the process to it, and measures the memory that trials use there."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from fluid._clock import Clock
from fluid.engine.events import StateMeasured
from fluid.gpu.nvml import find_gpus, processes_on
from fluid.lane.errors import is_out_of_memory, one_line
from fluid.lane.process.threads import set_threads
from fluid.lane.protocol import LaneOptions
from fluid.lane.resident import ResidentTrial
from fluid.processes.below import BELOW
from fluid.resources import MemoryNeed

#: Written to a process's clear_refs, it resets the peak of resident memory (VmHWM).
_RESET_PEAK = "5"
#: Figures of /proc/self/status that are measured.
_COUNTED = ("RssAnon", "VmRSS", "VmHWM")
#: Parts of the messages with which PyTorch tells that CUDA cannot be used.
_CUDA_ERRORS = ("CUDA error", "CUDA unknown error", "CUDA driver", "No CUDA GPUs", "cudaGetDeviceCount")
#: Parts of the message of an allocator that is broken for good, in its process only: a mapping failed in its middle.
_BROKEN_ALLOCATOR = ("INTERNAL ASSERT FAILED", "CUDACachingAllocator")
#: Bytes to allocate in a process whose allocator may be broken: of each kind of segment.
_TRIED_SIZES = (2 << 20, 32 << 20, 256 << 20)
#: Largest shares of a GPU's memory that a lane keeps cached: for the next trial in it, and while it waits a moment for
#: messages. The memory that the engine plans with leaves a tenth of the GPU free.
_KEPT_AT_SWITCH = 0.01
_KEPT_WHILE_IDLE = 0.05
#: Share of a GPU that must be free for that: less, and others may be about to need it.
_FREE_SHARE = 0.25


class DeviceUnusableError(Exception):
    """A lane's process cannot use one of its GPUs.

    Attributes:
        position: which of the lane's GPUs, from 0.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position


def bind(options: LaneOptions) -> None:
    """Binds this process to its device. Must be called before anything can have touched CUDA.

    The lane of a CPU sees no GPU: trials that look for one would otherwise all take the first.
    """
    if options.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.visible
    os.environ.update((*options.environment, *options.variables))
    if options.cores:
        with suppress(OSError, AttributeError):  # The cores may have been taken from this container.
            os.sched_setaffinity(0, options.cores)
    set_threads(options.threads)


def torch_with_cuda() -> Any:
    """PyTorch, if it is loaded and can use GPUs at all; else ``None``."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.backends.cuda.is_built() else None


def use_gpus(torch: Any, gpus: int) -> None:
    """Runs kernels on each GPU: one of PyTorch's own, which makes the context, and one of the library for matrices.

    Raises:
        DeviceUnusableError: one of them cannot be used.
    """
    position = 0
    try:
        for position in range(gpus):  # CUDA sees none behind one that is lost.
            made = torch.zeros((8, 8), device=f"cuda:{position}")
            torch.mm(made, made)
            torch.cuda.synchronize(position)
    except Exception as error:  # CUDA's errors are RuntimeError, AssertionError and classes of their own.
        raise DeviceUnusableError(position, one_line(error)) from error
    forget_workspaces = getattr(getattr(torch, "_C", None), "_cuda_clearCublasWorkspaces", None)
    if forget_workspaces is not None:
        forget_workspaces()  # Tens of MB, which a trial that multiplies takes again.


class MemoryMeter(Protocol):
    """Measures the memory that a piece of work takes on a lane's device."""

    def begin(self) -> None:
        """Starts a measurement."""
        ...

    def end(self, *, settle: bool = False) -> tuple[float, float] | None:
        """Ends a measurement; waits for the device to finish, which also raises the device's errors.

        Args:
            settle: whether to release cached memory first: what cannot be released is held, too.

        Returns:
            (bytes held more than at the beginning, peak bytes on top of what is held now); ``None`` if not measured.
        """
        ...

    def change_trial(self) -> None:
        """Prepares for the measurement of another trial: releases cached memory, unless it is little."""
        ...

    def limit(self, limit_bytes: float | None) -> None:
        """Limits the device memory that this process may take for tensors; ``None`` for no limit."""
        ...

    def may_keep_cache(self) -> bool:
        """Whether the device has so much free memory that an idle lane may keep its cache for a moment."""
        ...

    def release_cached(self, *, collect: bool = False) -> None:
        """Returns memory that no trial holds to the device, or to the system, for other processes.

        Args:
            collect: whether to free reference cycles first, as after a trial has left.
        """
        ...

    def settle(self) -> float:
        """Returns memory as :meth:`release_cached` does; then the bytes held more than at the latest measurement.

        They are 0 if another trial came into the lane since, or nothing can be measured.
        """
        ...

    def is_usable(self, error: str = "", *, allocates: bool = False) -> bool:
        """Whether the device still answers; after some faults only a new process can use it.

        Args:
            error: traceback of what a trial raised. One that names CUDA is checked also before CUDA was used.
            allocates: whether to ask for memory, too, as a trial has run out of it.
        """
        ...


class _Usage(NamedTuple):
    """Bytes that PyTorch's allocator has on a GPU: of tensors, and reserved for them; now, and at the peak."""

    held: float
    most_held: float
    reserved: float
    most_reserved: float

    @property
    def cached(self) -> float:
        """Bytes that are reserved and that no tensor uses."""
        return self.reserved - self.held

    @classmethod
    def of(cls, cuda: Any, gpu: int) -> _Usage:
        """Asks the allocator once: each of PyTorch's functions for one figure sorts and copies a hundred of them."""
        stats = cuda.memory_stats_as_nested_dict(gpu)
        held, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return cls(held["current"], held["peak"], reserved["current"], reserved["peak"])


class DeviceMemoryMeter:
    """Measures GPU memory through PyTorch; nothing on a CPU, or before CUDA is used.

    Of several GPUs, each measurement is the largest of any.

    PyTorch keeps memory that tensors have freed, and other processes cannot use it. So the peak is the most that
    PyTorch had reserved, and what is held between iterations is what it reserves once its cache was released: segments
    with a single tensor in them stay, and pools of CUDA graphs. Cached memory is released when the lane switches trials
    or has nothing to do. A release costs the next iteration its allocations anew, so little memory is kept: after a
    switch it counts towards the peak of the next trial, which errs on the safe side.

    Args:
        kind: kind of the lane's device.
    """

    def __init__(self, kind: str) -> None:
        self._is_gpu = kind == "gpu"
        #: Bytes held on each GPU at the end of the last measurement; ``None`` where they may have changed since.
        self._held: list[float] | None = None
        #: Bytes on each GPU that no tensor used and that could not be released; none before the cache was released.
        self._stuck: list[float] = []
        #: The limit in force.
        self._limit: float | None = None
        #: Bytes that programs of a trial held at the beginning of a measurement; ``None`` if that is not known.
        self._of_programs: float | None = None

    def begin(self) -> None:
        """Starts a measurement."""
        self._of_programs = program_bytes() if self._is_gpu and BELOW.leaders else 0.0
        cuda = self._cuda()
        if cuda is None:
            self._held = None
            return
        if self._held is None:
            self._held = self._all_held(self._usages(cuda))
        for gpu in range(len(self._held)):
            cuda.reset_peak_memory_stats(gpu)

    def end(self, *, settle: bool = False) -> tuple[float, float] | None:
        """Ends a measurement: see :meth:`MemoryMeter.end`. Of programs, the peak is what they hold: they keep it."""
        if self._is_gpu and BELOW.leaders:
            held, held_before = program_bytes(), self._of_programs
            return None if held is None or held_before is None else (held - held_before, 0.0)
        cuda = self._cuda()
        if cuda is None:
            return None
        for gpu in range(cuda.device_count()):
            cuda.synchronize(gpu)
        usages = self._usages(cuda)
        if settle:
            self._empty_cache(cuda)
        before, self._held = self._held or [0.0] * len(usages), self._all_held(usages)
        grown = max(now - then for now, then in zip(self._held, before, strict=True))
        peaks = (max(usage.most_held, usage.most_reserved) for usage in usages)
        return grown, max(peak - now for peak, now in zip(peaks, self._held, strict=True))

    def change_trial(self) -> None:
        """Prepares for another trial: see :meth:`MemoryMeter.change_trial`."""
        self._held = None
        if not self._has_little_cached(_KEPT_AT_SWITCH):
            self.release_cached()

    def limit(self, limit_bytes: float | None) -> None:
        """Limits this process on each GPU: see :meth:`MemoryMeter.limit`. More than that is an out-of-memory error."""
        cuda = self._cuda()
        if limit_bytes == self._limit or cuda is None:
            return
        for gpu in range(cuda.device_count()):
            total = float(cuda.get_device_properties(gpu).total_memory)
            share = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total)
            cuda.set_per_process_memory_fraction(share, gpu)
        self._limit = limit_bytes

    def may_keep_cache(self) -> bool:
        """Whether an idle lane may keep its cache for a moment: see :meth:`MemoryMeter.may_keep_cache`."""
        return self._has_little_cached(_KEPT_WHILE_IDLE)

    def release_cached(self, *, collect: bool = False) -> None:
        """Empties PyTorch's cache: see :meth:`MemoryMeter.release_cached`."""
        cuda = self._cuda()
        if cuda is None:
            return
        if collect:
            gc.collect()
        if collect or any(usage.cached > 0.0 for usage in self._usages(cuda)):
            with suppress(RuntimeError):  # A device with a fault; see is_usable.
                self._empty_cache(cuda)

    def settle(self) -> float:
        """Empties PyTorch's cache; then all that it still reserves is held: see :meth:`MemoryMeter.settle`."""
        self.release_cached()
        cuda, before = self._cuda(), self._held
        if cuda is None or before is None:
            return 0.0
        usages = self._usages(cuda)
        self._stuck = [usage.cached for usage in usages]
        self._held = [usage.reserved for usage in usages]
        return max(now - then for now, then in zip(self._held, before, strict=True))

    def _empty_cache(self, cuda: Any) -> None:
        cuda.empty_cache()
        self._stuck = [usage.cached for usage in self._usages(cuda)]

    def _all_held(self, usages: list[_Usage]) -> list[float]:
        """Bytes on each GPU that tensors hold, and that could not be released."""
        stuck = self._stuck or [0.0] * len(usages)
        return [min(usage.reserved, usage.held + rest) for usage, rest in zip(usages, stuck, strict=True)]

    def _has_little_cached(self, share: float) -> bool:
        """Whether at most a share of each GPU is cached here, and the GPUs have enough free memory besides."""
        cuda = self._cuda()
        if cuda is None:
            return True
        try:
            usages = self._usages(cuda)
            for gpu, (usage, held) in enumerate(zip(usages, self._all_held(usages), strict=True)):
                releasable = usage.reserved - held
                if releasable > 0.0:
                    free, total = cuda.mem_get_info(gpu)
                    if releasable > share * total or free < _FREE_SHARE * total:
                        return False
        except RuntimeError:  # A device with a fault; see is_usable.
            return False
        return True

    @staticmethod
    def _usages(cuda: Any) -> list[_Usage]:
        return [_Usage.of(cuda, gpu) for gpu in range(cuda.device_count())]

    def is_usable(self, error: str = "", *, allocates: bool = False) -> bool:
        """Whether the device still answers: see :meth:`MemoryMeter.is_usable`."""
        torch = torch_with_cuda() if self._is_gpu else None
        if torch is None or not (torch.cuda.is_initialized() or any(text in error for text in _CUDA_ERRORS)):
            return True
        if all(text in error for text in _BROKEN_ALLOCATOR):
            return False
        try:
            if allocates and torch.cuda.is_initialized():
                self._allocate(torch)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            else:
                use_gpus(torch, max(1, torch.cuda.device_count()))
        except Exception:
            return False
        return True

    @staticmethod
    def _allocate(torch: Any) -> None:
        """Takes memory on each GPU and gives it back; raises what PyTorch raises, unless that is for want of memory."""
        torch.cuda.empty_cache()
        for gpu in range(torch.cuda.device_count()):
            for size in _TRIED_SIZES:
                if size > torch.cuda.mem_get_info(gpu)[0]:
                    break
                try:
                    torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
        torch.cuda.empty_cache()

    def _cuda(self) -> Any:
        if not self._is_gpu:
            return None
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        return cuda if cuda is not None and cuda.is_initialized() else None


def program_bytes() -> float | None:
    """Bytes that the programs of a trial hold on a GPU, the largest of any; ``None`` if NVML does not tell.

    In a container it may list processes by the numbers that they have outside.
    """
    programs, most = set(BELOW.processes()), 0.0
    for gpu in find_gpus():
        listed = processes_on(gpu.token)
        if listed is None or not all(os.path.exists(f"/proc/{process.pid}") for process in listed):
            return None
        most = max(most, sum(process.memory_bytes or 0.0 for process in listed if process.pid in programs))
    return most


class ProcessMemoryMeter:
    """Measures the process's own memory, for the lane of a CPU whose memory is limited."""

    def __init__(self) -> None:
        self._held = 0.0

    def begin(self) -> None:
        """Starts a measurement."""
        _trim()  # As at the end of a measurement: memory that goes back later would count as freed by the trial.
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write(_RESET_PEAK)
            BELOW.reset_peaks(_RESET_PEAK)
            self._held = _memory_of_process()["RssAnon"]
        except (OSError, KeyError):  # An old kernel, or one that forbids this in containers.
            self._held = -1.0

    def end(self, *, settle: bool = False) -> tuple[float, float] | None:
        """Ends a measurement: see :meth:`MemoryMeter.end`. Free memory is always released."""
        if self._held < 0.0:
            return None
        peak = _memory_of_process()["VmHWM"]
        _trim()  # Free memory that the allocator keeps is not the trial's.
        now = _memory_of_process()
        before, self._held = self._held, now["RssAnon"]
        return self._held - before, peak - now["VmRSS"]

    def change_trial(self) -> None:
        """Does nothing: free memory of the process goes back at the begin and end of each measurement."""

    def limit(self, limit_bytes: float | None) -> None:
        """Does nothing: a CPU's memory is shared with all other processes."""

    def may_keep_cache(self) -> bool:
        """True: at the end of a measurement nothing is cached."""
        return True

    def release_cached(self, *, collect: bool = False) -> None:
        """Returns free memory to the system, after a collection only: see :meth:`MemoryMeter.release_cached`."""
        if collect:
            gc.collect()
            _trim()

    def settle(self) -> float:
        """0: what is free goes back at the end of each measurement."""
        return 0.0

    def is_usable(self, error: str = "", *, allocates: bool = False) -> bool:
        """True: a CPU does not fail on its own."""
        return True


def make_memory_meter(options: LaneOptions) -> MemoryMeter:
    """Returns the meter for the memory of a lane's device."""
    bounded_cpu = options.kind == "cpu" and options.bounded
    return ProcessMemoryMeter() if bounded_cpu else DeviceMemoryMeter(options.kind)


def _trim() -> None:
    """Makes the C library return free memory to the system."""
    with suppress(OSError, AttributeError):  # Not glibc.
        ctypes.CDLL(None).malloc_trim(0)


def _memory_of_process() -> dict[str, float]:
    """The memory figures of /proc/self/status, bytes; those of programs that a trial runs are added."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        parts = [line.split() for line in file if line.endswith(" kB\n")]
    own = {name.rstrip(":"): float(value) * 1024.0 for name, value, _ in parts}
    return own | {name: own[name] + BELOW.memory(name) for name in _COUNTED if BELOW.leaders}


# -- resident memory -----------------------------------------------------------------------------
#
# What the residents of a lane hold and take of their device's memory.


#: An idle lane keeps cached memory for the time of so many iterations, within these limits, seconds.
_IDLE_ITERATIONS = 10
_SHORTEST_IDLE_S = 0.05
_LONGEST_IDLE_S = 1.0
#: A change below this many bytes is not worth telling the driver: PyTorch's smallest segment has two of these.
_NOTABLE = 2**20


class ResidentMemory:
    """Measures and limits what residents take of a device.

    Args:
        meter: of the device's memory.
        clock: the lane's.
        residents: all of the lane, whenever they are asked for.

    Attributes:
        may_hold_cache: whether the lane may hold device memory that no trial uses.
    """

    def __init__(self, meter: MemoryMeter, clock: Clock, residents: Iterable[ResidentTrial]) -> None:
        self.may_hold_cache = False
        self._meter = meter
        self._clock = clock
        self._residents = residents

    def limit(self, rows: Sequence[ResidentTrial]) -> None:
        """Applies the limits of trials that run at once to the process, which holds the states of others besides."""
        limit = 0.0
        for resident in rows:
            if resident.limit is None:
                self._meter.limit(None)
                return
            limit += resident.limit
        running = set(rows)
        self._meter.limit(limit + sum(each.held or 0.0 for each in self._residents if each not in running))

    def begin(self) -> None:
        """Starts a measurement."""
        self._meter.begin()

    def measure(
        self,
        rows: Sequence[ResidentTrial],
        *,
        settle: bool = False,
        shared: float = 0.0,
        alike: Sequence[ResidentTrial] = (),
    ) -> MemoryNeed | None:
        """Ends a measurement of trials that ran at once, each of which has an equal part of what was measured.

        So the parts of all residents add up to what the lane holds, and takes in a step. What a pack keeps beside its
        rows, such as the copy of their states to go back to, is theirs, too.

        Args:
            rows: the trials.
            settle: whether to release cached memory first: what cannot be released is held, too.
            shared: bytes of what they hold that are there once for them and those that are alike.
            alike: further residents, which hold as much as they do.

        Returns:
            What one needs, with all that is shared; ``None`` where that is not measured.
        """
        measured = self._meter.end(settle=settle)
        if measured is None:
            return None
        self.may_hold_cache = True
        holders = [*rows, *alike]
        total = sum(resident.held or 0.0 for resident in holders) + measured[0]
        for resident in holders:
            resident.held = total / len(holders)
        shared = math.floor(min(shared, max(0.0, total)))
        own = math.ceil(max(0.0, total - shared) / len(holders))
        return MemoryNeed(own + shared, max(0.0, measured[1]) / len(rows), shared)

    def leave(self, resident: ResidentTrial, others: Sequence[ResidentTrial]) -> list[StateMeasured]:
        """Ends a measurement in which a trial has left its lane: what it has not freed is held by those it shares with.

        Args:
            resident: the trial.
            others: at least one trial that may hold what it held.

        Returns:
            What to tell the driver of those that do not run: nothing else measures them again.
        """
        measured = None
        with suppress(RuntimeError):  # A device with a fault; see is_usable.
            measured = self._meter.end(settle=True)
        if measured is None or resident.held is None:
            return []
        stays = max(0.0, resident.held + measured[0]) / len(others)
        for other in others:
            other.held = None if other.held is None else other.held + stays
        return [told for other in others if not other.left and (told := self._to_tell(other)) is not None]

    def idle_timeout(self, current: ResidentTrial | None) -> float | None:
        """Returns the seconds to wait for messages before cached memory is released; ``None`` for no end.

        A driver that decides iteration by iteration answers soon, and the next iteration reuses what is cached.

        Args:
            current: the resident that ran last.
        """
        if not self.may_hold_cache:
            return None
        if not self._meter.may_keep_cache():
            return 0.0
        pace = None if current is None else current.pace
        return min(_LONGEST_IDLE_S, max(_SHORTEST_IDLE_S, _IDLE_ITERATIONS * (pace or 0.0)))

    def release_cached(self) -> None:
        """Returns device memory that no trial uses, also what only reference cycles keep."""
        self._meter.release_cached(collect=True)

    def settle(self, current: ResidentTrial | None, resident: ResidentTrial | None) -> StateMeasured | None:
        """Returns device memory that no trial uses, and measures what the trial that ran last still holds.

        Args:
            current: that trial.
            resident: one that does not run.

        Returns:
            What to tell the driver of ``resident``; ``None`` if it knows, or nothing is measured.
        """
        self.may_hold_cache = False
        grown = self._meter.settle()
        if current is not None and current.held is not None:
            current.held += grown
        return None if resident is None else self._to_tell(resident)

    def _to_tell(self, resident: ResidentTrial) -> StateMeasured | None:
        """Returns what a trial that does not run holds; ``None`` if the driver knows, or it is not measured."""
        if resident.held is None:
            return None
        told, held = resident.told_held, max(0.0, resident.held)
        if told is not None and abs(held - told) < _NOTABLE:
            return None
        resident.told_held = held
        return StateMeasured(self._clock.now(), resident.trial_id, resident.lane_id, held)

    @property
    def held_bytes(self) -> float:
        """Device memory that all residents hold, as last measured."""
        return sum(max(0.0, each.held or 0.0) for each in self._residents)
