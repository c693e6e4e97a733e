"""How many CPU threads lanes use, where their trials do not say."""

from __future__ import annotations

import os

from fluid.resources import available_cores


def explicit_threads() -> int | None:
    """The number that the user has set as ``OMP_NUM_THREADS`` for the driver; ``None`` if there is none."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else None


def threads_per_gpu(gpus: int) -> int:
    """Returns how many threads the lanes of a GPU use: as ``OMP_NUM_THREADS`` says, or their share of the cores."""
    return explicit_threads() or max(1, len(available_cores()) // max(1, gpus))
