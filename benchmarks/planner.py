"""Measures the quality and the speed of the planners on random instances (docs/theory.md, section 6).

    python benchmarks/planner.py [--seeds 1] [--quick] [--json FILE]

Quality is the makespan over mLB, a lower bound for every schedule, over a full grid of families: devices n, trials
per device k/n, packing overhead alpha, scaling overhead beta, widest width d and the lognormal spread sigma of
runtimes. Speed is the time to plan 10,000 trials on 1,000 devices, and to re-plan 1,000 running trials.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fluid.dynamic_fluid import ReallocateByShare
from fluid.forecasting.scenario import Runtimes, Scenario, Workload
from fluid.measure.runtime_model import FusedRates
from fluid.planners.arrangement import Arrangement, KeepWidths
from fluid.planners.bounds import malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.planners.planner import Plan
from fluid.planners.portfolio import PLANNERS, Portfolio, make_planner
from fluid.planners.rollout import Rollout, roll_out, start
from fluid.planners.water_fill import WaterFill
from fluid.resources import Cluster
from fluid.simulation.simulate import simulate

DEVICES = (4, 8, 16, 32)
TRIALS_PER_DEVICE = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
ALPHAS = (1.0, 1.1, 1.2, 1.3)
BETAS = (1.0, 1.05, 1.1)
SIGMAS = (0.0, 0.5, 1.0, 1.5)


class Family(NamedTuple):
    """One cell of the grid; ``d`` is the widest width, ``seed`` draws the runtimes."""

    n: int
    per_device: float
    alpha: float
    beta: float
    d: int
    sigma: float
    seed: int

    def instance(self) -> Instance:
        """Returns the instance, with median runtime 1 s."""
        k = max(1, round(self.per_device * self.n))
        normal = np.random.default_rng([self.seed, self.n, k]).standard_normal(k)
        return Instance.build(np.exp(self.sigma * normal), self.n, alpha=self.alpha, beta=self.beta, c=4, d=self.d)


def families(seeds: int) -> list[Family]:
    """Returns the full grid, ``seeds`` instances per cell; a cell with d = 4 = n is in it once."""
    grid = itertools.product(DEVICES, TRIALS_PER_DEVICE, ALPHAS, BETAS, ("4", "n"), SIGMAS, range(seeds))
    return [
        Family(n, per_device, alpha, beta, 4 if d == "4" else n, sigma, seed)
        for n, per_device, alpha, beta, d, sigma, seed in grid
        if not (d == "4" and n == 4)
    ]


def ratios(family: Family) -> list[float]:
    """Returns the makespan over mLB of each planner."""
    instance = family.instance()
    bound = malleable_lower_bound(instance)
    return [roll_out(instance, make_planner(name).arrange(instance)).now / bound for name in PLANNERS]


def ratios_under_errors(seed: int) -> list[float]:
    """Returns the same with predictions 20% off and one trial in five stopped early."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([4, 8, 16]))
    scenario = Scenario(
        Cluster.of(n),
        Workload("random", trials=int(rng.choice([n // 2, n, 3 * n])), max_iterations=50),
        Runtimes("lognormal", 1.0, float(rng.choice([0.25, 0.5, 1.0]))),
        alpha=float(rng.choice([1.05, 1.1, 1.2])),
        beta=float(rng.choice([1.02, 1.05, 1.1])),
        epsilon=0.1,
        runtime_error=0.2,
        early_stop=0.2,
        seed=seed,
    )
    results = [simulate(scenario, make_planner(name)) for name in PLANNERS]
    return [result.makespan / result.lower_bound for result in results]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns mean, 95th percentile and maximum."""
    return {
        "mean": float(np.mean(values)),
        "p95": float(np.percentile(values, 95)),
        "max": float(np.max(values)),
    }


def quality(console: Console, title: str, rows: Sequence[Sequence[float]]) -> dict[str, dict[str, float]]:
    """Prints and returns each planner's spread."""
    table = Table(title=title)
    for column in ("planner", "mean", "p95", "max"):
        table.add_column(column, justify="left" if column == "planner" else "right")
    summary = {name: spread([row[i] for row in rows]) for i, name in enumerate(PLANNERS)}
    for name, figures in summary.items():
        table.add_row(name, *(f"{figures[key]:.3f}" for key in ("mean", "p95", "max")))
    console.print(table)
    return summary


def by_load(console: Console, cells: Sequence[Family], rows: Sequence[Sequence[float]]) -> None:
    """Prints the mean ratio by trials per device."""
    table = Table(title="mean of makespan / mLB by trials per device")
    table.add_column("k/n")
    for name in PLANNERS:
        table.add_column(name, justify="right")
    for per_device in TRIALS_PER_DEVICE:
        chosen = [row for cell, row in zip(cells, rows, strict=True) if cell.per_device == per_device]
        means = [statistics.mean(row[i] for row in chosen) for i in range(len(PLANNERS))]
        table.add_row(f"{per_device:g}", *(f"{mean:.3f}" for mean in means))
    console.print(table)


def median_ms(call: Callable[[], object], runs: int = 9) -> float:
    """Returns the median milliseconds of one call, after a first call that does not count."""
    call()
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


def running_strips(trials: int, n: int, width: float, d: int, gone: int) -> Rollout:
    """Strips with ``trials`` running trials, just after ``gone`` others left their devices."""
    rng = np.random.default_rng(0)
    heights = np.concatenate([np.full(gone, 1e-3), np.exp(rng.standard_normal(trials)) + 0.01])
    instance = Instance.build(heights, n, alpha=1.1, beta=1.05, c=4, d=d, epsilon=1e-4)
    widths = np.full(trials + gone, width)
    widths[:gone] = 1.0
    order = np.arange(trials + gone)
    rollout = start(instance, Arrangement(widths, order, KeepWidths(), replan_at_start=False, name="given"))
    if gone:
        rollout.advance(float("inf"))
    assert len(rollout.running) == trials
    return rollout


def speed(console: Console) -> dict[str, float]:
    """Prints and returns the times."""
    rng = np.random.default_rng(0)
    large = Instance.build(np.exp(rng.standard_normal(10_000)), 1_000, alpha=1.1, beta=1.05, c=4, d=8)
    planner = Portfolio()
    # Ten profile keys, of which a pack of 64 rows takes 3.5 to 7.4 times as long as one trial.
    tables = [FusedRates.of({2**step: 2.0 ** (step * (0.3 + 0.02 * key)) for step in range(1, 7)}) for key in range(10)]
    fused = [tables[row % 10] for row in range(10_000)]
    packs = Instance.build(np.exp(rng.standard_normal(10_000)), 1_000, beta=1.05, c=64, d=8, fused=fused)
    figures = {
        "plan 10,000 trials on 1,000 devices": median_ms(lambda: planner.arrange(large)),
        "the same with placements": median_ms(lambda: Plan("", large, planner.arrange(large)).placements),
        "mLB of the same": median_ms(lambda: malleable_lower_bound(large)),
        "plan 10,000 trials of 10 fused keys": median_ms(lambda: planner.arrange(packs)),
        "the same with placements, fused": median_ms(lambda: Plan("", packs, planner.arrange(packs)).placements),
    }
    cases = {
        "1 device falls idle, 1,000 trials of width 1": running_strips(1_000, 1_001, 1.0, 8, 1),
        "50 devices fall idle, 1,000 trials of width 1": running_strips(1_000, 1_050, 1.0, 8, 50),
        "1 device falls idle, 1,000 packed trials": running_strips(1_000, 251, 0.25, 8, 1),
        "50 devices fall idle, 1,000 packed trials": running_strips(1_000, 300, 0.25, 8, 50),
    }
    for name, rollout in cases.items():
        figures[f"R: {name}"] = median_ms(lambda rollout=rollout: WaterFill().replan(rollout.snapshot()), 31)
        figures[f"DynamicFluid: {name}"] = median_ms(lambda s=rollout: ReallocateByShare().replan(s.snapshot()), 31)
    table = Table(title="speed, median milliseconds in this process (re-planning includes its snapshot)")
    table.add_column("what")
    table.add_column("ms", justify="right")
    for name, figure in figures.items():
        table.add_row(name, f"{figure:.2f}")
    console.print(table)
    return figures


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=1, help="instances per cell of the grid (default 1)")
    parser.add_argument("--quick", action="store_true", help="every tenth cell only")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    console = Console()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    console.print(f"{machine}, numpy {np.__version__}, {time.strftime('%Y-%m-%d')}")

    timings = speed(console)
    cells = families(options.seeds)[:: 10 if options.quick else 1]
    with ProcessPoolExecutor() as pool:
        rows = list(track(pool.map(ratios, cells, chunksize=8), "instances", len(cells), console=console))
        seeds = range(60 if options.quick else 400)
        runs = pool.map(ratios_under_errors, seeds, chunksize=4)
        errors = list(track(runs, "with errors", len(seeds), console=console))
    summary = quality(console, f"makespan / mLB on {len(cells)} random instances", rows)
    by_load(console, cells, rows)
    worse = sum(row[3] > min(row[:3]) * (1 + 1e-9) for row in rows)
    console.print(f"portfolio worse than fifo, static or dynamic: {worse} of {len(cells)}")
    title = f"the same on {len(errors)} with runtimes 20% off and 20% stopped early, epsilon 0.1 s"
    robust = quality(console, title, errors)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            figures = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "quality": summary}
            json.dump({**figures, "quality_under_errors": robust, "milliseconds": timings}, file, indent=1)


if __name__ == "__main__":
    main()
