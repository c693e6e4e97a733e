"""Simulates the counterparts of the paper's tables and figures.

    python benchmarks/paper_shapes.py [--seeds 5] [--json FILE]

Every figure here is a simulation on the runtime model with the alpha and beta printed beside it, not a measurement
on GPUs. The shapes can be compared with the paper's, the numbers cannot: the paper does not publish its overheads.
"Fluid" is the portfolio planner; "without" is one trial per device, first come first served. Speed-ups are ratios of
makespans, geometric mean over the seeds. The last table has the paper's figures, which are from its text, as its
diagrams have no numbers, and whether these are as large.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fluid.forecasting.scenario import Runtimes, Scenario, Workload
from fluid.planners.bounds import malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.planners.portfolio import PLANNERS, make_planner
from fluid.planners.rollout import roll_out
from fluid.resources import Cluster
from fluid.simulation.simulate import simulate
from fluid.simulation.simulation_result import SimulationResult

#: Chosen overheads of the three workloads, from the smallest model to the largest: a smaller model fills less of a
#: device, and loses more by a further one.
WORKLOADS = {"DCGAN": (1.05, 1.2), "CIFAR-10": (1.12, 1.12), "WLM": (1.2, 1.06)}
CHOSEN = (1.12, 1.06)
#: Table 3.2 of the paper, without Fluid on 2, 4, 8, 16 and 32 workers.
PAPER_BUSY, PAPER_SECONDS = (0.812, 0.63, 0.458, 0.47, 0.252), (2356.0, 1432.0, 1073.0, 475.0, 432.0)


def base(workload: Workload, n: int = 8, sigma: float = 0.5, **changes: Any) -> Scenario:
    """Returns a scenario with the chosen overheads, 10 s per iteration, 0.5 s per resize and predictions 10% off."""
    alpha, beta = CHOSEN
    scenario = Scenario(
        Cluster.of(n),
        workload,
        Runtimes("lognormal", 10.0, sigma),
        alpha=alpha,
        beta=beta,
        epsilon=0.5,
        runtime_error=0.1,
    )
    return replace(scenario, **changes)


def both(scenario: Scenario, seeds: int) -> tuple[list[SimulationResult], list[SimulationResult]]:
    """Returns the results without Fluid and with it, one each per seed."""
    runs = [scenario.with_seed(seed) for seed in range(seeds)]
    fifo = [simulate(run, make_planner("fifo")) for run in runs]
    return fifo, [simulate(run, make_planner("portfolio")) for run in runs]


def speedup(scenario: Scenario, seeds: int) -> float:
    """Returns the geometric mean of the makespan without Fluid over that with it."""
    fifo, fluid = both(scenario, seeds)
    return float(np.exp(np.mean([np.log(a.makespan / b.makespan) for a, b in zip(fifo, fluid, strict=True)])))


def show(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[Any]:
    """Prints a table and returns it as plain data."""
    table = Table(title=f"{title} (simulation)", title_justify="left")
    for i, column in enumerate(header):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
    return [list(header), *[list(row) for row in rows]]


def table_3_2(console: Console, seeds: int) -> list[Any]:
    """Utilisation and runtime of Successive Halving over the number of devices."""
    rows = []
    for n in (2, 4, 8, 16, 32):
        fifo, fluid = both(base(Workload("successive_halving", trials=81, max_iterations=81), n), seeds)
        row: list[object] = [n]
        for results in (fifo, fluid):
            row.append(f"{np.mean([result.utilisation for result in results]):.0%}")
            row.append(float(np.mean([result.makespan for result in results])))
        rows.append(row)
    title = f"Table 3.2: Successive Halving, 81 trials, R = 81, {overheads(*CHOSEN)}"
    return show(console, title, ["devices", "busy without", "s without", "busy with", "s with Fluid"], rows)


def figure_3_5(console: Console, seeds: int) -> list[Any]:
    """The toy example: 4 trials of 4, 4, 12 and 30 s on 5 devices."""
    instance = Instance.build([4, 4, 12, 30], 5, c=2, d=5)
    bound = malleable_lower_bound(instance)
    rows: list[tuple[object, ...]] = [
        (name, roll_out(instance, make_planner(name).arrange(instance)).now) for name in PLANNERS
    ]
    rows.append(("no schedule beats", bound))
    return show(console, "Fig. 3.5: toy example, alpha = beta = 1", ["planner", "makespan s"], rows)


def figure_3_11(console: Console, seeds: int) -> list[Any]:
    """Packing alone on many trials, and widening alone on few, for three models."""
    packing, widening = [], []
    for name, (alpha, beta) in WORKLOADS.items():
        only_pack = [
            speedup(base(Workload("random", trials=k), alpha=alpha, beta=beta, c=4, d=1, sigma=0.1), seeds)
            for k in (9, 27, 81)
        ]
        packing.append((f"{name}, {overheads(alpha, beta)}", *only_pack))
        only_widen = [
            speedup(base(Workload("random", trials=k), alpha=alpha, beta=beta, c=1, d=8, sigma=0.1), seeds)
            for k in (1, 2, 3, 5)
        ]
        widening.append((f"{name}, {overheads(alpha, beta)}", *only_widen))
    title = "Fig. 3.11a: speed-up by packing alone, grid search, 8 devices"
    first = show(console, title, ["model", "9 trials", "27", "81"], packing)
    title = "Fig. 3.11b: speed-up by widening alone, 8 devices"
    return [first, show(console, title, ["model", "1 trial", "2", "3", "5"], widening)]


def figure_3_12(console: Console, seeds: int) -> list[Any]:
    """Speed-up over how much runtimes differ."""
    rows = [
        (f"sigma = {sigma:g}", speedup(base(Workload("random", trials=9), sigma=sigma), seeds))
        for sigma in (0.0, 0.25, 0.5, 1.0, 1.5)
    ]
    title = f"Fig. 3.12: 9 trials on 8 devices, {overheads(*CHOSEN)}"
    return show(console, title, ["runtime spread", "speed-up"], rows)


def figure_3_13(console: Console, seeds: int) -> list[Any]:
    """Speed-up over the overheads: the planner does not pack or widen where that does not pay."""
    packing = [
        (f"alpha = {alpha:g}", speedup(base(Workload("random", trials=27), alpha=alpha, d=1, sigma=0.1), seeds))
        for alpha in (1.12, 1.5, 2.0, 10.0)
    ]
    scaling = []
    for name, beta in (("DCGAN", 1.45), ("CIFAR-10", 1.3), ("WLM", 1.06)):
        three = base(Workload("random", trials=3), beta=beta, c=1, d=16, sigma=0.1)
        scaling.append((f"{name}, beta = {beta:g}", *(speedup(three.with_devices(n), seeds) for n in (4, 8, 16))))
    title = "Fig. 3.13a: 27 trials on 8 devices, packing alone"
    first = show(console, title, ["packing overhead", "speed-up"], packing)
    title = "Fig. 3.13b: 3 trials, widening alone"
    return [first, show(console, title, ["scaling overhead", "4 devices", "8", "16"], scaling)]


def figures_3_7_to_3_10(console: Console, seeds: int) -> list[Any]:
    """Speed-ups and utilisation of whole algorithms, synchronous and asynchronous."""
    workloads = {
        "Successive Halving": Workload("successive_halving", trials=81, max_iterations=81),
        "SyncBOHB": Workload("syncbohb", max_iterations=81),
        "Hyperband": Workload("hyperband", max_iterations=81),
        "PBT": Workload("pbt", trials=8, max_iterations=50, interval=5),
    }
    rows = []
    for name, workload in workloads.items():
        for n in (4, 8, 16):
            rows.append((name, n, *_compared(base(workload, n), base(workload, n), seeds)))
    # With Fluid the paper runs 8 ASHA trials on any number of devices; without it there is one per device.
    asha = Workload("asha", trials=64, max_iterations=81)
    for n in (4, 8, 16):
        rows.append(("ASHA", n, *_compared(base(asha, n), base(replace(asha, concurrency=8), n), seeds)))
    header = ["algorithm", "devices", "speed-up", "busy without", "busy with", "device-hours saved"]
    return show(console, f"Fig. 3.6-3.10: whole algorithms, {overheads(*CHOSEN)}", header, rows)


def _compared(without: Scenario, with_fluid: Scenario, seeds: int) -> tuple[float, str, str, str]:
    fifo = [simulate(without.with_seed(seed), make_planner("fifo")) for seed in range(seeds)]
    fluid = [simulate(with_fluid.with_seed(seed), make_planner("portfolio")) for seed in range(seeds)]
    ratio = float(np.exp(np.mean([np.log(a.makespan / b.makespan) for a, b in zip(fifo, fluid, strict=True)])))
    busy = [f"{np.mean([result.utilisation for result in results]):.0%}" for results in (fifo, fluid)]
    return ratio, busy[0], busy[1], f"{1.0 - 1.0 / ratio:.0%}"


def compared(tables: dict[str, list[Any]]) -> list[tuple[str, str, str, str]]:
    """Rows of what the paper says of a figure, what the tables have, and whether that is as large."""
    rows: list[tuple[str, str, str, str]] = []

    def add(what: str, paper: str, found: Sequence[float], unit: str, holds: bool) -> None:
        said = ", ".join(f"{each:.0%}" if unit == "%" else f"{each:.2f}{unit}" for each in found)
        rows.append((what, paper, said, "yes" if holds else "no"))

    idle = [1.0 - _share(row[1]) for row in tables["table 3.2"][1:]]
    told = ", ".join(f"{1.0 - share:.0%}" for share in PAPER_BUSY)
    unused = all(here >= 1.0 - there - 0.01 for here, there in zip(idle, PAPER_BUSY, strict=True))
    add("Table 3.2: idle without, 2 to 32 devices", told, idle, "%", unused)
    runtimes = [row[2] for row in tables["table 3.2"][1:]]
    gains = [runtimes[0] / each for each in runtimes]
    paper = [PAPER_SECONDS[0] / each for each in PAPER_SECONDS]
    holds = all(here <= there for here, there in zip(gains, paper, strict=True))
    told = ", ".join(f"{each:.2f}x" for each in paper)
    add("Table 3.2: what they gain without, at most", told, gains, "x", holds)

    whole = {(name, devices): row for name, devices, *row in tables["figures 3.6 to 3.10"][1:]}
    names = ("SyncBOHB", "Hyperband", "ASHA", "PBT")
    busy = [_share(whole[name, 8][2]) / _share(whole[name, 8][1]) for name in names]
    add(f"Fig. 3.8: busy with / without, {', '.join(names)}", "1.1x to 2x", busy, "x", min(busy) >= 1.1)
    sync = [whole["SyncBOHB", devices][0] for devices in (4, 8, 16)]
    add("Fig. 3.9: SyncBOHB's gain, 4, 8, 16", "grows", sync, "x", sync == sorted(sync))

    packing, widening = (part[1:] for part in tables["figure 3.11"])
    many = [row[3] for row in packing]
    grows = all(row[1:] == sorted(row[1:]) for row in packing) and many == sorted(many, reverse=True)
    add("Fig. 3.11a: packing, 81 trials, small to large", "most of many, small", many, "x", grows)
    few = [row[2] for row in widening]
    grows = all(row[1:] == sorted(row[1:], reverse=True) for row in widening) and few == sorted(few)
    add("Fig. 3.11b: widening, 2 trials, small to large", "most of few, large", few, "x", grows)
    spread = [row[1] for row in tables["figure 3.12"][1:]]
    add("Fig. 3.12: runtime spread 0 to 1.5", "grows", spread, "x", max(spread[:2]) < min(spread[-2:]))
    packed, scaled = (part[1:] for part in tables["figure 3.13"])
    gains = [row[1] for row in packed]
    add("Fig. 3.13a: packing overhead, least to 10", "falls to 1", gains, "x", gains == sorted(gains, reverse=True))
    for name, *by_devices in scaled:
        stops = by_devices[2] < 1.1 * by_devices[1]
        expected = "4 to 8 gains, 16" + (" too" if name.startswith("WLM") else " no more")
        holds = by_devices[1] > 1.1 * by_devices[0] and stops == expected.endswith("no more")
        add(f"Fig. 3.13b: {name}, 4, 8, 16", expected, by_devices, "x", holds)
    return rows


def _share(percent: str) -> float:
    return float(percent.rstrip("%")) / 100.0


def overheads(alpha: float, beta: float) -> str:
    """Returns the overheads for a title."""
    return f"alpha = {alpha:g}, beta = {beta:g}"


PARTS: dict[str, Callable[[Console, int], list[Any]]] = {
    "table 3.2": table_3_2,
    "figure 3.5": figure_3_5,
    "figures 3.6 to 3.10": figures_3_7_to_3_10,
    "figure 3.11": figure_3_11,
    "figure 3.12": figure_3_12,
    "figure 3.13": figure_3_13,
}


def main() -> None:
    """Prints every table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5, help="runs to average over (default 5)")
    parser.add_argument("--json", metavar="FILE", help="also write the tables to this file")
    options = parser.parse_args()
    console = Console()
    console.print("[bold]Simulation on the runtime model, not a measurement on GPUs.[/bold]\n")
    tables = {name: part(console, options.seeds) for name, part in PARTS.items()}
    tables["compared"] = show(console, "The paper's", ["figure", "paper", "here", "as large"], compared(tables))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"date": time.strftime("%Y-%m-%d"), "kind": "simulation", "tables": tables}, file, indent=1)


if __name__ == "__main__":
    main()
