"""Measures what Fluid and Ray Tune take of the driver's time, on one machine, in one run.

    python benchmarks/tune_driver.py [--part decision,loggers,trial] [--runs 3] [--json FILE]

* "decision": results per second, first to last, where the scheduler must be asked after each iteration of 0 ms: Fluid,
  with two lanes, against Tune's controller over a manager that answers at once, with Tune's loggers and without any.
* "loggers": CPU time of the driver per result, with Tune's loggers in a process of their own and in the driver.
* "trial": CPU time of the driver per trial of one empty iteration, under a profiler, which adds to it: of Fluid's code
  and of Ray's in the main thread, each with what it calls of neither, and of the engine's thread, which is Fluid's.
  "analysis" is what follows the last result: Tune's reading of all logs.

Each figure is of a process of its own; the median of the runs counts. CPU time does not depend on what else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import machine, run_apart

import fluid

DEVICES = 2
#: Trials and iterations of each.
DECISIONS = (16, 200)
STREAM = (8, 250)
EMPTY = (256, 1)
_NO_LOGGERS = {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}


# -- one measurement, in a process of its own ----------------------------------------------------------------


def sweep(system: str, scheduler: Any, size: tuple[int, int], is_profiled: bool) -> dict[str, float]:
    """Runs a sweep of empty iterations and returns its figures."""
    import ray
    from tune_driver_workload import Arrivals, AtOnce, Empty

    from fluid import FluidExecutor, tune

    trials, iterations = size
    arrivals = Arrivals()
    ray.init(num_cpus=DEVICES, logging_level="ERROR", include_dashboard=False, log_to_driver=False)
    with profiled(is_profiled) as taken:
        executor = FluidExecutor(backend="local", devices=DEVICES, verbose=0) if system == "fluid" else None
        analysis = tune.run(
            Empty,
            config={"x": tune.grid_search(list(range(trials)))},
            stop={"training_iteration": iterations},
            scheduler=scheduler if system == "fluid" else AtOnce(scheduler),
            callbacks=[arrivals],
            verbose=0,
            executor=executor,
        )
        ended = time.process_time()
    assert len(analysis.trials) == trials and arrivals.results == trials * iterations, arrivals.results
    return {
        "results": arrivals.results,
        "seconds": arrivals.last - arrivals.first,
        "cpu": arrivals.last_cpu - arrivals.first_cpu,
        "analysis": ended - arrivals.last_cpu,
        **taken,
    }


@contextlib.contextmanager
def profiled(is_wanted: bool) -> Iterator[dict[str, float]]:
    """Splits the CPU time of the main and the engine's thread by whose code runs; measuring takes a part of it."""
    figures: dict[str, float] = {}
    if not is_wanted:
        yield figures
        return
    main, pump = cProfile.Profile(time.thread_time), cProfile.Profile(time.thread_time)

    def begin(*_: Any) -> None:
        sys.setprofile(None)
        if threading.current_thread().name == "fluid-pump":
            pump.enable()

    threading.setprofile(begin)
    main.enable()
    try:
        yield figures
    finally:
        main.disable()
        threading.setprofile(None)
        figures |= split(main)
        figures["cpu_engine"] = sum(row[2] for row in pstats.Stats(pump).stats.values())  # type: ignore[attr-defined]


def split(profile: cProfile.Profile) -> dict[str, float]:
    """Splits a profile by whose code runs, of Fluid and Ray; code of others belongs to its callers."""
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = {function: owner(function[0]) for function in stats}
    #: The share of each owner in the calls of a function; found by going up from the callees to their callers.
    shares: dict[Any, Counter[str]] = {f: Counter({own[f]: 1.0}) if own[f] else Counter() for f in stats}
    for _ in range(60):  # Deeper than calls of others' code among themselves are.
        for function, (_, _, _, _, callers) in stats.items():
            if own[function] or not callers:
                continue
            weights = {caller: edge[2] + edge[3] for caller, edge in callers.items() if caller in shares}
            total = sum(weights.values()) or 1.0
            mixed: Counter[str] = Counter()
            for caller, weight in weights.items():
                for name, part in shares[caller].items():
                    mixed[name] += part * weight / total
            shares[function] = mixed
    seconds: Counter[str] = Counter()
    for function, (_, _, self_seconds, _, _) in stats.items():
        for name, part in shares[function].items():
            seconds[f"cpu_{name}"] += part * self_seconds
    return dict(seconds)


def owner(path: str) -> str:
    """Whose code a file is; empty for neither Fluid's nor Ray's."""
    folders = Path(path).parts
    if "site-packages" in folders:
        return "ray" if folders[folders.index("site-packages") + 1 :][:1] == ("ray",) else ""
    return "fluid" if Path(path).is_relative_to(Path(fluid.__file__).parent) else ""


def one(part: str, system: str) -> dict[str, float]:
    """Measures one figure of a part."""
    from ray.tune.schedulers import FIFOScheduler
    from tune_driver_workload import AsksEachTime

    size = {"decision": DECISIONS, "loggers": STREAM, "trial": EMPTY}[part]
    return sweep(system, AsksEachTime() if part == "decision" else FIFOScheduler(), size, part == "trial")


# -- the benchmark -------------------------------------------------------------------------------------------


def measure(part: str, cells: dict[str, tuple[str, dict[str, str]]], options: argparse.Namespace) -> dict[str, Any]:
    """Measures the cells of a part in turn, so that a slow spell of the machine affects all; returns medians."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in cells}
    for _ in range(options.runs):
        for name, (system, environment) in cells.items():
            apart = run_apart(
                __file__,
                ["--one", system, "--part", part],
                what=f"{part}: {name}",
                timeout=options.timeout,
                environment=environment,
            )
            taken[name] += [apart.figures] if apart else []
    return {
        name: {key: statistics.median(figures.get(key, 0.0) for figures in runs) for key in runs[0]}
        for name, runs in taken.items()
        if runs
    }


def decision(options: argparse.Namespace) -> dict[str, Any]:
    """Prints results per second where each needs a decision."""
    figures = {}
    for loggers, environment in (("Tune's loggers", {}), ("no loggers", _NO_LOGGERS)):
        cells = {"fluid": ("fluid", environment), "answers at once": ("at_once", environment)}
        medians = measure("decision", cells, options)
        rates = {name: one["results"] / one["seconds"] for name, one in medians.items()}
        figures[loggers] = rates
        if len(rates) == len(cells):
            ratio = rates["fluid"] / rates["answers at once"]
            text = ", ".join(f"{name} {rate:.0f}/s" for name, rate in rates.items())
            print(f"decision, {loggers}: {text}; {ratio:.2f}x", flush=True)
    return figures


def loggers(options: argparse.Namespace) -> dict[str, Any]:
    """Prints the driver's CPU time per result with the loggers in its process and apart."""
    cells = {"apart": ("fluid", {}), "in the driver": ("fluid", {"FLUID_TUNE_LOGGERS": "driver"})}
    medians = measure("loggers", {**cells, "none": ("fluid", _NO_LOGGERS)}, options)
    figures = {name: 1e3 * one["cpu"] / one["results"] for name, one in medians.items()}
    text = ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in figures.items())
    print(f"loggers: ms of the driver's CPU time per result: {text}", flush=True)
    return figures


def trial(options: argparse.Namespace) -> dict[str, Any]:
    """Prints the driver's CPU time per empty trial, by whose code runs."""
    medians = measure("trial", {"fluid": ("fluid", {})}, options).get("fluid", {})
    names = {"cpu_fluid": "Fluid", "cpu_engine": "Fluid's engine", "cpu_ray": "Tune", "analysis": "of Tune: analysis"}
    figures = {shown: 1e3 * medians.get(name, 0.0) / EMPTY[0] for name, shown in names.items()}
    text = ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in figures.items())
    print(f"trial: ms of the driver's CPU time per trial of one empty iteration: {text}", flush=True)
    return figures


PARTS = {"decision": decision, "loggers": loggers, "trial": trial}


def main() -> None:
    """Runs the benchmark and prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", default=",".join(PARTS), help="which parts, comma-separated")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the median counts (default 3)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--timeout", type=float, default=300.0, help="most seconds of one process (default 300)")
    parser.add_argument("--one", choices=("fluid", "at_once"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            figures = one(options.part, options.one)
        print(json.dumps(figures))
        sys.stdout.flush()
        os._exit(0)  # Ray's shutdown is not measured.
    here = machine()
    print(f"{here['cores']} cores, Python {here['python']}, Ray {here['ray']}, {time.strftime('%Y-%m-%d')}")
    taken: dict[str, Any] = {"machine": here, "date": time.strftime("%Y-%m-%d"), "runs": options.runs}
    taken["command"] = " ".join(["python", "benchmarks/tune_driver.py", *sys.argv[1:]])
    for part in options.part.split(","):
        taken[part] = PARTS[part](options)
    if options.json:
        Path(options.json).write_text(json.dumps(taken, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
