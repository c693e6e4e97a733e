"""The BOHB of fluid.run beside HpBandSter's, its authors' own: the regret of both on LCBench.

    python benchmarks/bohb.py --data DIR [--tasks 3945,34539] [--devices 4] [--samples 73] [--seeds 8] [--jobs 2]
        [--record FILE]

The engine, the planner, the schedulers and both searchers are the real ones; the trials are replayed on a virtual
clock, with the overheads that benchmarks/rehearsal.py assumes. Normalised regret: 0 is the best value of 2,000 random
configs, 1 the worst one at the end. Both are judged at the same instant, when the first of the two sweeps of a seed
has ended: their brackets are of other sizes. HpBandSter rounds the number of configs down to a multiple, Fluid up, as
Hyperband does. Hyperband, whose configs are random, shows what a model is worth at all.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import about, machine
from rehearsal import OVERHEADS
from rich.console import Console
from rich.table import Table
from tpe_rungs import TASKS

from fluid.integrations.comparing.compare import ComparisonRequest, compare
from fluid.rehearsal.outcome import SweepOutcome
from fluid.rehearsal.sources import source_by_name

WAYS = ("bohb", "hpbandster-bohb", "hyperband")


def regrets(benchmark: Any, outcomes: Mapping[str, SweepOutcome]) -> dict[str, float]:
    """The regret of each way at the instant at which the first of them has ended."""
    end = min(outcome.makespan_s for outcome in outcomes.values())
    best = {way: outcome.best_at(end) for way, outcome in outcomes.items()}
    return {way: benchmark.regret(benchmark.worst_known if one is None else one) for way, one in best.items()}


def play(task: str, data: str, devices: int, samples: int, seeds: int, jobs: int) -> list[dict[str, float]]:
    """Plays the sweeps of a task; returns the regrets of each seed."""
    given = {name: value for name, value in vars(OVERHEADS).items() if isinstance(value, float)}
    request = ComparisonRequest(
        benchmark=f"lcbench:{task}",
        data=data,
        algorithms=WAYS,
        devices=(devices,),
        seeds=seeds,
        samples=samples,
        given=given,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = compare(request, Path(folder), jobs=jobs, progress=lambda text: None)
    if found.problems:
        raise SystemExit(str(found.problems))
    benchmark = source_by_name(f"lcbench:{task}", data)
    return [regrets(benchmark, {way: found.outcomes[way][seed] for way in WAYS}) for seed in range(seeds)]


def row_of(tasks: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """What the seeds of some tasks come to.

    The spread of each way, and of the difference of two sweeps by the two BOHBs, is the standard deviation over the
    seeds of a task; of several tasks, the root of the mean of its square.
    """
    facts: dict[str, Any] = {}
    for way in WAYS:
        by_task = [[one[way] for one in found] for found in tasks]
        spread = math.sqrt(statistics.mean(map(statistics.variance, by_task)))
        facts[way] = {"mean": statistics.mean(map(statistics.mean, by_task)), "spread": spread}
    differences = [one["bohb"] - one["hpbandster-bohb"] for found in tasks for one in found]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    spread = math.hypot(facts["bohb"]["spread"], facts["hpbandster-bohb"]["spread"])
    facts["difference"] = {"mean": statistics.mean(differences), "error": error, "spread": spread}
    return facts


def table_of(played: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """A row for each task, and one for all."""
    table = Table(title="normalised regret: mean, and spread over the seeds", title_justify="left")
    for column in ("task", *WAYS, "bohb less hpbandster-bohb", "error of this mean", "within the spread"):
        table.add_column(column)
    for task, found in [*((task, [found]) for task, found in played.items()), ("all", list(played.values()))]:
        facts = row_of(found)
        apart = facts["difference"]
        within = "yes" if abs(apart["mean"]) <= apart["spread"] else "no"
        ways = [f"{facts[way]['mean']:.4f} ({facts[way]['spread']:.4f})" for way in WAYS]
        table.add_row(task, *ways, f"{apart['mean']:+.4f}", f"{apart['error']:.4f}", within)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with YAHPO Gym's files")
    parser.add_argument("--tasks", default=TASKS, help="of LCBench, separated by commas (default: every third one)")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument(
        "--samples", type=int, default=73, help="configs of a sweep (default: 73, HpBandSter's brackets)"
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2, help="sweeps at once")
    parser.add_argument("--record", metavar="FILE", help="write the regrets to this file")
    arguments = parser.parse_args()
    shape = {"devices": arguments.devices, "samples": arguments.samples, "seeds": arguments.seeds}
    played = {task: play(task, arguments.data, **shape, jobs=arguments.jobs) for task in arguments.tasks.split(",")}
    console = Console(width=120)
    console.print("; ".join([*(f"{value} {name}" for name, value in shape.items()), str(machine())]))
    console.print(table_of(played))
    if arguments.record:
        content = {**about(), **shape, "regrets": played}
        Path(arguments.record).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
