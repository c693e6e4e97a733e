"""How fast sweeps are rehearsed: seconds of this machine for a result, and how much faster than the wall they are.

A sweep of 256 trials of 52 epochs by ASHA on 32 devices, whose epochs take as long as those of LCBench (8, 15 and 117
seconds at percentiles 5, 50 and 95), and the same with epochs of minutes. The trials are curves that cost next to
nothing, and what they do cost is taken off: what is measured is Fluid beside the trials.

    python benchmarks/rehearsal_speed.py --part native --out benchmarks/results/rehearsal_speed.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import about

import fluid
from fluid.rehearsal import ReplayedIteration
from fluid.search import loguniform, uniform

TRIALS, EPOCHS, DEVICES = 256, 52, 32
#: Seconds of an epoch by the share of trials with shorter ones: LCBench's.
SECONDS = ((0.0, 6.0), (0.05, 8.0), (0.5, 15.0), (0.95, 117.0), (1.0, 150.0))
#: Goals: microseconds for a result, and times the wall's speed, with LCBench's epochs and with epochs of minutes.
MOST_MICROSECONDS, LEAST_SPEED, LEAST_SPEED_OF_MINUTES = 150.0, 3000.0, 10000.0


class Curve:
    """A trial: its loss falls to a limit that its learning rate sets."""

    stretch = 1.0
    #: Seconds that all calls of replay took.
    spent = 0.0

    @classmethod
    def replay(cls, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        began = time.perf_counter()
        limit, seconds = abs(math.log10(config["lr"]) + 2.0), cls.stretch * epoch_seconds(config["share"])
        played = [ReplayedIteration({"loss": limit + 1.0 / i}, seconds) for i in iterations]
        cls.spent += time.perf_counter() - began
        return played


class SlowCurve(Curve):
    """The same with epochs of minutes."""

    stretch = 8.0


def epoch_seconds(share: float) -> float:
    """Seconds of an epoch that such a share of trials falls below, interpolated between the logarithms."""
    for (low, short), (high, long) in pairwise(SECONDS):
        if share <= high:
            return float(short * (long / short) ** ((share - low) / (high - low)))
    return SECONDS[-1][1]


def sweep(trainable: type[Curve], seed: int) -> dict[str, float]:
    """Rehearses a sweep; returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, before = Path(folder) / "run", trainable.spent
        began, used = time.perf_counter(), time.process_time()
        with fluid.FluidExecutor(backend="simulated", devices=DEVICES, run_dir=run_dir, verbose=0) as executor:
            fluid.run(
                trainable,
                {"lr": loguniform(1e-4, 1.0), "share": uniform(0.0, 1.0)},
                metric="loss",
                samples=TRIALS,
                budget=EPOCHS,
                seed=seed,
                executor=executor,
            )
            virtual = executor._session.clock.now()
        seconds, used = time.perf_counter() - began, time.process_time() - used
        results = sum(1 for _ in (run_dir / "results.jsonl").open("rb"))
    replayed = trainable.spent - before
    return {
        "results": results,
        "virtual_seconds": virtual,
        "seconds": seconds,
        "cpu_seconds": used,
        "replay_seconds": replayed,
        "microseconds_per_result": 1e6 * (seconds - replayed) / results,
        "cpu_microseconds_per_result": 1e6 * (used - replayed) / results,
        "times_wall_speed": virtual / seconds,
    }


def native(repeats: int) -> dict[str, Any]:
    """The native sweeps; a first one loads what is imported late, and is not counted."""
    sweep(Curve, 0)
    found: dict[str, Any] = {}
    for name, trainable in (("lcbench epochs", Curve), ("epochs of minutes", SlowCurve)):
        ran = [sweep(trainable, seed) for seed in range(repeats)]
        found[name] = {key: statistics.median(each[key] for each in ran) for key in ran[0]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["native"], default="native")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    asked = parser.parse_args()
    figures = native(asked.repeats)
    goals = {
        "microseconds_per_result": MOST_MICROSECONDS,
        "times_wall_speed": LEAST_SPEED,
        "times_wall_speed_of_minutes": LEAST_SPEED_OF_MINUTES,
    }
    content = {
        **about(),
        "trials": TRIALS,
        "epochs": EPOCHS,
        "devices": DEVICES,
        "medians_of": asked.repeats,
        "goals": goals,
        asked.part: figures,
    }
    print(json.dumps(content, indent=2))
    if asked.out is not None:
        asked.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
