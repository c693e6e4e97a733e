"""Measures sweeps of Ray Tune with and without Fluid, on one machine, in one run.

    python benchmarks/ray_tune.py [--runs 3] [--systems fluid,...] [--workloads busy,...] [--json FILE]

Every system gets the same call of ``tune.run`` on 2 CPU devices: "fluid" with an executor, "fluid_lane" with one whose
trials share processes (``isolation="lane"``), "ray_default" without, and "ray_reuse_actors" with ``reuse_actors=True``,
for which the trainables implement ``reset_config``. Each measurement is
a process of its own; "run" is the call of ``tune.run``, including the start of Fluid's executor, and "total" is the
whole process, including the start of Ray. The ideal is the CPU time of the trials' own work divided by the number of
devices, measured in the run itself; "stream" shows the cost of a result once everything runs. Needs the environment of
``make sweep``: ``pip install '.[all,examples]'``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from measuring import machine, run_apart

DEVICES = 2
#: Fluid's ``isolation``, by system.
ISOLATION = {"fluid": "trial", "fluid_lane": "lane"}
SYSTEMS = (*ISOLATION, "ray_default", "ray_reuse_actors")
WORKLOADS = ("busy", "empty", "stream", "hyperband", "pbt", "digits")


class Measured(NamedTuple):
    """One process.

    Attributes:
        run: seconds of the sweep.
        total: seconds of the process.
        ideal: seconds of the trials' work divided by the number of devices.
        results: how many results there were.
        best: the best score.
    """

    run: float
    total: float
    ideal: float
    results: int
    best: float

    @property
    def overhead(self) -> float:
        """Milliseconds per result above the ideal."""
        return 1e3 * (self.run - self.ideal) / self.results


# -- one measurement, in a process of its own ----------------------------------------------------------------


def sweep(system: str, name: str) -> dict[str, float]:
    """Runs a sweep and returns its figures, scaled to all trials where only some were run."""
    import ray
    from ray_tune_workload import WORKLOADS, Tally

    from fluid import FluidExecutor, tune

    workload = WORKLOADS[name]
    trials = (system == "ray_default" and workload.fewer) or workload.trials
    options = workload.options(trials)
    trainable = workload.trainable()
    tally = Tally()
    ray.init(num_cpus=DEVICES, logging_level="ERROR", include_dashboard=False, log_to_driver=False)
    begun = time.perf_counter()
    executor = None
    if system in ISOLATION:
        executor = FluidExecutor(backend="local", devices=DEVICES, verbose=0, isolation=ISOLATION[system])
    analysis = tune.run(
        trainable,
        **options,
        resources_per_trial={"cpu": 1},
        reuse_actors=system == "ray_reuse_actors",
        callbacks=[tally],
        verbose=0,
        executor=executor,
    )
    seconds = time.perf_counter() - begun
    assert len(analysis.trials) == trials, len(analysis.trials)
    scale = workload.trials / trials
    return {
        "run": seconds * scale,
        "further": seconds * (scale - 1.0),
        "ideal": tally.work / DEVICES * scale,
        "results": round(tally.results * scale),
        "best": tally.best,
    }


# -- the benchmark -------------------------------------------------------------------------------------------


def measure(system: str, workload: str, timeout: float) -> Measured | None:
    """Measures in a process of its own; returns ``None`` if it failed or did not end."""
    arguments = ["--one", system, "--workload", workload]
    apart = run_apart(__file__, arguments, what=f"{system} on {workload}", timeout=timeout)
    if apart is None:
        return None
    return Measured(total=apart.seconds + apart.figures.pop("further"), **apart.figures)


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the median counts (default 3)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which systems, comma-separated")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which workloads, comma-separated")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--timeout", type=float, default=600.0, help="most seconds of one process (default 600)")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--workload", choices=WORKLOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            figures = sweep(options.one, options.workload)
        print(json.dumps(figures))
        return
    report(options)


def report(options: argparse.Namespace) -> None:
    """Measures the systems in turn, so that a slow spell of the machine affects all, and prints the ratios."""
    from ray_tune_workload import WORKLOADS as workloads
    from rich.console import Console

    console = Console()
    here = machine()
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": here, "devices": DEVICES}
    figures["runs"] = options.runs
    console.print("ms/result: milliseconds per result above the ideal; run/Fluid, total/Fluid: ratios to Fluid")
    console.print(f"{here['cores']} cores, Python {here['python']}, Ray {here['ray']}, {figures['date']}")
    for name in options.workloads.split(","):
        taken: dict[str, list[Measured]] = {system: [] for system in options.systems.split(",")}
        for _ in range(options.runs):
            for system, measured in taken.items():
                one = measure(system, name, options.timeout)
                measured += [one] if one else []
        medians = {system: median(measured) for system, measured in taken.items() if measured}
        console.print(table(workloads[name], medians))
        if workloads[name].fewer and "ray_default" in medians:
            console.print(f"ray_default: measured with {workloads[name].fewer} trials, and scaled to all.")
        figures[name] = {
            "title": workloads[name].title,
            "fewer_trials_of_ray_default": workloads[name].fewer,
            "medians": {system: {**m._asdict(), "overhead_ms": m.overhead} for system, m in medians.items()},
            "all": {system: [one._asdict() for one in measured] for system, measured in taken.items()},
        }
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def median(measured: list[Measured]) -> Measured:
    """Returns the median of each figure."""
    run, total, ideal, results, best = (statistics.median(column) for column in zip(*measured, strict=True))
    return Measured(run, total, ideal, round(results), best)


def table(workload: Any, medians: dict[str, Measured]) -> Any:
    """Prints the figures of a workload, and their ratios to Fluid's; "ms/result" is the time above the ideal."""
    from rich.table import Table

    base = medians.get("fluid")
    drawn = Table(title=workload.title, title_justify="left")
    drawn.add_column("system")
    for column in ("run s", "total s", "ideal s", "results", "ms/result", "best", "run/Fluid", "total/Fluid"):
        drawn.add_column(column, justify="right")
    for system, one in medians.items():
        ratios = [f"{one.run / base.run:.2f}x", f"{one.total / base.total:.2f}x"] if base else ["", ""]
        seconds = [f"{value:.2f}" for value in (one.run, one.total, one.ideal)]
        drawn.add_row(system, *seconds, f"{one.results}", f"{one.overhead:.1f}", f"{one.best:.4g}", *ratios)
    return drawn


if __name__ == "__main__":
    main()
