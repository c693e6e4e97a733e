"""Ten real sweeps with a deadline, on eight thin devices of this machine: how many meet it, and what they cost.

    python benchmarks/deadlines_real.py [--sweeps 10] [--seconds 10] [--json benchmarks/results/deadlines_real.json]

The trials sleep, so that eight devices are as fast as eight, however many cores there are; seconds per iteration differ
between trials by a factor whose logarithm has standard deviation 0.5. Half of the sweeps run all trials to the end, the
others are successive halving. Each sweep runs twice: on eight devices throughout, and with a deadline of 1.3 to 3
times the seconds that this took. What fewer devices throughout would take is a list schedule of the same trials, in the
order of their start, times the ratio of measured to scheduled seconds on eight. Costs are device-seconds, from the
journal, until the last trial has ended.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fluid
from fluid import Device, FluidExecutor
from fluid.backends.local import LocalBackend
from fluid.search import uniform

DEVICES, SIGMA, RUNGS = 8, 0.5, (1, 3, 9, 27)


def train(config: dict[str, Any], state: int | None = None) -> Iterator[tuple[dict[str, float], int]]:
    """Sleeps; its loss says only whether successive halving lets it go on."""
    done = state or 0
    while True:
        time.sleep(config["seconds"])
        done += 1
        yield {"loss": config["loss"]}, done


def configs(seed: int, trials: int, seconds: float) -> list[dict[str, float]]:
    """Trials that take that many seconds of work in all on eight devices, if each ran as far as its sweep lets it."""
    rng = np.random.default_rng(seed)
    return [
        {"seconds": float(seconds * each), "loss": float(loss)}
        for each, loss in zip(rng.lognormal(0.0, SIGMA, trials), rng.random(trials), strict=True)
    ]


def scheduled(trials: Sequence[dict[str, float]], algorithm: str, budget: int, devices: int) -> float:
    """Seconds of a list schedule on so many devices; of successive halving, one rung after another."""
    if algorithm == "random":
        return _makespan([each["seconds"] * budget for each in trials], devices)
    total, left, done = 0.0, list(trials), 0
    for rung in (rung for rung in RUNGS if rung <= budget):
        total += _makespan([each["seconds"] * (rung - done) for each in left], devices)
        left, done = sorted(left, key=lambda each: each["loss"])[: max(1, len(left) // 3)], rung
    return total


def _makespan(seconds: Sequence[float], devices: int) -> float:
    free = [0.0] * devices
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def run(trials: Sequence[dict[str, float]], algorithm: str, budget: int, deadline: float | None) -> dict[str, Any]:
    """Runs a sweep for real; returns its seconds, whether all trials ended, and the device-seconds held."""
    with tempfile.TemporaryDirectory() as folder:
        backend = LocalBackend([Device(index, kind="cpu") for index in range(DEVICES)], preload=[])
        with FluidExecutor(backend, packing="off", run_dir=Path(folder, "run"), verbose=0) as executor:
            while not executor.devices:
                time.sleep(0.01)
            began = time.monotonic()
            result = fluid.run(
                train,
                {"seconds": uniform(0.0, 1e3), "loss": uniform(0.0, 1.0)},
                metric="loss",
                mode="min",
                algorithm=algorithm,
                samples=len(trials),
                budget=budget,
                points=list(trials),
                deadline=deadline,
            )
            seconds = time.monotonic() - began
        held = device_seconds(Path(folder, "run", "journal.jsonl"))
    return {"seconds": seconds, "is_whole": not result.notes, "device_s": held}


def device_seconds(journal: Path) -> float:
    """Device-seconds from the first submission to the last end of a trial."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    begin = next(line["at"] for line in lines if line["what"] == "GroupSubmitted")
    end = max(line["at"] for line in lines if line["what"] == "ReportEnd")
    since, total = dict[int, float](), 0.0
    for line in lines:
        if line["what"] == "DeviceAdded":
            since[line["device"]["index"]] = max(begin, line["at"])
        elif line["what"] == "NoteDeviceLost":
            total += max(0.0, min(end, line["at"]) - since.pop(line["device_id"]))
    return total + sum(max(0.0, end - at) for at in since.values())


def main() -> None:
    """Runs all sweeps, and prints and writes what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=10, help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each, on eight devices (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    rows = []
    for number, factor in enumerate(np.linspace(1.3, 3.0, options.sweeps)):
        algorithm, budget, count = (("random", 10, 64), ("sha", 27, 54))[number % 2]
        unit = configs(number, count, 1.0)
        unit_s = scheduled(unit, algorithm, budget, DEVICES)
        trials = configs(number, count, options.seconds / unit_s)
        fixed = run(trials, algorithm, budget, None)
        overhead = fixed["seconds"] / scheduled(trials, algorithm, budget, DEVICES)
        deadline = float(factor) * fixed["seconds"]
        sized = run(trials, algorithm, budget, deadline)
        fitting = {
            devices: devices * overhead * scheduled(trials, algorithm, budget, devices)
            for devices in range(1, DEVICES + 1)
            if overhead * scheduled(trials, algorithm, budget, devices) <= deadline
        }
        cheapest = min(fitting, key=lambda devices: fitting[devices]) if fitting else DEVICES
        row = {
            "algorithm": algorithm,
            "deadline": round(float(factor), 2),
            "fixed_8_s": round(fixed["seconds"], 2),
            "sized_s": round(sized["seconds"], 2),
            "met": sized["is_whole"] and sized["seconds"] <= deadline,
            "device_s_fixed_8": round(DEVICES * fixed["seconds"], 1),
            "device_s": round(sized["device_s"], 1),
            "cheapest_fixed": cheapest,
            "cost_over_fixed_8": round(sized["device_s"] / (DEVICES * fixed["seconds"]), 3),
            "cost_over_cheapest_fixed": round(sized["device_s"] / fitting.get(cheapest, math.inf), 3),
        }
        rows.append(row)
        print(row, flush=True)
    summary = {
        "met": sum(row["met"] for row in rows),
        "sweeps": len(rows),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    for kind in ("random", "sha"):
        some = [row for row in rows if row["algorithm"] == kind]
        for name in ("cost_over_fixed_8", "cost_over_cheapest_fixed"):
            if some:
                summary[f"{kind}_{name}"] = round(float(np.mean([row[name] for row in some])), 3)
    print(summary)
    if options.json is not None:
        options.json.write_text(json.dumps({"summary": summary, "sweeps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
