"""Measures what planners gain by knowing that runtimes are uncertain (docs/theory.md, section 14).

    python benchmarks/odds.py [--seeds 80] [--draws 200] [--json FILE]

Widening: simulated groups whose runtimes are off by a lognormal factor of sigma 0 to 1, as the planner knows. The same
groups, runtimes and stops are run with re-planners that see sigma, and with ones that take predictions for certain. The
first iteration of a trial shows its true pace, so that groups have 2 to 9 iterations, and uncertain ones matter.

Order: trials of which half are uncertain wait for devices, one device each. They start in descending order of the
median, of the mean, or of what each exceeds with the same odds; the mean makespan is over draws of their runtimes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fluid.forecasting.scenario import Runtimes, Scenario, Workload
from fluid.measure.runtime_model import FloatArray
from fluid.planners.arrangement import Arrangement, Replanner, Running, WidthChange
from fluid.planners.instance import Instance, at_equal_odds
from fluid.planners.portfolio import Portfolio
from fluid.resources import Cluster
from fluid.simulation.simulate import simulate

ERRORS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


class TakesAsCertain:
    """A re-planner that does not see how uncertain runtimes are."""

    def __init__(self, replanner: Replanner) -> None:
        self.moves_only_devices = replanner.moves_only_devices
        self._replanner = replanner

    def replan(self, running: Running) -> list[WidthChange]:
        """Returns what the re-planner chooses by the medians."""
        return self._replanner.replan(replace(running, sigma=None))

    def make_room(self, running: Running, waiting: FloatArray) -> list[WidthChange]:
        """Returns what the re-planner chooses by the medians."""
        return self._replanner.make_room(replace(running, sigma=None), waiting)


class CertainPortfolio(Portfolio):
    """The default planner as it is where runtimes are certain."""

    def arrange(self, instance: Instance) -> Arrangement:
        """Returns the best candidate, whose re-planner takes runtimes as certain."""
        best = super().arrange(instance)
        return replace(best, replanner=TakesAsCertain(best.replanner))

    def replanner(self) -> Replanner:
        """Returns R, which takes runtimes as certain."""
        return TakesAsCertain(super().replanner())


def scenario(seed: int, error: float) -> Scenario:
    """Returns a group of up to three trials a device."""
    rng = np.random.default_rng([14, seed])
    n = int(rng.choice([4, 8, 16]))
    return Scenario(
        Cluster.of(n),
        Workload("random", trials=int(rng.choice([n // 2, n, 3 * n])), max_iterations=int(rng.choice([2, 4, 9]))),
        Runtimes("lognormal", 1.0, float(rng.choice([0.25, 0.5, 1.0]))),
        alpha=float(rng.choice([1.05, 1.1, 1.2])),
        beta=float(rng.choice([1.02, 1.05, 1.1])),
        epsilon=float(rng.choice([0.0, 0.1, 1.0])),
        runtime_error=error,
        early_stop=float(rng.choice([0.0, 0.2])),
        seed=seed,
    )


def widening(console: Console, seeds: int) -> list[dict[str, float]]:
    """Prints and returns makespans and resizes by error, with and without sigma."""
    table = Table(title=f"makespan with sigma over makespan without, {seeds} groups each")
    for column in ("sigma", "geometric mean", "standard error", "shorter", "longer", "resizes without", "with"):
        table.add_column(column, justify="right")
    rows = []
    for error in track(ERRORS, "groups", console=console):
        pairs = [
            (simulate(scenario(seed, error), CertainPortfolio()), simulate(scenario(seed, error), Portfolio()))
            for seed in range(seeds)
        ]
        logs = np.log([with_sigma.makespan / without.makespan for without, with_sigma in pairs])
        row = {
            "sigma": error,
            "ratio": float(np.exp(logs.mean())),
            "standard_error": float(logs.std() / np.sqrt(seeds)),
            "shorter": float((logs < -1e-9).mean()),
            "longer": float((logs > 1e-9).mean()),
            "resizes_without": float(np.mean([without.resizes for without, _ in pairs])),
            "resizes_with": float(np.mean([with_sigma.resizes for _, with_sigma in pairs])),
        }
        rows.append(row)
        table.add_row(
            f"{error:g}",
            f"{row['ratio']:.4f}",
            f"{row['standard_error']:.4f}",
            f"{row['shorter']:.0%}",
            f"{row['longer']:.0%}",
            f"{row['resizes_without']:.2f}",
            f"{row['resizes_with']:.2f}",
        )
    console.print(table)
    return rows


def makespan(runtimes: Sequence[float], n: int) -> float:
    """Returns the makespan of trials that start in this order, each on the device that is idle first."""
    busy_until = [0.0] * n
    for seconds in runtimes:
        heapq.heapreplace(busy_until, busy_until[0] + seconds)
    return max(busy_until)


def order(console: Console, draws: int) -> list[dict[str, float]]:
    """Prints and returns mean makespans of queues by their order, over those in order of medians."""
    table = Table(title=f"mean makespan over that of a queue in order of medians, 30 queues, {draws} draws of each")
    for column in ("sigma of every other trial", "by means", "standard error", "at equal odds", "standard error"):
        table.add_column(column, justify="right")
    rows = []
    for error in track(ERRORS[1:], "queues", console=console):
        logs = []
        for seed in range(30):
            rng = np.random.default_rng([15, seed])
            n = int(rng.choice([4, 8, 16]))
            k = n * int(rng.choice([2, 4, 8]))
            medians, sigma = np.exp(0.5 * rng.standard_normal(k)), np.where(np.arange(k) % 2, error, 0.0)
            true = medians * np.exp(sigma * rng.standard_normal((draws, k)))
            keys = (medians, medians * np.exp(sigma**2 / 2), at_equal_odds(medians, sigma))
            orders = [np.argsort(-key, kind="stable") for key in keys]
            means = np.array([np.mean([makespan(each, n) for each in true[:, some].tolist()]) for some in orders])
            logs.append(np.log(means / means[0]))
        ratios, errors = np.exp(np.mean(logs, axis=0)), np.std(logs, axis=0) / np.sqrt(len(logs))
        rows.append(
            {
                "sigma": error,
                "by_means": float(ratios[1]),
                "by_means_standard_error": float(errors[1]),
                "at_equal_odds": float(ratios[2]),
                "at_equal_odds_standard_error": float(errors[2]),
            }
        )
        table.add_row(f"{error:g}", *(f"{figures[each]:.4f}" for each in (1, 2) for figures in (ratios, errors)))
    console.print(table)
    return rows


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=80, help="simulated groups for each sigma (default 80)")
    parser.add_argument("--draws", type=int, default=200, help="draws of runtimes for each queue (default 200)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    console = Console()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    console.print(f"{machine}, numpy {np.__version__}, {time.strftime('%Y-%m-%d')}")
    figures: dict[str, Any] = {
        "machine": machine,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": options.seeds,
        "widening": widening(console, options.seeds),
        "order": order(console, options.draws),
    }
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
