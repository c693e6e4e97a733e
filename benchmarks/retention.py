"""What it costs that checkpoints outlive the session: the makespan of a small sweep by ``keep``, against ``"none"``.

Every trial works a fixed time per iteration and has a state of so many bytes; its loss falls as that of a network does,
so that ``"best:1"`` saves often at first. The rounds alternate, so that a load on the machine hits all alike.

    python benchmarks/retention.py [--trials 16] [--megabytes 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fluid import FluidExecutor, Search, Trial, TrialGroup

KEEPS = ("none", "last", "best:1", "best:4")


class Network:
    """A state of some megabytes, and iterations that take a fixed time of a device."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.done = config, 0
        self.weights = os.urandom(int(config["megabytes"] * 1e6))

    def step(self) -> dict[str, Any]:
        time.sleep(self.config["seconds"])
        self.done += 1
        return {"loss": self.config["floor"] + 1.0 / self.done}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "weights").write_bytes(self.weights)

    def load_checkpoint(self, folder: str) -> None:
        self.weights = Path(folder, "weights").read_bytes()


def sweep(keep: str, trials: int, megabytes: float, seconds: float, folder: Path) -> tuple[float, int, float]:
    """Runs the sweep; returns its makespan in seconds, the checkpoints that were kept, and the seconds of ``close``."""
    configs = [{"megabytes": megabytes, "seconds": seconds, "floor": (7 * x) % trials / trials} for x in range(trials)]
    group = TrialGroup([Trial(Network, config, budget=10) for config in configs], search=Search("loss", "min"))
    executor = FluidExecutor("local", 2, packing="off", verbose=0, run_dir=folder, keep=keep)
    handle = executor.submit_trialgroup(group)
    handle.wait()
    makespan, begun = handle.makespan or 0.0, time.perf_counter()
    executor.close()
    return makespan, len(list(folder.glob("trials/*/kept/*"))), time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=0.1, help="of an iteration")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, int, float]]] = {keep: [] for keep in KEEPS}
    for _ in range(arguments.rounds):
        for keep in KEEPS:
            with tempfile.TemporaryDirectory() as folder:
                sizes = arguments.trials, arguments.megabytes, arguments.seconds
                found[keep].append(sweep(keep, *sizes, Path(folder, "run")))
    print(f"{'keep':8}{'makespan':>10}{'ratio':>8}{'kept':>6}{'close':>8}")
    for keep, runs in found.items():
        ratio = statistics.median(
            makespan / none for (makespan, _, _), (none, _, _) in zip(runs, found["none"], strict=True)
        )
        makespan, close = statistics.median(run[0] for run in runs), statistics.median(run[2] for run in runs)
        print(f"{keep:8}{makespan:8.2f} s{ratio:8.3f}{runs[-1][1]:6}{close:6.2f} s")


if __name__ == "__main__":
    main()
