"""Measures every config of the grid of predict.py once: seconds of an iteration, and memory.

    python benchmarks/predict_grid.py [--data DIR] [--nets mlp,cnn] [--rounds 1] [--iterations 3] [--json FILE]

All run in this process, one after another in random order, with one thread of PyTorch, as trials do in the lane of a
CPU. ``--data`` is a folder with ``mnist-10k.npz``; without it, images are random. The file has a row for each trial,
see ``predict_workload.measure``; predict.py draws its trials from these rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import predict_workload


def measure_grid(
    nets: list[str], rounds: int, iterations: int, data: str | None, seed: int = 0
) -> list[dict[str, Any]]:
    """Returns a row for each config and round.

    Args:
        nets: which networks.
        rounds: how often the whole grid is measured.
        iterations: of each trial, besides the first.
        data: folder with ``mnist-10k.npz``; ``None`` for random images.
        seed: of the order.
    """
    rows, order = [], random.Random(seed)
    for net in nets:
        config = {"net": net, "batch_size": 64, "width": 64, "optimizer": "adam", "data": data}
        predict_workload.measure(config, 1)  # Loads libraries, which are no trial's.
    for _ in range(rounds):
        grid = [config for net in nets for config in predict_workload.configs(net)]
        order.shuffle(grid)
        for config in grid:
            row = predict_workload.measure({**config, "data": data}, iterations)
            rows.append({**row, "config": config})
            print(
                f"{len(rows)}/{rounds * len(grid)} {config}: {statistics.median(row['seconds']):.3f} s, "
                f"{statistics.median(row['wall_seconds']):.3f} s on the wall, "
                f"{(row['persistent_bytes'] + row['ephemeral_bytes']) / 1e6:.1f} MB, "
                f"{row['counted_bytes'] / 1e6:.1f} MB in tensors",
                file=sys.stderr,
            )
    return rows


def main() -> None:
    """Measures the grid, and writes or prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", metavar="DIR", help="folder with mnist-10k.npz; random images without it")
    parser.add_argument("--nets", default="mlp,cnn", help="which networks, comma-separated")
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure the grid")
    parser.add_argument("--iterations", type=int, default=3, help="of each trial, besides the first")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    import torch

    found = {
        "machine": f"one of 2 shared cores, {platform.machine()}, {platform.processor() or platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": f"python benchmarks/predict_grid.py --data DIR --nets {options.nets} --rounds {options.rounds}"
        f" --iterations {options.iterations}",
        "images": "MNIST" if options.data else "random",
        "samples": predict_workload.SAMPLES,
        "rows": measure_grid(options.nets.split(","), options.rounds, options.iterations, options.data),
    }
    text = json.dumps(found, indent=None).replace('{"config"', '\n{"config"') + "\n"
    if options.json:
        Path(options.json).write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
