"""How many devices does a sweep need? The same sweep is rehearsed on 1 to 16 simulated devices, in seconds.

    python examples/rehearse.py

The trainable says what a trial does by a method ``replay``: its metrics and seconds per iteration. See
docs/rehearsal.md.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fluid
from fluid.rehearsal import Overheads, RehearsalBackend, ReplayedIteration
from fluid.rehearsal.outcome import SweepOutcome, outcome_of
from fluid.search import choice, loguniform

SPACE = {"lr": loguniform(1e-4, 1e-1), "width": choice([64, 128, 256])}


class Model:
    """A trial that can be replayed: wider networks learn more, and take longer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config, self._iteration = config, 0

    def step(self) -> dict[str, float]:
        """Trains for real; a rehearsal does not call it."""
        raise NotImplementedError("put your training here")

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        """Tells what the trial does in some iterations."""
        floor = 0.1 * abs(math.log10(config["lr"]) + 2.5) + 8.0 / config["width"]
        return [ReplayedIteration({"loss": floor + 1.0 / i}, seconds=config["width"] / 2.0) for i in iterations]


def rehearsed(devices: int, run_dir: Path) -> SweepOutcome:
    """Rehearses the sweep on a number of devices."""
    backend = RehearsalBackend(devices, overheads=Overheads(lane_s=5.0, start_s=2.0, source="given"))
    with fluid.FluidExecutor(backend=backend, run_dir=run_dir, verbose=0) as executor:
        fluid.run(
            Model,
            SPACE,
            metric="loss",
            mode="min",
            samples=27,
            algorithm="asha",
            budget=27,
            seed=0,
            executor=executor,
        )
    return outcome_of(run_dir)


def main() -> list[SweepOutcome]:
    """Prints a table of makespans, and returns what it shows."""
    outcomes = []
    print("devices   makespan  device-hours  busy    best")
    with tempfile.TemporaryDirectory() as folder:
        for devices in (1, 2, 4, 8, 16):
            outcome = rehearsed(devices, Path(folder) / str(devices))
            print(
                f"{devices:7} {outcome.makespan_s / 3600.0:8.2f} h {outcome.device_hours:13.2f}"
                f" {outcome.busy_share:5.0%} {outcome.best:7.4f}"
            )
            outcomes.append(outcome)
    return outcomes


if __name__ == "__main__":
    main()
