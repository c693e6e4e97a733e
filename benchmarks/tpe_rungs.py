"""What the rungs of ASHA gain for TPE: LCBench by ASHA, by TPE, and by TPE whose trials all run to the budget.

    python benchmarks/tpe_rungs.py --data DIR [--tasks 3945,34539] [--devices 4] [--samples 64] [--seeds 4]

The engine, the planner, the schedulers and the sampler are the real ones; the trials are replayed on a virtual clock,
with the overheads that benchmarks/rehearsal.py assumes. The target is a normalised regret: 0 is the best value of 2,000
random configs, 1 the worst one at the end. Ratios are geometric means over the sweeps of a task and a seed in which
both ways reach the target; beside them stands the share of the sweeps in which a way reaches it at all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import machine
from rehearsal import OVERHEADS
from rich.console import Console
from rich.table import Table

import fluid
from fluid.integrations.comparing.algorithms import ReplayedTrial
from fluid.rehearsal.outcome import SweepOutcome, outcome_of
from fluid.rehearsal.plan import RehearsalPlan, rehearsing
from fluid.rehearsal.sources import source_by_name

WAYS = ("asha", "tpe", "tpe to the budget")
REGRETS = (0.05, 0.02, 0.01)
#: Every third task.
TASKS = "3945,34539,126026,146212,167149,167161,167185,168329,168868,189862,189866,189908"


def play(benchmark: Any, way: str, devices: int, samples: int, seed: int) -> SweepOutcome:
    """Plays a sweep."""
    most = benchmark.max_iterations
    options = {"algorithm": "asha"} if way == "asha" else {"algorithm": "tpe"}
    if way == "tpe to the budget":
        options["min_budget"] = most
    plan = RehearsalPlan(devices=devices, source=benchmark, overheads=OVERHEADS)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        with rehearsing(plan), fluid.FluidExecutor(run_dir=run_dir, verbose=0) as executor:
            fluid.run(
                *(ReplayedTrial, benchmark.space),
                metric=benchmark.metric,
                mode=benchmark.mode,
                samples=samples,
                budget=most,
                seed=seed,
                executor=executor,
                **options,
            )
        return outcome_of(run_dir, benchmark.metric, benchmark.mode)


def table_of(played: Mapping[tuple[str, str, int], dict[str, Any]], way: str) -> Table:
    """TPE in times of another way."""
    table = Table(title=f"tpe against {way}: how many times as fast it is", title_justify="left")
    for column in ("task", *(f"to {regret:.0%}" for regret in REGRETS), "makespan", "regret at the end"):
        table.add_column(column)
    tasks = list(dict.fromkeys(task for task, _, _ in played))
    for title, chosen in [*((task, [task]) for task in tasks), ("all", tasks)]:
        pairs = [
            (figures, played[task, "tpe", seed])
            for (task, one, seed), figures in played.items()
            if one == way and task in chosen
        ]
        cells = [_faster(pairs, regret) for regret in (*REGRETS, None)]
        regrets = [f"{statistics.mean(pair[place]['regret'] for pair in pairs):.3f}" for place in (1, 0)]
        table.add_row(title, *cells, " / ".join(regrets))
    return table


def _faster(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], regret: float | None) -> str:
    times = [tuple(figures["makespan" if regret is None else regret] for figures in pair) for pair in pairs]
    both = [other / mine for other, mine in times if other and mine]
    ratio = f"{statistics.geometric_mean(both):.2f}x" if both else "-"
    if regret is None:
        return ratio
    reach = [sum(pair[place] is not None for pair in times) / len(times) for place in (1, 0)]
    return f"{ratio} (reach {reach[0]:.0%} / {reach[1]:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with YAHPO Gym's files")
    parser.add_argument("--tasks", default=TASKS, help="of LCBench, separated by commas (default: every third one)")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    played = {}
    for task in arguments.tasks.split(","):
        benchmark = source_by_name(f"lcbench:{task}", arguments.data)
        for way in WAYS:
            for seed in range(arguments.seeds):
                outcome = play(benchmark, way, arguments.devices, arguments.samples, seed)
                found: dict[Any, Any] = {r: outcome.seconds_to(benchmark.value_at(r)) for r in REGRETS}
                best = benchmark.worst_known if outcome.best is None else outcome.best
                found |= {"makespan": outcome.makespan_s, "regret": benchmark.regret(best)}
                played[task, way, seed] = found
    console = Console(width=120)
    console.print(f"{arguments.devices} devices, {arguments.samples} trials, {arguments.seeds} seeds; {machine()}")
    for way in ("asha", "tpe to the budget"):
        console.print(table_of(played, way))


if __name__ == "__main__":
    main()
