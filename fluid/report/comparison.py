"""Simulated runs side by side: planners on one cluster, and clusters of different sizes.

Also the answer to "how many GPUs should I use": see :func:`advise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from fluid.report.words import duration, durations, number, percent, times

if TYPE_CHECKING:
    from fluid.backends.simulated import SimulationResult

#: A further device paid if its step brought at least this share of what perfect scaling would have.
_PAID = 0.5
_BEST = "bold green"


@dataclass(frozen=True)
class Advice:
    """How many devices to use, from a sweep over their number.

    Attributes:
        planner: the planner whose makespans are the shortest over the whole sweep.
        fastest: its run of the shortest makespan; on the fewest devices where several are as short.
        cheapest: its run of the fewest device-hours; the shortest where several cost the same.
        knee: its run on the largest number of devices that adding devices still paid for.
        before_knee: the run one step before; ``None`` where no step paid.
    """

    planner: str
    fastest: SimulationResult
    cheapest: SimulationResult
    knee: SimulationResult
    before_knee: SimulationResult | None


def comparison_table(results: Sequence[SimulationResult], fifo_makespan: float, title: str) -> Table:
    """Planners on one cluster, a line each; the shortest makespan is marked.

    Args:
        results: at least one run of one scenario.
        fifo_makespan: seconds; speed-ups are against it.
        title: the table's title.
    """
    best = min(result.makespan for result in results)
    table = _table(title, "planner")
    for header in ("makespan", "speed-up", "busy", "to bound", f"{unit_name(results)}-hours", "resizes"):
        table.add_column(header, justify="right", no_wrap=True)
    stopped = any(result.stopped for result in results)
    if stopped:
        table.add_column("stopped", justify="right", no_wrap=True)
    makespans = durations([result.makespan for result in results])
    for result, makespan in zip(results, makespans, strict=True):
        is_best = result.makespan <= best * (1.0 + 1e-9)
        cells = [
            result.planner,
            _marked(makespan, is_best),
            times(_ratio(fifo_makespan, result.makespan)),
            percent(result.utilisation),
            times(_ratio(result.makespan, result.lower_bound)),
            number(result.device_hours),
            str(result.resizes),
        ]
        table.add_row(*cells, *([str(result.stopped)] if stopped else []), style=_BEST if is_best else "")
    table.caption = "* shortest makespan; speed-up against fifo; to bound: makespan over the lower bound"
    return table


def sweep_table(results: Sequence[SimulationResult], title: str) -> Table:
    """Numbers of devices and planners, a line each; the shortest makespan of each number is marked."""
    table = _table(title, "devices")
    table.columns[0].justify = "right"
    table.add_column("planner")
    for header in ("makespan", f"{unit_name(results)}-hours", "busy"):
        table.add_column(header, justify="right", no_wrap=True)
    ordered = sorted(results, key=lambda result: result.n)
    makespans = dict(zip(map(id, ordered), durations([result.makespan for result in ordered]), strict=True))
    for n, group in groupby(ordered, key=lambda result: result.n):
        runs = list(group)
        best = min(run.makespan for run in runs)
        for position, run in enumerate(runs):
            is_best = run.makespan <= best * (1.0 + 1e-9)
            table.add_row(
                str(n) if position == 0 else "",
                run.planner,
                _marked(makespans[id(run)], is_best),
                number(run.device_hours),
                percent(run.utilisation),
                style=_BEST if is_best and len(runs) > 1 else "",
                end_section=run is runs[-1] and len(runs) > 1,
            )
    table.caption = "* shortest makespan on that many devices"
    return table


def advise(results: Sequence[SimulationResult]) -> Advice:
    """Says how many devices to use, for the best of the planners compared.

    A step from one number of devices to the next paid if the makespan fell by at least half of what perfect
    scaling would have cut, ``makespan x (1 - before/after)``. The knee is where the last such step led.

    Args:
        results: every planner on every number of devices.
    """
    planners = list(dict.fromkeys(result.planner for result in results))
    by_planner = {
        planner: sorted((r for r in results if r.planner == planner), key=lambda r: r.n) for planner in planners
    }
    # Makespans on few devices are far longer; in logarithms every number of devices counts the same. The later
    # of two equal planners is the more capable one.
    best = min(
        reversed(planners),
        key=lambda planner: sum(math.log(max(run.makespan, 1e-12)) for run in by_planner[planner]),
    )
    runs = by_planner[best]
    knee, before_knee = runs[0], None
    for before, after in zip(runs, runs[1:], strict=False):
        perfect = before.makespan * (1.0 - before.n / after.n)
        if before.makespan - after.makespan >= _PAID * perfect:
            knee, before_knee = after, before
    return Advice(
        best,
        min(runs, key=lambda run: (run.makespan, run.n)),
        min(runs, key=lambda run: (run.device_hours, run.makespan)),
        knee,
        before_knee,
    )


def advice_text(advice: Advice) -> Text:
    """The advice in words."""
    unit = unit_name([advice.fastest])
    text = Text()
    text.append(f"How many {unit}s? ", style="bold")
    text.append(f"With {advice.planner}, the best planner here:\n")
    for name, run in (("fastest", advice.fastest), ("cheapest", advice.cheapest), ("knee", advice.knee)):
        text.append(f"  {name:<9}", style="bold")
        text.append(f"{_count(run.n, unit)}: {duration(run.makespan)}, {number(run.device_hours)} {unit}-hours\n")
    text.append(_about_the_knee(advice, unit))
    return text


def unit_name(results: Sequence[SimulationResult]) -> str:
    """What a device is called: GPU or core."""
    return "GPU" if results[0].cluster.devices[0].kind == "gpu" else "core"


def _about_the_knee(advice: Advice, unit: str) -> str:
    knee, before = advice.knee, advice.before_knee
    if before is None:
        return f"No step beyond {_count(knee.n, unit)} cut the makespan by half of what perfect scaling would."
    cut = 1.0 - knee.makespan / before.makespan
    perfect = 1.0 - before.n / knee.n
    said = (
        f"Up to {_count(knee.n, unit)} more {unit}s paid: the step from {before.n} cut the makespan by "
        f"{percent(cut)}, perfect scaling would have by {percent(perfect)}."
    )
    if advice.fastest.n > knee.n:
        return f"{said} Beyond, a step brings less than half of that."
    return said


def _count(n: int, unit: str) -> str:
    return f"{n} {unit}" if n == 1 else f"{n} {unit}s"


def _table(title: str, first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, title=title)
    table.title_justify = table.caption_justify = "left"
    table.add_column(first)
    return table


def _marked(makespan: str, is_best: bool) -> str:
    return f"{makespan} {'*' if is_best else ' '}"


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0.0 else math.nan
