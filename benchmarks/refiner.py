"""Measures what the refiner of resizes gains (docs/theory.md, section 16).

    python benchmarks/refiner.py [--cases 1000] [--json FILE]

Random groups of trials run on the real engine and a simulated backend, with the re-planner R refined and unrefined:
2 to 8 devices, up to three trials a device, elastic widths and packing; a resize takes 0 to 60 s, and in half of
the cases a given share of the makespan without pauses. In the second table the group's search submits as many
trials again once a quarter of the first have ended: trials that wait then take devices from those that were widened.

Predicted gains are those of the journal; realised ones follow from the pace before and after each resize, as in
`fluid report`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command, NoteKeptWidth, NoteResize, Report, ReportEnd
from fluid.engine.events import GroupSubmitted, TrialSpec
from fluid.forecasting.scenario import Scenario
from fluid.planners.arrangement import Arrangement, Replanner
from fluid.planners.instance import Instance
from fluid.planners.portfolio import Portfolio
from fluid.planners.refiner import Refined
from fluid.policies.engine import EngineState
from fluid.reports.analysis.resizes import TimedIteration, realised_gain
from fluid.resources import Cluster
from fluid.simulation.trial_outcomes import OracleProfile
from fluid.testing.play import Session

#: Seconds that a resize takes, and shares of the makespan.
SECONDS = (0.0, 1.0, 5.0, 20.0, 60.0)
SHARES = (0.01, 0.03, 0.06, 0.1, 0.2)
#: A resize that takes more than this share of the makespan is expensive.
EXPENSIVE = 0.05


class Unrefined(Portfolio):
    """The default planner without the refiner."""

    def arrange(self, instance: Instance) -> Arrangement:
        """Returns the same arrangement, whose re-planner makes every change that it wants."""
        arrangement = super().arrange(instance)
        return replace(arrangement, replanner=_unrefined(arrangement.replanner))

    def replanner(self) -> Replanner:
        """Returns R."""
        return _unrefined(super().replanner())


def _unrefined(replanner: Replanner) -> Replanner:
    return replanner.wanted_by if isinstance(replanner, Refined) else replanner


@dataclass(frozen=True)
class Case:
    """A group of trials.

    Attributes:
        seconds: per iteration at width 1, of each trial of the first group and of the second.
        budgets: iterations of each.
        first: trials of the first group.
        scenario: the devices and overheads.
    """

    seconds: tuple[float, ...]
    budgets: tuple[int, ...]
    first: int
    scenario: Scenario

    @classmethod
    def draw(cls, seed: int, *, late: bool) -> Case:
        """Draws a case; trials take a minute to an hour."""
        rng = np.random.default_rng([22, seed])
        n = int(rng.choice([2, 4, 8]))
        first = max(2, round(n * float(rng.choice([0.5, 1.0, 2.0, 3.0]))))
        trials = 2 * first if late else first
        seconds = float(rng.choice([2.0, 10.0])) * np.exp(
            float(rng.choice([0.25, 0.5, 1.0])) * rng.standard_normal(trials)
        )
        budgets = rng.integers(20, 101, trials)
        scenario = Scenario(
            Cluster.of(n),
            alpha=float(rng.choice([1.05, 1.1, 1.2])),
            beta=float(rng.choice([1.02, 1.05, 1.1])),
            c=int(rng.choice([1, 2, 4])),
            d=int(rng.choice([4, 16])),
        )
        return cls(tuple(seconds.tolist()), tuple(budgets.tolist()), first, scenario)


@dataclass
class Outcome:
    """What a run of a case came to.

    Attributes:
        makespan, mean_end: seconds.
        resizes, rejected: numbers of them.
        predicted, realised: gains in seconds, of the resizes of which both are known.
        size: sum of the predicted gains without their signs; what makes room for others has a negative one.
    """

    makespan: float = 0.0
    mean_end: float = 0.0
    resizes: int = 0
    rejected: int = 0
    predicted: float = 0.0
    realised: float = 0.0
    size: float = 0.0


class Run:
    """Runs a case.

    Args:
        case: the case.
        planner: the planner.
        epsilon: seconds that a resize takes.
    """

    def __init__(self, case: Case, planner: Portfolio, epsilon: float) -> None:
        self._case = case
        scenario = replace(case.scenario, epsilon=epsilon)
        self._backend = SimulatedBackend(
            lambda trial_id, _: Truth(case.seconds[int(trial_id)], scenario.alpha, scenario.beta),
            scenario.cluster.devices,
            epsilon=epsilon,
        )
        paces = {str(row): seconds for row, seconds in enumerate(case.seconds)}
        profile = OracleProfile(scenario, paces)
        engine = EngineState(planner, profile, max_packing=scenario.c, max_fused=1, max_width=scenario.d)
        self._session = Session(engine, self._backend, checked=False)
        self._iterations: dict[str, list[TimedIteration]] = {}
        self._resizes: dict[str, list[NoteResize]] = {}
        self._ends: dict[str, float] = {}
        self._rejected = 0

    def outcome(self) -> Outcome:
        """Runs it to its end."""
        case = self._case
        self._submit(range(case.first))
        waits = case.first < len(case.seconds)
        while len(self._ends) < len(case.seconds):
            if waits and 4 * len(self._ends) >= case.first:
                waits = False
                self._submit(range(case.first, len(case.seconds)))
            else:
                self._hear(self._session.step())
        found = Outcome(max(self._ends.values()), float(np.mean(list(self._ends.values()))))
        found.resizes, found.rejected = sum(map(len, self._resizes.values())), self._rejected
        for trial_id, notes in self._resizes.items():
            for note, until in zip(notes, [*(later.at for later in notes[1:]), math.inf], strict=True):
                self._compare(found, note, self._iterations[trial_id], until)
        return found

    @staticmethod
    def _compare(found: Outcome, note: NoteResize, iterations: Sequence[TimedIteration], until: float) -> None:
        if note.gain is None or note.left is None or note.begun_at is None:
            return
        gain = realised_gain(
            iterations, begun_at=note.begun_at, at=note.at, until=until, left=note.left, pause=note.seconds
        )
        if gain is not None:
            found.predicted, found.realised = found.predicted + note.gain, found.realised + gain
            found.size += abs(note.gain)

    def _submit(self, rows: Iterable[int]) -> None:
        width = self._case.scenario.d
        specs = [TrialSpec(f"{row}", self._case.budgets[row], profile_key=f"{row}", max_width=width) for row in rows]
        group = GroupSubmitted(self._backend.now(), f"group {specs[0].trial_id}", tuple(specs))
        self._hear(self._session.tell(group))

    def _hear(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Report):
                self._iterations.setdefault(command.trial_id, []).append(TimedIteration(command.at, command.seconds))
            elif isinstance(command, NoteResize):
                self._resizes.setdefault(command.trial_id, []).append(command)
            elif isinstance(command, ReportEnd):
                self._ends[command.trial_id] = command.at
            self._rejected += isinstance(command, NoteKeptWidth)


def measure(seed: int, *, late: bool) -> dict[str, float]:
    """Runs a case with and without the refiner; returns the figures of both."""
    case = Case.draw(seed, late=late)
    alone = Run(case, Unrefined(), 0.0).outcome().makespan
    grid = [*SECONDS, *(share * alone for share in SHARES)]
    epsilon = grid[seed % len(grid)]
    unrefined, refined = Run(case, Unrefined(), epsilon).outcome(), Run(case, Portfolio(), epsilon).outcome()
    return {
        "seed": seed,
        "epsilon": epsilon,
        "share": epsilon / alone,
        "longest_iteration": max(case.seconds),
        "makespan": refined.makespan / unrefined.makespan,
        "seconds_longer": refined.makespan - unrefined.makespan,
        "mean_end": refined.mean_end / unrefined.mean_end,
        "resizes_unrefined": unrefined.resizes,
        "resizes": refined.resizes,
        "rejected": refined.rejected,
        "predicted": refined.predicted,
        "realised": refined.realised,
        "size": refined.size,
    }


def summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The figures of some cases."""
    ratios = np.array([row["makespan"] for row in rows])
    resized = np.array([row["makespan"] for row in rows if row["resizes_unrefined"]])
    predicted, realised, size = (math.fsum(row[name] for row in rows) for name in ("predicted", "realised", "size"))
    return {
        "cases": len(rows),
        "makespan": float(np.exp(np.log(ratios).mean())),
        "shorter": int((ratios < 1.0 - 1e-6).sum()),
        "longer": int((ratios > 1.0 + 1e-6).sum()),
        # Engines decide between two iterations, predictions are of continuous work.
        "longer_by_more_than_an_iteration": sum(row["seconds_longer"] > row["longest_iteration"] for row in rows),
        "worst": float(ratios.max()),
        "best": float(ratios.min()),
        "where_changed": float(np.exp(np.log(ratios[ratios < 1 - 1e-6]).mean())) if (ratios < 1 - 1e-6).any() else 1.0,
        # The refiner has something to refine only where there are resizes without it.
        "resized": len(resized),
        "where_resized": float(np.exp(np.log(resized).mean())) if len(resized) else 1.0,
        "mean_end": float(np.exp(np.mean([math.log(row["mean_end"]) for row in rows]))),
        "resizes_unrefined": float(np.mean([row["resizes_unrefined"] for row in rows])),
        "resizes": float(np.mean([row["resizes"] for row in rows])),
        "predicted_s": predicted,
        "realised_s": realised,
        "bias": (predicted - realised) / size if size > 0.0 else 0.0,
    }


def table(console: Console, title: str, rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Prints and returns the figures by what a resize costs."""
    shown = Table(title=title)
    heads = ("a resize takes", "cases", "makespan", "resized", "shorter", "longer", "worst", "best", "mean end")
    for column in (*heads, "resizes", "bias"):
        shown.add_column(column, justify="right")
    bounds = {
        "nothing": (-1.0, 0.0),
        "up to 1 %": (0.0, 0.01),
        "1 to 5 %": (0.01, EXPENSIVE),
        "more": (EXPENSIVE, math.inf),
    }
    parts = {name: [row for row in rows if low < row["share"] <= high] for name, (low, high) in bounds.items()}
    found = {}
    for name, some in {**parts, "all": list(rows)}.items():
        if not some:
            continue
        figures = found[name] = summary(some)
        shown.add_row(
            name,
            f"{figures['cases']}",
            f"{figures['makespan']:.4f}",
            f"{figures['where_resized']:.4f} of {figures['resized']}",
            f"{figures['shorter']}",
            f"{figures['longer']} ({figures['longer_by_more_than_an_iteration']})",
            f"{figures['worst']:.3f}",
            f"{figures['best']:.3f}",
            f"{figures['mean_end']:.4f}",
            f"{figures['resizes_unrefined']:.2f} -> {figures['resizes']:.2f}",
            f"{figures['bias']:+.1%}",
        )
    console.print(shown)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=1000, help="cases of the first table (default 1000)")
    parser.add_argument("--late-cases", type=int, default=250, help="cases with a group that comes late (default 250)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(arguments)
    console = Console()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    console.print(f"{machine}, {time.strftime('%Y-%m-%d')}; longer (by more than the longest iteration)")
    figures: dict[str, Any] = {
        "machine": machine,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python benchmarks/refiner.py", *(sys.argv[1:] if arguments is None else arguments)]),
    }
    for name, late, cases in (("group", False, options.cases), ("late_group", True, options.late_cases)):
        rows = [measure(seed, late=late) for seed in track(range(cases), name, console=console)]
        title = "refined over unrefined: a group" if not late else "the same, with a group that comes while others run"
        figures[name] = {**table(console, title, rows), "longest": sorted(row["makespan"] for row in rows)[-5:]}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
