"""Rehearses the paper's Figures 3.3 and 3.10: what ASHA's concurrency costs, and what Fluid makes of 8 trials at once.

    python benchmarks/paper_concurrency.py --data DIR [--seeds 5] [--tasks 189866,...] [--json FILE] [--png FILE]

The engine, the planner and ASHA are the real ones; trials are replayed from YAHPO Gym's surrogate of LCBench on a
virtual clock (docs/rehearsal.md), with the alpha and beta of paper_shapes.py, 1.12 and 1.06, and 1 s for a resize and
for a set-up. Without Fluid there is one trial on each device, first come first served; ASHA then keeps as many under
way as there are devices. With Fluid, 8 are under way on any number of devices, as in the paper.

* Figure 3.3: time and device-seconds until ASHA without Fluid reaches a regret, on 4, 8, 16 and 32 devices.
* Figure 3.10: the same on 4, 8 and 16 devices, without Fluid and with it.

A sweep has 128 trials of at most 52 epochs. A regret is normalised: 0 is the best value of 2,000 random configs, 1 the
worst one at the end. A device-second is a second for which one device is held. Figures are geometric means, over tasks
and seeds, of the sweeps that reach the regret on every number of devices and in both ways, so that all rows are of the
same sweeps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measuring import machine, write_json
from rich.console import Console
from rich.table import Table

import fluid
from fluid import FluidExecutor
from fluid.integrations.comparing.algorithms import ReplayedTrial
from fluid.rehearsal import Overheads, RehearsalPlan, rehearsing
from fluid.rehearsal.benchmark import Benchmark
from fluid.rehearsal.outcome import outcome_of
from fluid.rehearsal.sources import folder_of, source_by_name

OVERHEADS = Overheads(alpha=1.12, beta=1.06, epsilon=1.0, start_s=1.0, source="assumed: see paper_shapes.py")
TASKS = ("189866", "3945", "126026", "167185")
SAMPLES, AT_ONCE = 128, 8
#: Regrets to reach, of which the first is the target of the figures.
REGRETS = (0.05, 0.02)
#: Options of the executor without Fluid.
_WITHOUT = {"planner": "fifo", "packing": "off"}


class Way(NamedTuple):
    """A way to run ASHA.

    Attributes:
        devices: how many.
        with_fluid: whether Fluid runs 8 trials at once on them, or each device one.
    """

    devices: int
    with_fluid: bool

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.devices} devices, {'Fluid' if self.with_fluid else 'without'}"


FIGURE_3_3 = tuple(Way(devices, False) for devices in (4, 8, 16, 32))
FIGURE_3_10 = tuple(Way(devices, with_fluid) for devices in (4, 8, 16) for with_fluid in (False, True))


def play(benchmark: Benchmark, way: Way, seed: int, samples: int = SAMPLES) -> dict[str, Any]:
    """Plays a sweep; returns its trace (seconds, regret), and the seconds to each of :data:`REGRETS`."""
    plan = RehearsalPlan(devices=way.devices, source=benchmark, overheads=OVERHEADS)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        options: Mapping[str, Any] = {} if way.with_fluid else _WITHOUT
        with rehearsing(plan), FluidExecutor(run_dir=run_dir, verbose=0, **options) as executor:
            fluid.run(
                ReplayedTrial,
                benchmark.space,
                metric=benchmark.metric,
                mode=benchmark.mode,
                samples=samples,
                algorithm="asha",
                budget=benchmark.max_iterations,
                seed=seed,
                max_concurrent=AT_ONCE if way.with_fluid else way.devices,
                executor=executor,
            )
        outcome = outcome_of(run_dir, benchmark.metric, benchmark.mode)
    return {
        "way": way.name,
        "seed": seed,
        "makespan_s": outcome.makespan_s,
        "busy": outcome.busy_share,
        "trace": [(at, benchmark.regret(value)) for at, value in outcome.trace],
        "to": {f"{regret:g}": outcome.seconds_to(benchmark.value_at(regret)) for regret in REGRETS},
    }


def rows_of(played: Mapping[tuple[str, int], Mapping[str, Mapping[str, Any]]], ways: Sequence[Way]) -> list[Any]:
    """Time and device-seconds to each regret and to the end, for each way.

    Args:
        played: by task and seed, what :func:`play` gave, by the name of the way.
        ways: rows.
    """
    rows = []
    for way in ways:
        row: dict[str, Any] = {"way": way.name, "devices": way.devices, "with_fluid": way.with_fluid}
        row["sweeps"] = len(played)
        for regret in (f"{each:g}" for each in REGRETS):
            both = [found for found in played.values() if all(found[each.name]["to"][regret] for each in ways)]
            seconds = [found[way.name]["to"][regret] for found in both]
            row[f"pairs_{regret}"] = len(both)
            row[f"to_{regret}_s"] = statistics.geometric_mean(seconds) if both else None
            row[f"to_{regret}_device_s"] = way.devices * row[f"to_{regret}_s"] if both else None
        row["makespan_s"] = statistics.geometric_mean(found[way.name]["makespan_s"] for found in played.values())
        row["busy"] = statistics.fmean(found[way.name]["busy"] for found in played.values())
        rows.append(row)
    return rows


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows, and their ratios to 8 devices without Fluid."""
    base = next(row for row in rows if row["devices"] == 8 and not row["with_fluid"])
    pairs = ", ".join(f"{base[f'pairs_{each:g}']} reach {each:g}" for each in REGRETS)
    drawn = Table(title=f"{title} (rehearsed; of {base['sweeps']} sweeps of each, {pairs})", title_justify="left")
    drawn.add_column("ASHA on")
    regrets = [f"{each:g}" for each in REGRETS]
    for column in (*(f"{what} to {r}" for r in regrets for what in ("s", "device-s")), "makespan s", "busy"):
        drawn.add_column(column, justify="right")
    for row in rows:
        cells = []
        for figure in (*(f"to_{r}_{what}" for r in regrets for what in ("s", "device_s")), "makespan_s"):
            value = row[figure]
            cells.append("-" if value is None else f"{value:.0f} ({value / base[figure]:.2f}x)")
        drawn.add_row(row["way"], *cells, f"{row['busy']:.0%}")
    console.print(drawn)


def draw(played: Mapping[tuple[str, int], Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Draws the mean regret over time and over device-seconds, in units of what 8 devices take to the target."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.8), facecolor="white", layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    target = f"{REGRETS[0]:g}"
    eight = Way(8, False)
    scaled = {key: found for key, found in played.items() if found[eight.name]["to"][target]} or played
    panels = (
        (left, FIGURE_3_3, False, "Fig. 3.3a: without Fluid, over time"),
        (middle, FIGURE_3_3, True, "Fig. 3.3b: over device-seconds"),
        (right, FIGURE_3_10, False, "Fig. 3.10: without Fluid (dashed) and with it"),
    )
    colours = {4: "#0072B2", 8: "#D55E00", 16: "#009E73", 32: "#CC79A7"}
    for axes, ways, per_device, title in panels:
        places = np.geomspace(0.05, 8.0, 200)
        for way in ways:
            factor = way.devices / 8 if per_device else 1.0
            curves = [
                _at(found[way.name]["trace"], places * (found[eight.name]["to"][target] or 1.0) / factor)
                for found in scaled.values()
            ]
            dashed = ways is FIGURE_3_10 and not way.with_fluid
            name = way.name if ways is FIGURE_3_10 else f"{way.devices} at once"
            axes.plot(places, np.mean(curves, axis=0), "--" if dashed else "-", color=colours[way.devices], label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel(f"{'device-seconds' if per_device else 'seconds'} / those of 8 to the target")
        axes.grid(color="#d9d9d9", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    left.set_ylabel(f"regret, mean of {len(scaled)} sweeps")
    figure.savefig(path, dpi=130)


def _at(trace: Sequence[Sequence[float]], places: Any) -> Any:
    """The best regret so far at some times; 1 before the first result."""
    times, values = (np.array([point[side] for point in trace]) for side in (0, 1))
    found = np.searchsorted(times, places, side="right") - 1
    return np.where(found < 0, 1.0, np.minimum(1.0, np.maximum(1e-3, values[np.maximum(found, 0)])))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with YAHPO Gym's lcbench; $FLUID_BENCHMARKS by default")
    parser.add_argument("--seeds", type=int, default=5, help="sweeps of each kind (default 5)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of LCBench, separated by commas")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"trials of a sweep (default {SAMPLES})")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--png", type=Path, help="picture")
    given = parser.parse_args(arguments)
    data = str(folder_of(given.data))
    played: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for task in given.tasks.split(","):
        benchmark = source_by_name(f"lcbench:{task}", data)
        for seed in range(given.seeds):
            found = [play(benchmark, way, seed, given.samples) for way in dict.fromkeys((*FIGURE_3_3, *FIGURE_3_10))]
            played[task, seed] = {one["way"]: one for one in found}
    tables = {"figure 3.3": rows_of(played, FIGURE_3_3), "figure 3.10": rows_of(played, FIGURE_3_10)}
    console = Console(width=140)
    for title, rows in tables.items():
        show(console, title, rows)
    facts = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "kind": "rehearsal", "tasks": given.tasks}
    facts |= {"seeds": given.seeds, "samples": given.samples, "overheads": OVERHEADS.source}
    write_json(given.json, {**facts, "tables": tables})
    if given.png is not None:
        draw(played, given.png)


if __name__ == "__main__":
    main()
