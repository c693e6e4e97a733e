"""Sweeps with deadlines on simulated devices: whether the sizer meets them, and what it pays beside fixed allocations.

    python benchmarks/deadlines.py [--quick] [--out FILE]

Each sweep has trials of up to 27 iterations of 60 s in the median, whose paces vary with a sigma of 0.5; nothing is
known of them before they run, and a trial takes one device. Its deadline is a factor of the time that the same sweep
takes on all 32 devices, so that it can be met. Devices that are asked for come after 60 s; each is paid for from its
coming until it is given back. The sweep is run once as the sizer decides, and on fixed numbers of devices from the
beginning to the end. The reference is the cheapest fixed number that meets the deadlines of the same sweeps as often as
the sizer does: a search with hindsight, as the sizer cannot know it. The device-hours in which trials ran are the
least that any way to hold devices pays, so that no cost ratio can be below theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from measuring import about

from fluid import Cluster
from fluid.forecasting.scenario import Runtimes, Scenario, Workload
from fluid.planners.planner import Planner
from fluid.planners.portfolio import make_planner
from fluid.simulation.sized import HeldResult, Terms, simulate_fixed, simulate_sized
from fluid.sizing.goals import Goals

MOST = 32
TERMS = Terms(most=MOST, provision_s=60.0, profiled=False, draws=30)
SHAPES = {
    "successive_halving": Workload("successive_halving", trials=81, max_iterations=27),
    "hyperband": Workload("hyperband", max_iterations=27),
    "asha": Workload("asha", trials=81, max_iterations=27, concurrency=MOST),
    "random": Workload("random", trials=48, max_iterations=27),
}
#: Deadlines, as factors of the time on all devices.
FACTORS = (1.2, 1.35, 1.5, 2.0, 3.0)
COUNTS = (*range(1, 17), 18, 20, 22, 24, 28, 32)


@dataclass(frozen=True)
class Run:
    """A sweep on some devices.

    Attributes:
        seconds: to its end.
        hours: device-hours paid for.
        work_hours: device-hours in which a trial ran.
    """

    seconds: float
    hours: float
    work_hours: float


def scenario(shape: str, seed: int) -> Scenario:
    """One sweep."""
    runtimes = Runtimes("constant", 60.0)
    return Scenario(Cluster.of(1), SHAPES[shape], runtimes, c=1, d=1, runtime_error=0.5, seed=seed)


def planner() -> Planner:
    """The default planner, for trials of one device each."""
    return make_planner("portfolio", c=1, d=1)


def fixed(shape: str, seed: int, devices: int) -> Run:
    """A sweep on a fixed number of devices."""
    result = simulate_fixed(scenario(shape, seed), planner(), devices, TERMS)
    return _run_of(result)


def sized(shape: str, seed: int, deadline_s: float) -> Run:
    """A sweep on as many devices as the sizer decides."""
    result = simulate_sized(scenario(shape, seed), planner(), Goals(deadline=deadline_s), TERMS)
    return _run_of(result)


def _run_of(result: HeldResult) -> Run:
    simulation = result.simulation
    return Run(simulation.makespan, result.device_s / 3600.0, simulation.busy_device_seconds / 3600.0)


def measure(shapes: list[str], sweeps: int, counts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yields the figures of each shape and factor.

    Args:
        shapes: which.
        sweeps: of each shape and factor.
        counts: fixed numbers of devices, the last one all.
    """
    for shape in shapes:
        for index, factor in enumerate(FACTORS):
            seeds = range(index * sweeps, (index + 1) * sweeps)
            of_count = {devices: [fixed(shape, seed, devices) for seed in seeds] for devices in counts}
            deadlines = [factor * quickest.seconds for quickest in of_count[MOST]]
            runs = [sized(shape, seed, deadline_s) for seed, deadline_s in zip(seeds, deadlines, strict=True)]
            met = _met(runs, deadlines)
            hours, work = fmean(run.hours for run in runs), fmean(run.work_hours for run in runs)
            allocations = [
                (devices, _met(results, deadlines), fmean(run.hours for run in results))
                for devices, results in of_count.items()
            ]
            devices, often, paid = min((each for each in allocations if each[1] >= met), key=lambda each: each[2])
            yield {
                "shape": shape,
                "factor": factor,
                "sweeps": len(runs),
                "met": met,
                "device_hours": round(hours, 3),
                "work_device_hours": round(work, 3),
                "fixed_devices": devices,
                "fixed_met": often,
                "fixed_device_hours": round(paid, 3),
                "cost_ratio": round(hours / paid, 3),
                "least_cost_ratio": round(work / paid, 3),
            }


def _met(runs: list[Run], deadlines: list[float]) -> int:
    """How many of the sweeps ended by their deadline."""
    return sum(run.seconds <= deadline_s for run, deadline_s in zip(runs, deadlines, strict=True))


def main() -> int:
    """Runs the sweeps, prints a line for each shape and factor, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 sweeps in place of 200, and fewer fixed numbers")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="which, with commas (default: all)")
    parser.add_argument("--out", help="JSON file; figures of other shapes in it are kept")
    arguments = parser.parse_args()
    begun, load = time.perf_counter(), os.getloadavg()[0]
    shapes = arguments.shapes.split(",")
    if unknown := set(shapes) - set(SHAPES):
        parser.error(f"--shapes: {', '.join(unknown)} are none of {', '.join(SHAPES)}")
    cases = []
    for case in measure(shapes, *((3, (2, 4, 8, 16, MOST)) if arguments.quick else (10, COUNTS))):
        cases.append(case)
        print(
            f"{case['shape']:>18} x{case['factor']:.2f}: met {case['met']:2d} of "
            f"{case['sweeps']}, {case['device_hours']:6.2f} device-hours; {case['fixed_devices']:2d} fixed: met "
            f"{case['fixed_met']:2d}, {case['fixed_device_hours']:6.2f}; cost {case['cost_ratio']:.2f}x",
            flush=True,
        )
    if arguments.out and os.path.exists(arguments.out):
        with open(arguments.out, encoding="utf-8") as file:
            cases = [case for case in json.load(file)["cases"] if case["shape"] not in shapes] + cases
    figures = summary(cases)
    print(json.dumps(figures, indent=1))
    if arguments.out:
        facts = {
            **about(),
            "seconds": round(time.perf_counter() - begun),
            "load": round(load, 1),
        }
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(json.dumps({**facts, **figures, "cases": cases}, indent=1) + "\n")
    return 0


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """How often the deadline was met, and what was paid beside fixed numbers: in all, and in the mean of factors.

    The least that can be paid, beside these, is the work itself.
    """
    ratios, totals, least = {}, {}, {}
    for shape in dict.fromkeys(case["shape"] for case in cases):
        own = [case for case in cases if case["shape"] == shape]
        ratios[shape] = round(fmean(case["cost_ratio"] for case in own), 3)
        paid = sum(case["fixed_device_hours"] for case in own)
        totals[shape] = round(sum(case["device_hours"] for case in own) / paid, 3)
        least[shape] = round(sum(case["work_device_hours"] for case in own) / paid, 3)
    met, sweeps = sum(case["met"] for case in cases), sum(case["sweeps"] for case in cases)
    found = {"cost_ratio_in_all": totals, "least_cost_ratio_in_all": least, "cost_ratio_mean": ratios}
    return {"met": met, "sweeps": sweeps, **found}


if __name__ == "__main__":
    sys.exit(main())
