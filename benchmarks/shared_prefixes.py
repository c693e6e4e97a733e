"""Measures a grid of 48 schedules whose common first iterations are run once, against each trial by itself.

    python benchmarks/shared_prefixes.py [--milliseconds 20] [--rounds 3] [--json FILE]

The trials have one warm-up of 10 iterations, then 3 x 4 x 4 learning rates from iterations 10, 20 and 30 on, of 40:
1,920 iterations, of which 640 are distinct. An iteration sleeps, so that the cores are no limit; two devices run one
trial each at a time. Each round runs the grid both ways in one executor each, the one that shares first in every other
round. With ``--flat``, the first values differ in three ways, so that there is less to share.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import machine

import fluid
from fluid.search import schedule

_BUDGET = 40


def train(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    """Iterations of the same length, whose metrics tell of all that came before; each is counted in a file."""
    done, place = (0, random.random()) if state is None else state
    while True:
        time.sleep(config["seconds"])
        place += config["lr"].at(done) * random.random()
        done += 1
        file = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, b".")
        os.close(file)
        yield {"place": place}, (done, place)


def run_grid(options: argparse.Namespace, *, shares: bool) -> dict[str, float]:
    """Runs the grid; returns its iterations and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        first = [0.01 + each / 1000 for each in range(3)] if options.flat else 0.01
        rates = {0: first, 10: 0.1 if options.flat else [0.1, 0.2, 0.3], 20: [0.1, 0.2, 0.3, 0.4], 30: [1, 2, 3, 4]}
        begun = time.perf_counter()
        result = fluid.run(
            train,
            {"lr": schedule(rates), "seconds": options.milliseconds / 1000, "log": log},
            metric="place",
            mode="min",
            algorithm="grid",
            budget=_BUDGET,
            devices=2,
            run_dir=Path(folder) / "run",
            output=fluid.Output(verbose=0),
            sharing=fluid.Sharing(max_packing=1),
            trial_options={"prefix": shares},
        )
        seconds = time.perf_counter() - begun
        assert len(result.trials) == 48 and not result.failures
        assert all(trial.iteration == _BUDGET for trial in result.trials)
        return {"iterations": os.path.getsize(log), "seconds": seconds}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of an iteration")
    parser.add_argument("--rounds", type=int, default=3, help="of both ways")
    parser.add_argument("--flat", action="store_true", help="the first values differ, three ways")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    rounds = []
    for number in range(options.rounds):
        pair = {shares: run_grid(options, shares=shares) for shares in (number % 2 == 0, number % 2 == 1)}
        shared, unshared = pair[True], pair[False]
        ratios = {name: shared[name] / unshared[name] for name in shared}
        rounds.append({"shared": shared, "unshared": unshared, "ratios": ratios})
        print(
            f"shared {shared['iterations']} iterations in {shared['seconds']:.2f} s, "
            f"unshared {unshared['iterations']} in {unshared['seconds']:.2f} s: "
            f"{ratios['iterations']:.3f} of the iterations, {ratios['seconds']:.3f} of the time",
            flush=True,
        )
    median = statistics.median(each["ratios"]["seconds"] for each in rounds)
    print(f"median: {median:.3f} of the time")
    if options.json is not None:
        facts = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "milliseconds": options.milliseconds}
        options.json.write_text(json.dumps({**facts, "rounds": rounds, "median_of_seconds": median}, indent=1) + "\n")


if __name__ == "__main__":
    main()
