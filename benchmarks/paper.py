"""Measures the three sweeps of the paper under each algorithm, with and without Fluid: times, and use of the devices.

    python benchmarks/paper.py --data DIR                                  # all of it, and the figures
    python benchmarks/paper.py --data DIR --workloads cifar10 --algos asha,pbt --systems fluid,ray_default
    python benchmarks/paper.py --workloads '' --algos ''                   # tables and figures of the file
    python benchmarks/paper.py --workloads sleep --devices 8 --json sleep.json
    python benchmarks/paper.py --workloads arithmetic --json arithmetic.json

The last two have trials of known work (paper_lanes_workload.py): sleeping ones, of which a machine with two cores runs
as many as one with eight devices, and ones that keep a core busy. Of these a table says which part of a gain is
scheduling (paper_gains.py).

Systems: "fluid" is Ray Tune on Fluid, "fluid_unpacked" the same with ``packing="off"``, "fluid_fifo" with
``planner="fifo"`` as well: first come first served. "ray_default" is plain Ray Tune, and "ray_reuse_actors" is Ray Tune
with ``reuse_actors=True``. They get the same searcher, scheduler and seed, and so the same trials, unless the algorithm
depends on which trial is faster. Each measurement is a process of its own. A cell has:

* to target: seconds from the call of ``fit`` until the driver receives a result that reaches the target. The target is
  that of ``examples/tuning/scales.py`` if all systems reach it, else the worst of their best values, marked by a "*".
* makespan: seconds from the call of ``fit`` to the end of the last iteration, so start-up counts.
* busy: share of the devices' time, during the makespan, in which a trial trained.

Partial runs are added to the JSON file, where they replace those of the same seed, so the whole can be measured in
pieces. Needs the environment of
``make sweep``, and for BOHB ``pip install ConfigSpace hpbandster``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measuring import HERE, machine, run_apart

if (_EXAMPLES := str(HERE.parent / "examples")) not in sys.path:
    sys.path.append(_EXAMPLES)

#: Options of the executor, by system.
FLUID: dict[str, dict[str, Any]] = {
    "fluid": {},
    "fluid_unpacked": {"packing": "off"},
    "fluid_fifo": {"planner": "fifo", "packing": "off"},
}
SYSTEMS = (*FLUID, "ray_default", "ray_reuse_actors")
#: Names of the systems in tables.
NAMES = {"fluid": "Fluid", "fluid_unpacked": "unpacked", "fluid_fifo": "fifo", "ray_default": "Tune"}
NAMES["ray_reuse_actors"] = "reuse"
#: Workloads of trials that learn, which are measured by default, with these systems.
TRAINED, TRAINED_SYSTEMS = ("cifar10", "wlm", "dcgan"), ("fluid", "ray_default", "ray_reuse_actors")
#: The setting that all figures of a file share.
SETTING = ("scale", "devices", "samples")
#: Stretches of work with shorter gaps than this between them, in seconds, are drawn as one.
_GAP = 0.02

#: The measurement of one process: see :func:`sweep`. A list holds the runs of one cell.
Run = dict[str, Any]
Cells = dict[str, dict[str, dict[str, list[Run]]]]


def workloads() -> dict[str, Any]:
    """Returns the workloads by name."""
    import cifar10
    import dcgan
    import paper_lanes_workload
    import wlm

    return {module.WORKLOAD.name: module.WORKLOAD for module in (cifar10, wlm, dcgan)} | paper_lanes_workload.WORKLOADS


# -- one measurement, in a process of its own ----------------------------------------------------------------


def sweep(system: str, name: str, algorithm: str, options: argparse.Namespace) -> Run:
    """Runs a sweep and returns its figures.

    ``first`` is when the first iteration began, seconds from the call. ``curve`` has the seconds at which the driver
    received each new best value, and that value; ``busy_s`` has, for each device, the stretches in which a trial
    trained.
    """
    from tuning.running import Sweep

    from fluid import FluidExecutor
    from fluid.rehearsal.outcome import outcome_of

    workload = workloads()[name]
    scale = workload.scale(options.scale)
    reuse = system == "ray_reuse_actors"
    request = Sweep(
        workload, algorithm, scale, options.data, options.samples, options.seed, options.devices, reuse_actors=reuse
    )
    run_dir = Path.home() / "fluid"
    on_fluid = FLUID.get(system)

    def executor() -> FluidExecutor:
        return FluidExecutor("local", options.devices, verbose=0, run_dir=run_dir, **on_fluid)

    found = request.run(None if on_fluid is None else executor)
    busy = found.utilisation_since_call
    if on_fluid is not None:  # Which knows of packed trials and of wide ones.
        outcome = outcome_of(run_dir)
        busy = outcome.busy_share * outcome.makespan_s / found.last_end
    curve: list[tuple[float, float]] = []
    for one in found.iterations:
        if not curve or workload.is_better(one.value, curve[-1][1]):
            curve.append((round(one.reported, 3), one.value))
    return {
        "seconds": found.wall_time,
        "makespan": found.last_end,
        "first": min(one.begun for one in found.iterations),
        "busy": busy,
        "trials": found.trials,
        "iterations": len(found.iterations),
        "curve": curve,
        "busy_s": [joined(stretches) for stretches in found.timeline.busy_intervals.values()],
    }


def joined(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Joins stretches, given in order, whose gaps are too short to be drawn."""
    found: list[tuple[float, float]] = []
    for begin, end in stretches:
        if found and begin - found[-1][1] < _GAP:
            begin = found.pop()[0]
        found.append((round(begin, 3), round(end, 3)))
    return found


# -- all measurements ----------------------------------------------------------------------------------------


def measure(system: str, name: str, algorithm: str, seed: int, options: argparse.Namespace) -> Run | None:
    """Measures in a process of its own; returns ``None`` if it failed or did not end."""
    from models.data import cache_folder

    arguments = ["--one", system, "--workloads", name, "--algos", algorithm, "--data", options.data]
    arguments += ["--scale", options.scale, "--seed", f"{seed}", "--devices", f"{options.devices}"]
    arguments += ["--samples", f"{options.samples}"] if options.samples else []
    # Preparing the data, which is done once, is not part of a sweep.
    kept = {"XDG_CACHE_HOME": str(cache_folder().parent)}
    what = f"{system} on {name} with {algorithm}"
    apart = run_apart(__file__, arguments, what=what, timeout=options.timeout, environment=kept)
    when = time.strftime("%Y-%m-%d")
    return None if apart is None else {**apart.figures, "seed": seed, "total": apart.seconds, "date": when}


def measure_all(options: argparse.Namespace, file: Path, figures: dict[str, Any]) -> None:
    """Measures the systems in turn, so that a slow spell of the machine affects all; writes the file each time."""
    known = workloads()
    for name in options.workloads:
        options.data = known[name].data.locate(options.given)
        known[name].prepare(options.data)
        for algorithm in options.algos:
            cell = figures["cells"].setdefault(name, {}).setdefault(algorithm, {})
            for number, system in itertools.product(range(options.runs), options.systems):
                run = measure(system, name, algorithm, options.seed + number, options)
                kept = [other for other in cell.get(system, []) if run is None or other["seed"] != run["seed"]]
                cell[system] = kept + ([run] if run else [])
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(figures) + "\n", encoding="utf-8")
                said = f"{run['seconds']:.1f} s, {run['trials']} trials" if run else "nothing"
                print(f"{time.strftime('%H:%M:%S')}  {name}  {algorithm}  {system}: {said}", flush=True)


def read(file: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of a file; none if it does not exist.

    Raises:
        SystemExit: they were measured with another setting.
    """
    if not file.exists():
        return {"machine": machine(), "setting": dict(setting), "cells": {}}
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    here = machine()
    if (figures["setting"], figures["machine"]) != (setting, here):
        there = {**figures["setting"], **figures["machine"]}
        differ = [f"{key}={there[key]}" for key, value in {**setting, **here}.items() if there[key] != value]
        raise SystemExit(f"{file} was measured with {', '.join(differ)}; give another file with --json")
    return figures


# -- tables --------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """Medians over the runs of one workload under one algorithm, by system; a system without runs is missing.

    Attributes:
        target: the value that time to target refers to.
        common: whether that is the scale's target.
        to_target, makespan: seconds.
        busy: share.
    """

    target: float
    common: bool
    to_target: dict[str, float]
    makespan: dict[str, float]
    busy: dict[str, float]

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[Run]], target: float, mode: str) -> Cell:
        """Returns the cell of the runs of each system."""
        there = {system: found for system, found in runs.items() if found}
        sign = 1.0 if mode == "max" else -1.0
        worst = min((sign * run["curve"][-1][1] for found in there.values() for run in found), default=math.inf)
        reached = sign * min(sign * target, worst)

        def until(run: Run) -> float:
            return next(seconds for seconds, value in run["curve"] if sign * value >= sign * reached)

        def medians(figure: Any) -> dict[str, float]:
            return {system: statistics.median(map(figure, found)) for system, found in there.items()}

        return cls(
            reached,
            reached == target,
            medians(until),
            medians(lambda run: run["makespan"]),
            medians(lambda run: run["busy"]),
        )


def cells_of(figures: Mapping[str, Any], workload: Any) -> dict[str, Cell]:
    """Returns the cells of a workload by algorithm, in the order of the algorithms."""
    from tuning.algorithms import ALGORITHMS

    measured = {name: runs for name, runs in figures["cells"].get(workload.name, {}).items() if any(runs.values())}
    target = workload.scale(figures["setting"]["scale"]).target
    return {name: Cell.of(measured[name], target, workload.mode) for name in ALGORITHMS if name in measured}


def ratios(cells: Mapping[str, Cell], figure: str, system: str) -> dict[str, float]:
    """Returns, by algorithm, the ratio of a system's time to Fluid's."""
    taken = {name: getattr(cell, figure) for name, cell in cells.items()}
    return {name: one[system] / one["fluid"] for name, one in taken.items() if {system, "fluid"} <= one.keys()}


def table(workload: Any, cells: Mapping[str, Cell]) -> Any:
    """Returns Fluid's seconds, and the ratios of the other systems to them."""
    from rich.table import Table

    others = [system for system in SYSTEMS[1:] if any(system in cell.makespan for cell in cells.values())]
    drawn = Table(title=f"{workload.title}: {workload.metric}", title_justify="left")
    drawn.add_column("algorithm")
    columns = ["target"]
    for what in ("to target", "makespan"):
        columns += [f"{what}: Fluid", *(NAMES[other] for other in others)]
    for column in (*columns, *(f"busy: {NAMES[system]}" for system in ("fluid", *others))):
        drawn.add_column(column, justify="right")
    for name, cell in cells.items():
        row = [name, f"{cell.target:.4g}{'' if cell.common else '*'}"]
        for figure in ("to_target", "makespan"):
            taken = getattr(cell, figure)
            row.append(f"{taken['fluid']:.1f} s" if "fluid" in taken else "-")
            row += [_times(ratios({name: cell}, figure, other).get(name)) for other in others]
        row += [f"{100 * cell.busy[system]:.0f} %" if system in cell.busy else "-" for system in ("fluid", *others)]
        drawn.add_row(*row)
    means = [
        [_times(mean(ratios(cells, figure, other).values())) for other in others]
        for figure in ("to_target", "makespan")
    ]
    drawn.add_section()
    drawn.add_row("geometric mean", "", "", *means[0], "", *means[1], "", *("" for _ in others))
    return drawn


def mean(values: Iterable[float]) -> float | None:
    """Returns the geometric mean; ``None`` if there are no values."""
    found = list(values)
    return statistics.geometric_mean(found) if found else None


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def report(figures: Mapping[str, Any], folder: Path) -> None:
    """Prints a table for each workload, and draws its figures into a folder."""
    import paper_gains
    from paper_figures import save_bars, save_heatmap
    from rich.console import Console

    console = Console(width=max(120, Console().width))
    here, setting = figures["machine"], figures["setting"]
    told = f"{here['cores']} cores, Python {here['python']}, Ray {here['ray']}, scale {setting['scale']}"
    console.print(f"{told}, {setting['devices']} devices")
    console.print("Tune: plain; reuse: with reuse_actors=True; x: ratio to Fluid's time; *: not the scale's target")
    everywhere: dict[str, list[float]] = {}
    for workload in workloads().values():
        cells = cells_of(figures, workload)
        if not cells:
            continue
        console.print(table(workload, cells))
        measured = figures["cells"][workload.name]
        if workload.name not in TRAINED:
            target = workload.scale(setting["scale"]).target
            gains = {name: paper_gains.gain_of(name, measured[name], target) for name in cells}
            console.print(paper_gains.table(workload.title, gains))
            save_bars(folder / f"paper_{workload.name}.png", workload, cells, told)
            continue
        for other in TRAINED_SYSTEMS[1:]:
            for figure in ("to_target", "makespan"):
                everywhere.setdefault(f"{other}, {figure}", []).extend(ratios(cells, figure, other).values())
        save_bars(folder / f"paper_{workload.name}.png", workload, cells, told)
        save_heatmap(folder / f"paper_{workload.name}_busy.png", workload, measured, told)
    for what, found in everywhere.items():
        console.print(f"geometric mean over all cells: {what.replace('_', ' ')}: {_times(mean(found))} Fluid's")


# -- the command line ----------------------------------------------------------------------------------------


def main() -> None:
    """Runs the benchmark and prints its tables."""
    from tuning.algorithms import ALGORITHMS
    from tuning.scales import SCALE_NAMES

    known = {"workloads": tuple(workloads()), "algos": tuple(ALGORITHMS), "systems": SYSTEMS}
    usual = {"workloads": TRAINED, "algos": known["algos"], "systems": TRAINED_SYSTEMS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for option, names in usual.items():
        parser.add_argument(f"--{option}", default=",".join(names), help=f"which {option}, comma-separated")
    parser.add_argument("--data", metavar="DIR", help="a folder with the data (default: download)")
    parser.add_argument("--scale", choices=SCALE_NAMES, default="small", help="(default small)")
    parser.add_argument("--samples", type=int, help="number of configurations (default: by the algorithm)")
    parser.add_argument("--devices", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default 0)")
    parser.add_argument("--runs", type=int, default=1, help="runs of each, of seeds from --seed on (default 1)")
    parser.add_argument("--timeout", type=float, default=600.0, help="most seconds of one process (default 600)")
    parser.add_argument("--json", metavar="FILE", default="paper.json", help="the figures (default: %(default)s)")
    parser.add_argument("--figures", metavar="DIR", help="folder for the figures (default: beside the JSON file)")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for option, names in known.items():
        chosen = [name for name in getattr(options, option).split(",") if name]
        if unknown := [name for name in chosen if name not in names]:
            parser.error(f"--{option}: {unknown[0]!r} is not one of {', '.join(names)}")
        setattr(options, option, chosen)
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            figures = sweep(options.one, options.workloads[0], options.algos[0], options)
        print(json.dumps(figures))
        return
    options.given = options.data
    file = Path(options.json)
    figures = read(file, {key: getattr(options, key) for key in SETTING})
    measure_all(options, file, figures)
    report(figures, Path(options.figures) if options.figures else file.parent)


if __name__ == "__main__":
    main()
