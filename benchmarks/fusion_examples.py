"""Iterations per second of the examples' networks for images: packs of k trials against trials one by one.

    python benchmarks/fusion_examples.py --data DIR

On one thread, at the examples' small scale with short iterations, in turns. It compares CPU times of the thread,
medians of the repetitions, so that other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from models.alexnet import Cifar10
from models.data import CIFAR10, MNIST
from models.gan import Dcgan, train_classifier
from tuning.scales import SCALES

from fluid.fused import FusedPack, FusedTrainable

ROWS = (2, 4, 8)


def networks(folder: str | None) -> dict[str, tuple[type[FusedTrainable], dict[str, Any]]]:
    """Returns the classes, and configs in the middle of the spaces."""
    images, digits = CIFAR10.locate(folder), MNIST.locate(folder)
    small = {"data": images, **SCALES["cifar10"]["small"].fixed, "images": 192}
    short = {"data": digits, **SCALES["dcgan"]["small"].fixed, "batches": 4, "scored": 50}
    sizes = {"conv_1": 64, "conv_2": 128, "dense_1": 512, "dropout_1": 0.05, "dropout_2": 0.1}
    return {
        "CIFAR-10": (Cifar10, {**sizes, "lr": 0.03, "momentum": 0.5, "fixed": small}),
        "DCGAN": (Dcgan, {"netG_lr": 3e-4, "netD_lr": 3e-4, "fixed": short | {"classifier": train_classifier(digits)}}),
    }


def gains(cls: type[FusedTrainable], config: dict[str, Any], repetitions: int) -> dict[int, float]:
    """Returns how many times as many iterations per second a pack makes, by its rows."""
    alone = cls()
    alone.setup(config)
    runs = {1: alone, **{k: FusedPack.of(cls, [{**config, "seed": seed} for seed in range(k)]) for k in ROWS}}
    seconds: dict[int, list[float]] = {k: [] for k in runs}
    for _ in range(1 + repetitions):
        for k, run in runs.items():
            begun = time.thread_time()
            run.step()
            seconds[k].append(time.thread_time() - begun)
    median = {k: statistics.median(each[1:]) for k, each in seconds.items()}  # The first one traces.
    return {k: k * median[1] / median[k] for k in ROWS}


def main() -> None:
    """Measures both, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="a folder with CIFAR-10 and MNIST (default: download)")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of each (default 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| | k = " + " | ".join(map(str, ROWS)) + " |\n|---|" + "---|" * len(ROWS))
    for name, (cls, config) in networks(options.data).items():
        found = gains(cls, config, options.repetitions)
        print(f"| {name} | " + " | ".join(f"{found[k]:.2f}x" for k in ROWS) + " |", flush=True)


if __name__ == "__main__":
    main()
