"""What a stage measures on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fluid import Device, Profile
from fluid.gpu.nvml import find_gpus

#: Measurements of each figure on a CPU, where only the code is tried.
_CPU_REPEATS = 2


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device under test.

    Attributes:
        gpus: UUIDs of the GPUs; empty to try the code of a stage on the CPU.
        mps_program: the control program of MPS; ``None`` for the installed one.
        end: when the stage is interrupted, as of ``time.time()``.
    """

    gpus: tuple[str, ...] = ()
    mps_program: str | None = None
    end: float = float("inf")

    @property
    def kind(self) -> str:
        """PyTorch's name of the device."""
        return "cuda" if self.gpus else "cpu"

    def left(self) -> float:
        """Seconds until the stage is interrupted."""
        return self.end - time.time()

    def repeats(self, count: int) -> int:
        """How often a figure is measured: ``count`` on a GPU, twice on a CPU at most."""
        return count if self.gpus else min(count, _CPU_REPEATS)

    def bytes_of(self, gib: float) -> int:
        """The size of a buffer: so many GiB on a GPU, as many MiB on a CPU."""
        return int(gib * 2 ** (30 if self.gpus else 20))

    def synchronize(self) -> None:
        """Waits until the GPU has finished all that was started."""
        if self.gpus:
            import torch

            torch.cuda.synchronize()

    def device(self) -> Device:
        """The device, for an executor."""
        if not self.gpus:
            return Device(0, kind="cpu")
        gpus = find_gpus()
        index = [gpu.token for gpu in gpus].index(self.gpus[0])
        return Device(index, kind="gpu", memory_bytes=gpus[index].memory_bytes, model=gpus[index].name)


def seconds_of(call: Callable[[], Any], repeat: int = 1) -> float:
    """Returns the seconds of a call, as the mean of a number of calls."""
    begun = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begun) / repeat


def taught(key: str, most: int) -> Profile:
    """Returns a profile by which so many trials on a device do not slow each other down: they are packed."""
    profile = Profile()
    for p in range(1, most + 1):
        while profile.needs_measuring(key, co_residents=p):
            profile.observe(key, 0.01, co_residents=p)
    return profile
