"""Measures rows of Ray Tune's own scalability benchmarks that fit one machine, with and without Fluid, in one run.

    python benchmarks/tune_scalability.py [--part asha,...] [--systems fluid,...] [--runs 1] [--json FILE]

Trials sleep, so that more slots than cores can be busy:

* "trials": 800 trials of one iteration of 1 s on 16 slots (Tune's "bookkeeping overhead" row, smaller);
* "checkpoints": 16 trials of 30 iterations of 1 s on 16 slots, with a checkpoint of 10 MB every 5 results;
* "asha": 64 trials of up to 20 iterations of 50 ms under ASHA on 8 slots.

"fluid" is the call of ``tune.run`` with an executor, "fluid_lane" with one whose trials share processes
(``isolation="lane"``), "ray_reuse_actors" without one and with ``reuse_actors=True``, and
"ray_default" Ray Tune as it is. "run" is the call of ``tune.run`` with the start of the executor, after ``ray.init``.
The minimum is the seconds that trials slept, divided by the number of slots; for ASHA it is that of the same run. Each
measurement is a process of its own, and its line is printed when it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from measuring import machine, run_apart

#: Fluid's ``isolation``, by system.
ISOLATION = {"fluid": "trial", "fluid_lane": "lane"}
SYSTEMS = (*ISOLATION, "ray_reuse_actors", "ray_default")


class Row(NamedTuple):
    """A row.

    Attributes:
        title: for people.
        slots: trials that run at once.
        trials: number of trials.
        iterations: of a trial, at most.
        sleep_s: seconds of an iteration.
        options: makes further options of ``tune.run``.
        systems: that end within minutes.
        goal: the goal for Fluid, for people.
    """

    title: str
    slots: int
    trials: int
    iterations: int
    sleep_s: float
    options: Callable[[], dict[str, Any]] = dict
    systems: tuple[str, ...] = SYSTEMS
    goal: str = ""


def _checkpoints() -> dict[str, Any]:
    from ray import tune

    return {"checkpoint_config": tune.CheckpointConfig(checkpoint_frequency=5), "size": 10_000_000}


def _asha() -> dict[str, Any]:
    from ray.tune.schedulers import ASHAScheduler

    scheduler = ASHAScheduler(
        time_attr="training_iteration", metric="score", mode="max", max_t=20, grace_period=1, reduction_factor=3
    )
    return {"scheduler": scheduler}


ROWS = {
    "trials": Row(
        "800 trials of 1 s on 16 slots", 16, 800, 1, 1.0, systems=SYSTEMS[:3], goal="at most 1.18x of the minimum"
    ),
    "checkpoints": Row(
        "16 trials of 30 x 1 s, checkpoints of 10 MB every 5 results",
        slots=16,
        trials=16,
        iterations=30,
        sleep_s=1.0,
        options=_checkpoints,
        goal="at most 1.13x of the minimum",
    ),
    "asha": Row("64 trials of 50 ms iterations under ASHA on 8 slots", 8, 64, 20, 0.05, _asha, goal="at most 6 s"),
}


# -- one measurement, in a process of its own ----------------------------------------------------------------


def sweep(system: str, row: Row) -> dict[str, float]:
    """Runs a row and returns its figures."""
    import ray
    from tune_scalability_workload import Count, Sleeper

    from fluid import FluidExecutor, tune

    options = row.options()
    count = Count()
    config = {
        # The order is shuffled, so that the best trials are neither first nor last.
        "x": tune.grid_search([1.0 + (7 * i) % row.trials for i in range(row.trials)]),
        "sleep_s": row.sleep_s,
        "size": options.pop("size", 0),
    }
    ray.init(num_cpus=row.slots, logging_level="ERROR", include_dashboard=False, log_to_driver=False)
    begun = time.perf_counter()
    executor = None
    if system in ISOLATION:
        executor = FluidExecutor(backend="local", devices=row.slots, verbose=0, isolation=ISOLATION[system])
    analysis = tune.run(
        Sleeper,
        config=config,
        stop={"training_iteration": row.iterations},
        resources_per_trial={"cpu": 1},
        reuse_actors=system == "ray_reuse_actors",
        callbacks=[count],
        verbose=0,
        executor=executor,
        **options,
    )
    seconds = time.perf_counter() - begun
    assert len(analysis.trials) == row.trials, len(analysis.trials)
    first = count.first - begun
    return {
        "run": seconds,
        "first": first,
        "results": count.results,
        "minimum": count.results * row.sleep_s / row.slots,
    }


# -- the benchmark -------------------------------------------------------------------------------------------


def main() -> None:
    """Runs the benchmark and prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", default=",".join(ROWS), help="which rows, comma-separated")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which systems, comma-separated")
    parser.add_argument("--runs", type=int, default=1, help="runs of each; the median counts (default 1)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--timeout", type=float, default=600.0, help="most seconds of one process (default 600)")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            figures = sweep(options.one, ROWS[options.part])
        print(json.dumps(figures))
        sys.stdout.flush()
        os._exit(0)  # Ray's shutdown is not measured.
    report(options)


def report(options: argparse.Namespace) -> None:
    """Measures the systems in turn, so that a slow spell of the machine affects all, and prints each as it ends."""
    here = machine()
    figures: dict[str, Any] = {"machine": here, "date": time.strftime("%Y-%m-%d"), "runs": options.runs}
    figures["command"] = " ".join(["python", "benchmarks/tune_scalability.py", *sys.argv[1:]])
    print(f"{here['cores']} cores, Python {here['python']}, Ray {here['ray']}, {figures['date']}", flush=True)
    for part in options.part.split(","):
        row = ROWS[part]
        print(f"{row.title}; Fluid's goal: {row.goal}", flush=True)
        taken: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.runs):
            for system in (system for system in options.systems.split(",") if system in row.systems):
                arguments = ["--one", system, "--part", part]
                apart = run_apart(__file__, arguments, what=f"{system} on {part}", timeout=options.timeout)
                if apart is not None:
                    taken.setdefault(system, []).append(apart.figures)
                    print(line(system, apart.figures), flush=True)
        medians = {
            system: {name: statistics.median(one[name] for one in runs) for name in runs[0]}
            for system, runs in taken.items()
        }
        if options.runs > 1:
            for system, median in medians.items():
                print(f"median {line(system, median)}", flush=True)
        figures[part] = {"title": row.title, "slots": row.slots, "medians": medians, "all": taken}
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def line(system: str, one: dict[str, float]) -> str:
    """A measurement as a line."""
    ratio = one["run"] / one["minimum"]
    return (
        f"  {system:17} {one['run']:7.2f} s, {ratio:5.2f}x of the minimum of {one['minimum']:.2f} s; "
        f"{one['results']:.0f} results, the first after {one['first']:.2f} s"
    )


if __name__ == "__main__":
    main()
