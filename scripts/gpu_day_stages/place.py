"""What a stage measures on, and where its figures go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Measurements of each figure on a CPU, where only the code is tried.
_CPU_REPEATS = 2


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device under test.

    Attributes:
        gpus: UUIDs of the GPUs; empty to try the code of a stage on the CPU.
        mps_program: the control program of MPS; ``None`` for the installed one.
    """

    gpus: tuple[str, ...] = ()
    mps_program: str | None = None

    @property
    def kind(self) -> str:
        """PyTorch's name of the device."""
        return "cuda" if self.gpus else "cpu"

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


class Figures:
    """The figures of a stage by name, which are in a file after each: a stage that is killed leaves those it had.

    Args:
        path: the file; ``None`` for none.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.values: dict[str, Any] = {}
        self._path = path

    def __setitem__(self, name: str, value: Any) -> None:
        self.values[name] = value
        if self._path is not None:
            self._path.write_text(json.dumps(self.values, default=str), encoding="utf-8")

    def attempt(self, name: str, measure: Callable[[], Any]) -> None:
        """Records what a measurement returns, or its error, so that the stage goes on."""
        try:
            self[name] = measure()
        except Exception as error:
            self[name] = f"{type(error).__name__}: {error}"[:500]


def seconds_of(call: Callable[[], Any], repeat: int = 1) -> float:
    """Returns the seconds of a call, as the mean of a number of calls."""
    begun = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begun) / repeat
