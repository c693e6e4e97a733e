"""A driver that works the sweep of a test, alone or together with others.

python member_script.py join|alone SHARED ALGORITHM SLOW_WHILE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fluid
from fluid.joint import membership
from fluid.search import uniform

SAMPLES, BUDGET = 64, 27
LEASE_S, BEAT_S = 2.0, 0.25
#: Seconds of an iteration: as long as a file is there, and afterwards.
SLOW_S, FAST_S = 0.3, 0.02
SPACE = {"x": uniform(0.0, 1.0)}


def train(
    config: dict[str, Any], state: tuple[int, float] | None = None
) -> Iterator[tuple[dict[str, float], tuple[int, float]]]:
    """Its loss follows from the config and the iteration, if it goes on where it was."""
    slow_while = Path(config["slow_while"])
    iteration, total = (0, 0.0) if state is None else state
    while True:
        time.sleep(SLOW_S if slow_while.exists() else FAST_S)
        iteration += 1
        total += config["x"] ** iteration
        # An iteration that is computed twice is another one by the process.
        yield {"loss": abs(config["x"] - 0.4) + total / iteration**2, "pid": os.getpid()}, (iteration, total)


def main(how: str, shared: str, algorithm: str, slow_while: str) -> None:
    membership.LEASE_S, membership.BEAT_S = LEASE_S, BEAT_S
    with fluid.FluidExecutor("local", devices=1, verbose=0, run_dir=shared, join=how == "join"):
        result = fluid.run(
            train,
            {**SPACE, "slow_while": slow_while},
            metric="loss",
            mode="min",
            samples=SAMPLES,
            algorithm=algorithm,
            budget=BUDGET,
            seed=0,
            name="torture",
        )
    print(f"{len(result.trials)} trials, the best with {result.best.value}")


if __name__ == "__main__":
    main(*sys.argv[1:])
