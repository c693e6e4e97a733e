"""Rehearsed sweeps of LCBench: what planning gains over first come first served, on clusters that are not at hand.

    python benchmarks/rehearsal.py --data DIR [--jobs 2] [--full] [--minutes M] [--cells FILE] [--out FILE] [--png FILE]

The engine, the planner and the search algorithms are the real ones. The trials are replayed from YAHPO Gym's surrogate
of LCBench (small networks on 34 tables of data), on a virtual clock: nothing of this is measured on devices. Both
planners pay the same overheads, which are assumed: packing two, three, four trials on a device gives 1.54, 1.78, 1.82
times the throughput (alpha 1.3; published figures for training on one GPU are 1.2 to 1.8), two, three, four devices
make a trial 1.54, 1.78, 1.82 times as fast (beta 1.3), a resize takes 1 s, and a trial is set up in 1 s.

A sweep has 64 trials of at most 52 epochs; BOHB has 73, as its brackets are whole, and PBT a population of 16. The
target is a normalised regret: 0 is the best value of 2,000 random configs, 1 the worst one at the end.

Two sweeps are a pair if they have the same task, seed, devices and algorithm. Times to a target are compared in the
pairs of which both sweeps reach it. Beside these means, the table says what share of the sweeps reach it at all: a way
that reaches it less often is compared on the easier pairs only.

What is compared is not the same work in all algorithms:

* random search and Hyperband: all sweeps of a pair have the same configs, and give each the same epochs;
* ASHA: the same configs, but which of them continue depends on the order in which results come;
* TPE, BOHB and PBT (marked by *): the searcher sees results in another order, and suggests other configs from the first
  of them on. Makespans and device-hours of a pair are those of other configs, whose epochs may take several times as
  long; only over many pairs do such differences cancel out.

Cells that are in the file of ``--cells`` are not played again. Sweeps that fail are told at once and at the end, and
are played in the next run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from datetime import date
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from measuring import machine
from rich.console import Console
from rich.table import Table

from fluid.errors import require_one_of
from fluid.integrations.comparing.algorithms import BenchmarkSweep
from fluid.planners.portfolio import Portfolio
from fluid.rehearsal import Overheads
from fluid.rehearsal.sources import folder_of, source_by_name
from fluid.rehearsal.yahpo import tasks_of

OVERHEADS = Overheads(alpha=1.3, beta=1.3, epsilon=1.0, start_s=1.0, source="assumed: see benchmarks/rehearsal.py")
SAMPLES = 64
DEVICES = (4, 16, 64)
REGRETS = (0.05, 0.01)
#: Options of the executor for each way to run a sweep. First come first served neither packs nor widens.
WAYS: dict[str, dict[str, Any]] = {
    "portfolio": {},
    "fifo": {"planner": "fifo"},
    "without packing": {"max_packing": 1},
    "without widening": {"max_width": 1},
    "without turns": {},
}
ABLATIONS = ("without packing", "without widening", "without turns")
#: Their searchers see results in another order under another planner, and suggest other configs.
LEARNING = ("tpe", "hpbandster-bohb", "raytune-pbt")
NOTES = (
    "to 5 %, to 1 %: geometric means over the pairs of which both sweeps reach that regret; reach: the shares of "
    "sweeps that do, of this way and of the portfolio planner",
    "* the searcher sees results in another order and suggests other configs, so that makespans and device-hours "
    "compare sweeps of other configs",
)
#: Tasks of the part with fewer tasks: every sixth.
_FEW = 6
HERE = Path(__file__).resolve().parent


class Cell(NamedTuple):
    """One sweep."""

    task: str
    algorithm: str
    devices: int
    way: str
    seed: int

    @property
    def name(self) -> str:
        """Identifies it in the file of cells."""
        return "|".join(map(str, self))


def cells_of(tasks: Sequence[str], *, full: bool) -> list[Cell]:
    """The cells to play, the main part first."""
    few = tasks if full else tasks[::_FEW][:_FEW]
    seeds = range(10 if full else 2)
    parts = [
        (tasks, ("random", "asha", "hyperband"), ("portfolio", "fifo"), seeds),
        (few, ("tpe", "hpbandster-bohb", "raytune-pbt"), ("portfolio", "fifo"), seeds),
        (few, ("random", "asha", "hyperband"), ABLATIONS, seeds),
    ]
    return [
        Cell(task, algorithm, devices, way, seed)
        for tasks_, algorithms, ways, seeds_ in parts
        for task in tasks_
        for algorithm in algorithms
        for devices in DEVICES
        for way in ways
        for seed in seeds_
    ]


@contextmanager
def _without_turns(way: str) -> Iterator[None]:
    """Makes the portfolio planner preempt no trials."""
    before = Portfolio.preempts
    Portfolio.preempts = before and way != "without turns"
    try:
        yield
    finally:
        Portfolio.preempts = before


@lru_cache(maxsize=4)
def _benchmark(task: str, data: str) -> Any:
    return source_by_name(f"lcbench:{task}", data)


def play(cell: Cell, data: str) -> dict[str, Any]:
    """Plays a sweep; returns its figures."""
    benchmark = _benchmark(cell.task, data)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, _without_turns(cell.way):
        outcome = BenchmarkSweep(
            benchmark=benchmark,
            algorithm=cell.algorithm,
            devices=cell.devices,
            samples=SAMPLES,
            seed=cell.seed,
            overheads=OVERHEADS,
            options=WAYS[cell.way],
        ).play(Path(folder) / "run")
    return {
        "cell": cell.name,
        "makespan_s": outcome.makespan_s,
        "device_hours": outcome.device_hours,
        "busy": outcome.busy_share,
        "results": outcome.results,
        "trials": outcome.trials,
        "regret": None if outcome.best is None else benchmark.regret(outcome.best),
        **{f"to_{regret:g}": outcome.seconds_to(benchmark.value_at(regret)) for regret in REGRETS},
        "wall_s": time.perf_counter() - began,
    }


def read_cells(path: Path) -> dict[str, dict[str, Any]]:
    """Figures of cells that were played, by name."""
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # A run that was killed has left a part of a line.
            found = json.loads(line)
            known[found["cell"]] = found
    return known


class Played(NamedTuple):
    """What came of cells.

    Attributes:
        known: the figures of those played, now or before, by name.
        failed: names of those that failed now.
    """

    known: dict[str, dict[str, Any]]
    failed: list[str]


def play_all(wanted: Sequence[Cell], data: str, path: Path, *, jobs: int, minutes: float) -> Played:
    """Plays cells that were not played yet, until the time is over."""
    known, failed = read_cells(path), list[str]()
    todo = [cell for cell in wanted if cell.name not in known]
    began, until = time.monotonic(), time.monotonic() + 60.0 * minutes
    # Fresh processes: this one has threads of the libraries that it has loaded, of which a fork would keep the locks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool, path.open("a+", encoding="utf-8") as file:
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write("\n")
        waiting = iter(todo)
        running = {pool.submit(play, cell, data): cell for cell in islice(waiting, 2 * jobs)}
        done = 0
        while running:
            future = next(as_completed(running))
            cell = running.pop(future)
            try:
                found = future.result()
            except Exception as error:
                failed.append(cell.name)
                print(f"{cell.name} failed:\n{''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
            else:
                known[cell.name] = found
                file.write(json.dumps(found) + "\n")
                file.flush()
            done += 1
            if done % 25 == 0:
                left = (len(todo) - done) * (time.monotonic() - began) / done
                print(f"{done} of {len(todo)} sweeps, {left / 60:.0f} minutes left", file=sys.stderr)
            following = next(waiting, None) if time.monotonic() < until else None
            if following is not None:
                running[pool.submit(play, following, data)] = following
    return Played(known, failed)


def compare(known: Mapping[str, Mapping[str, Any]], way: str) -> list[dict[str, Any]]:
    """A way to run sweeps over the portfolio planner, by algorithm and number of devices, and over all of them."""
    pairs: dict[tuple[str, str], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = defaultdict(list)
    for name, found in known.items():
        task, algorithm, devices, mine, seed = name.split("|")
        ours = known.get("|".join([task, algorithm, devices, "portfolio", seed]))
        if mine == way and ours is not None:
            for key in ((algorithm, devices), (algorithm, "all"), ("all", "all")):
                pairs[key].append((found, ours))
    names = ["random", "asha", "hyperband", "tpe", "hpbandster-bohb", "raytune-pbt", "all"]
    order = {name: rank for rank, name in enumerate(names)}
    rows = []
    for (algorithm, devices), found_pairs in sorted(
        pairs.items(), key=lambda item: (order[item[0][0]], item[0][1] == "all", item[0][1].zfill(3))
    ):
        row: dict[str, Any] = {"way": way, "algorithm": algorithm, "devices": devices, "pairs": len(found_pairs)}
        for figure in ("to_0.05", "to_0.01", "makespan_s", "device_hours"):
            ratios = [other[figure] / ours[figure] for other, ours in found_pairs if other[figure] and ours[figure]]
            row[figure] = statistics.geometric_mean(ratios) if ratios else None
            row[f"{figure}_pairs"] = len(ratios)
        for regret in REGRETS:
            for side, which in (("reached", 0), ("reached_portfolio", 1)):
                reached = [pair[which][f"to_{regret:g}"] is not None for pair in found_pairs]
                row[f"{side}_{regret:g}"] = statistics.fmean(reached)
        # Whether makespans of its pairs are those of other configs.
        row["other_configs"] = algorithm in LEARNING or (
            algorithm == "all" and any(found["cell"].split("|")[1] in LEARNING for found, _ in found_pairs)
        )
        rows.append(row)
    return rows


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of :func:`compare`, for people."""
    drawn = Table(
        title="Simulated: figures over those of the portfolio planner (geometric means), trials replayed from LCBench",
        caption="\n".join(NOTES),
        caption_justify="left",
    )
    columns = ("to 5 %", "reach", "to 1 %", "reach", "makespan", "device-hours")
    for column in ("way", "algorithm", "devices", "pairs", *columns):
        drawn.add_column(column, justify="left" if column in ("way", "algorithm") else "right", no_wrap=True)
    for row in rows:
        figures = [row[name] for name in ("to_0.05", "to_0.01", "makespan_s", "device_hours")]
        shown = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
        for place, regret in ((1, "0.05"), (3, "0.01")):
            shown.insert(
                place, f"{100 * row[f'reached_{regret}']:.0f}, {100 * row[f'reached_portfolio_{regret}']:.0f} %"
            )
        drawn.add_row(row["way"], _marked(row), str(row["devices"]), str(row["pairs"]), *shown)
    return drawn


def _marked(row: Mapping[str, Any]) -> str:
    """The algorithm of a row, with a star if the makespans of its pairs are those of other configs."""
    return f"{row['algorithm']} *" if row["other_configs"] else str(row["algorithm"])


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws how many times as long first come first served takes to 5 % regret, by algorithm and devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["way"] == "fifo" and row["devices"] != "all" and row["to_0.05"]]
    algorithms = list(dict.fromkeys(row["algorithm"] for row in shown))
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for offset, devices in enumerate(DEVICES):
        heights = {row["algorithm"]: row["to_0.05"] for row in shown if row["devices"] == str(devices)}
        places = [place + 0.27 * (offset - 1) for place, name in enumerate(algorithms) if name in heights]
        axes.bar(places, [heights[name] for name in algorithms if name in heights], 0.25, label=f"{devices} devices")
    axes.axhline(1.0, color="black", linewidth=0.8)
    marks = {row["algorithm"]: _marked(row) for row in shown}
    axes.set_xticks(range(len(algorithms)), [marks[name] for name in algorithms])
    if any(row["other_configs"] for row in shown):
        axes.set_xlabel("* the searcher sees results in another order, and suggests other configs", fontsize=8)
    axes.set_ylabel("time to 5 % regret, where both reach it:\nfirst come first served over Fluid")
    axes.set_title("Simulated: 64 trials of LCBench, replayed; overheads assumed (alpha 1.3, beta 1.3)", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with YAHPO Gym's lcbench; $FLUID_BENCHMARKS by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--full", action="store_true", help="all algorithms on all tasks, with 10 seeds")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no sweep begins later")
    parser.add_argument("--tasks", help="only these, separated by commas")
    parser.add_argument("--cells", type=Path, default=Path("rehearsal_cells.jsonl"), help="figures of single sweeps")
    parser.add_argument("--out", type=Path, help="JSON file for the means")
    parser.add_argument("--png", type=Path, help="picture")
    given = parser.parse_args(arguments)
    data = str(folder_of(given.data))
    tasks = tasks_of("lcbench", Path(data))
    if given.tasks:
        tasks = [require_one_of("tasks", task.strip(), tasks) for task in given.tasks.split(",")]
    wanted = cells_of(tasks, full=given.full)
    known, failed = play_all(wanted, data, given.cells, jobs=given.jobs, minutes=given.minutes)
    names = {cell.name for cell in wanted}
    known = {name: found for name, found in known.items() if name in names}
    rows = [row for way in WAYS if way != "portfolio" for row in compare(known, way)]
    Console(width=120).print(table_of(rows))
    if given.png is not None:
        draw(rows, given.png)
    if given.out is not None:
        facts = {"machine": machine(), "date": date.today().isoformat(), "samples": SAMPLES, "sweeps": len(known)}
        facts |= {"failed": failed, "overheads": OVERHEADS.source, "notes": NOTES}
        wall = sum(found["wall_s"] for found in known.values())
        content = {**facts, "wall_s": wall, "rows": rows}
        given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if len(known) < len(wanted):
        print(f"{len(wanted) - len(known)} of {len(wanted)} sweeps were not played", file=sys.stderr)
    if failed:
        sys.exit(f"{len(failed)} sweeps failed: {', '.join(failed)}; the same command plays them again")


if __name__ == "__main__":
    main()
