"""The trials of overhead.py, in the form of each system.

They are compute-bound: an iteration burns CPU time, not wall time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any


def burn(milliseconds: float) -> None:
    """Uses a number of seconds of this thread's CPU time."""
    until = time.thread_time() + milliseconds * 1e-3
    while time.thread_time() < until:
        pass


def generator(config: dict[str, Any]) -> Any:
    """A trial as a generator function, for Fluid."""
    for iteration in range(config["iterations"]):
        burn(config["milliseconds"])
        yield {"loss": 1.0 / (1 + iteration)}


def torch_generator(config: dict[str, Any]) -> Any:
    """The same, which imports PyTorch first. Fluid loads what a trainable's code imports before it forks a lane."""
    import torch

    assert torch.__version__
    yield from generator(config)


def trial_of(workload: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """The trial of a workload."""
    return torch_generator if workload["import_torch"] else generator


def syne_tune_script() -> None:
    """A trial as a program, for Syne Tune."""
    import argparse

    from syne_tune import Reporter

    parser = argparse.ArgumentParser()
    for name in ("iterations", "import_torch", "x", "st_checkpoint_dir"):
        parser.add_argument(f"--{name}", default="0")
    parser.add_argument("--milliseconds", type=float)
    config = vars(parser.parse_known_args()[0])
    report = Reporter()
    config["iterations"], config["import_torch"] = int(config["iterations"]), config["import_torch"] == "1"
    for iteration, metrics in enumerate(trial_of(config)(config), start=1):
        report(**metrics, iteration=iteration)


if __name__ == "__main__":
    sys.exit(syne_tune_script())
