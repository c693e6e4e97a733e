"""What it costs ``fluid view`` to follow a long session: CPU seconds of an update, and of drawing all of the page anew.

A session of trials that do no work is run on this machine. A copy of its folder grows as if it ran, and is followed.

    python benchmarks/view.py [--trials 2000] [--updates 20]
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fluid import FluidExecutor, Search, Trial, TrialGroup
from fluid._clock import thread_seconds
from fluid.reports.page.html import embedded
from fluid.reports.page.patch import PageDrawer
from fluid.reports.run.loader import RunReader

_GROWING = ("journal.jsonl", "results.jsonl")
#: The share of the lines that is there before the first update, and that each adds.
_BEGUN, _STEP = 0.95, 0.001
_ITERATIONS = 35


def train(config: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """A learning curve."""
    noise = random.Random(config["seed"])
    for step in range(config["iterations"]):
        yield {"loss": config["lr"] + 1.0 / (1 + step) + noise.gauss(0.0, 0.01), "accuracy": noise.random()}


def run_session(folder: Path, trials: int) -> None:
    """Runs trials of 1 to 35 iterations each."""
    draw = random.Random(0)
    configs = [
        {"lr": 10 ** draw.uniform(-5, -1), "optimizer": draw.choice(["adam", "sgd"]), "dropout": draw.random()}
        for _ in range(trials)
    ]
    group = [
        Trial(train, {**config, "seed": seed, "iterations": 1 + seed % _ITERATIONS}, budget=_ITERATIONS)
        for seed, config in enumerate(configs)
    ]
    with FluidExecutor(backend="local", devices=4, run_dir=folder, verbose=0) as executor:
        executor.submit_trialgroup(TrialGroup(group, search=Search("loss", "min"))).wait()


def grow(whole: Path, copy: Path, share: float) -> None:
    """Lets the growing files of a copy have so much of the whole."""
    for name in _GROWING:
        content = (whole / name).read_bytes()
        with (copy / name).open("ab") as file:
            file.write(content[file.tell() : int(share * len(content))])


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--updates", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        whole, copy = Path(place, "whole"), Path(place, "copy")
        run_session(whole, arguments.trials)
        copy.mkdir()
        for file in whole.iterdir():
            if file.is_file() and file.name not in _GROWING:
                shutil.copy(file, copy)
        grow(whole, copy, _BEGUN)
        reader, drawer, costs = RunReader(copy), PageDrawer(), []
        began = thread_seconds()
        run = reader.read()
        text = embedded(drawer.draw([run], []))
        first = thread_seconds() - began
        for update in range(arguments.updates):
            grow(whole, copy, _BEGUN + _STEP * (update + 1))
            began = thread_seconds()
            newer = reader.read_on()
            patch = None if newer is None else drawer.patch([newer])
            assert newer is not None and patch is not None
            sent = embedded(patch)
            costs.append(thread_seconds() - began)
        began = thread_seconds()
        embedded(drawer.draw([reader.read()], []))
        anew = thread_seconds() - began
        print(f"{len(newer.trials):,} trials, {newer.iterations:,} iterations; seconds of CPU:")
        print(f"first reading {first:.2f}, {len(text) / 1e6:.1f} MB; all drawn anew {anew:.2f}")
        print(f"update: median {statistics.median(costs):.3f}, most {max(costs):.3f}; sent {len(sent) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
