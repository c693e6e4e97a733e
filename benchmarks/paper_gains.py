"""What of a gain over Ray Tune is scheduling and what is start-up, by algorithm, beside the paper's ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: How many times as long an algorithm takes without Fluid in the paper's Figure 3.7 (time to a target, three tasks, 8
#: GPUs), by its text: least and most. The figure has no numbers. It leaves three algorithms out: of random and grid
#: search the text says 10 to 70 %, as for all workloads; Successive Halving is synchronous, which gains 30 to 100 %.
PAPER: Mapping[str, tuple[float, float]] = {
    "random": (1.1, 1.7),
    "grid": (1.1, 1.7),
    "sha": (1.3, 2.0),
    "hyperband": (1.3, 2.0),
    "asha": (1.1, 1.3),
    "bohb": (1.1, 1.3),
    "syncbohb": (2.0, 2.0),
    "pbt": (1.0, 1.1),  # "Limited".
}
#: Runs of one workload under one algorithm, by system.
Runs = Mapping[str, Sequence[Mapping[str, Any]]]


class Gain(NamedTuple):
    """Geometric means of ratios of runs with the same seed; ``None`` where a system was not measured.

    Attributes:
        paper: the least and the most that the paper reports.
        total: seconds from the call to the end of the last iteration, Ray Tune's over Fluid's.
        scheduling: seconds from the first iteration's start to the last one's end, under Fluid's engine with
            ``planner="fifo", packing="off"`` over those under its defaults: both start trials in the same way.
        seeds: how many runs ``scheduling`` is the mean of.
        unpacked: that of ``packing="off"`` over the defaults: what packing gains.
        to_target: as ``scheduling``, but to the first result at the target.
        reused: as ``scheduling``, of Ray Tune with ``reuse_actors=True``: an actor is warm after its first trial.
        busy: shares of the devices' time, first come first served and with Fluid's defaults.
    """

    paper: tuple[float, float]
    total: float | None
    scheduling: float | None
    seeds: int
    unpacked: float | None
    to_target: float | None
    reused: float | None
    busy: tuple[float, float] | None

    @property
    def start_up(self) -> float | None:
        """The rest of the total: new processes, their imports, and the driver."""
        return None if self.total is None or self.scheduling is None else self.total / self.scheduling

    @property
    def is_as_large(self) -> bool | None:
        """Whether scheduling alone gains at least the least that the paper reports."""
        return None if self.scheduling is None else self.scheduling >= self.paper[0]


def gain_of(algorithm: str, runs: Runs, target: float) -> Gain:
    """Compares the runs of an algorithm.

    Args:
        algorithm: a name in :data:`PAPER`.
        runs: ``paper.Run``, by system.
        target: a value, larger being better. With a seed of which a system does not reach it, what all reach counts.
    """
    by_seed = {system: {run["seed"]: run for run in found} for system, found in runs.items()}

    def ratio(system: str, figure: Callable[[Mapping[str, Any]], float]) -> float | None:
        ours, theirs = by_seed.get("fluid", {}), by_seed.get(system, {})
        found = [figure(theirs[seed]) / figure(ours[seed]) for seed in ours if seed in theirs]
        return statistics.geometric_mean(found) if found else None

    def until(run: Mapping[str, Any]) -> float:
        best = (of_seed[run["seed"]]["curve"][-1][1] for of_seed in by_seed.values() if run["seed"] in of_seed)
        reached = min(target, *best)
        return float(next(seconds for seconds, value in run["curve"] if value >= reached) - run["first"])

    first_come, ours = by_seed.get("fluid_fifo", {}), by_seed.get("fluid", {})
    common = ours.keys() & first_come.keys()
    busy = [statistics.fmean(of_seed[seed]["busy"] for seed in common) for of_seed in (first_come, ours) if common]
    return Gain(
        paper=PAPER[algorithm],
        total=ratio("ray_default", lambda run: run["makespan"]),
        scheduling=ratio("fluid_fifo", _from_first),
        seeds=len(common),
        unpacked=ratio("fluid_unpacked", _from_first),
        to_target=ratio("fluid_fifo", until),
        reused=ratio("ray_reuse_actors", _from_first),
        busy=(busy[0], busy[1]) if busy else None,
    )


def _from_first(run: Mapping[str, Any]) -> float:
    return float(run["makespan"] - run["first"])


def table(title: str, gains: Mapping[str, Gain]) -> Any:
    """The gains by algorithm, for people."""
    from rich.table import Table

    drawn = Table(
        title=f"{title}: what of the gain is scheduling",
        title_justify="left",
        caption="Tune: Ray Tune over Fluid, from the call; scheduling: first come first served on Fluid's engine over "
        "Fluid, from the first iteration on, of which by packing; to target: the same to the target; start-up: Tune / "
        "scheduling; reuse: Ray Tune with reuse_actors=True, from the first iteration on; as large: scheduling is at "
        "least the paper's least",
        caption_justify="left",
    )
    drawn.add_column("algorithm")
    timed = ("Tune", "scheduling", "packing", "to target", "start-up", "reuse")
    for column in ("paper", *timed, "busy fifo", "busy", "as large"):
        drawn.add_column(column, justify="right")
    for name, gain in gains.items():
        least, most = gain.paper
        figures = (gain.total, gain.scheduling, gain.unpacked, gain.to_target, gain.start_up, gain.reused)
        busy = ("-", "-") if gain.busy is None else (f"{share:.0%}" for share in gain.busy)
        large = {None: "-", True: "yes", False: "no"}[gain.is_as_large]
        shown = ["-" if figure is None else f"{figure:.2f}x" for figure in figures]
        drawn.add_row(name, f"{least:g}" if least == most else f"{least:g} to {most:g}", *shown, *busy, large)
    return drawn
