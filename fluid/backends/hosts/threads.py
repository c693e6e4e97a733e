"""How many CPU threads lanes use, where their trials do not say, and how OpenMP's threads wait for work."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fluid.resources import available_cores

#: Variables with which the user decides that already.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def explicit_threads() -> int | None:
    """The number that the user has set as ``OMP_NUM_THREADS`` for the driver; ``None`` if there is none."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else None


def threads_per_gpu(gpus: int) -> int:
    """Returns how many threads the lanes of a GPU divide among them: its share of the cores."""
    return max(1, len(available_cores()) // max(1, gpus))


def waiting_variables(gpus: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Returns the variables with which threads of OpenMP sleep, and do not spin, while they wait for work.

    Threads that spin take cores from other lanes of the GPU, and from the workers that load data.

    Args:
        gpus: UUIDs of the GPUs that lanes may share; nothing is changed where there are none, or if the user has
            decided how threads wait.
    """
    decided = any(name in os.environ for name in _WAITING)
    return (("OMP_WAIT_POLICY", "PASSIVE"),) if gpus and not decided else ()
