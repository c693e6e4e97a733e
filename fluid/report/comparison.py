"""Simulated runs side by side: planners on one cluster, and clusters of different sizes.

Also the answer to "how many GPUs should I use": see :func:`advise`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fluid.display.format import duration, durations, figures, number, percent, times

if TYPE_CHECKING:
    from fluid.simulation.simulate import SimulationResult

#: A further device paid if its step brought at least this share of what perfect scaling would have.
_PAID = 0.5
_BEST = "bold green"


@dataclass(frozen=True)
class ClusterSizeAdvice:
    """How many devices to use, from a sweep over their number.

    Attributes:
        planner: the planner whose makespans are the shortest over the whole sweep.
        runs: its runs, by number of devices.
        fastest: its run of the shortest makespan; on the fewest devices where several are as short.
        cheapest: its run of the fewest device-hours; the shortest where several cost the same.
        knee: its run on the largest number of devices that adding devices still paid for.
        before_knee: the run one step before; ``None`` where no step paid.
    """

    planner: str
    runs: tuple[SimulationResult, ...]
    fastest: SimulationResult
    cheapest: SimulationResult
    knee: SimulationResult
    before_knee: SimulationResult | None


def comparison_table(
    results: Sequence[SimulationResult], fifo_makespan: float, title: str, *, compact: bool = False
) -> Group:
    """Planners on one cluster, a line each; the shortest makespan is marked.

    Args:
        results: at least one run of one scenario.
        fifo_makespan: seconds; speed-ups are against it.
        title: stands above.
        compact: for narrow terminals: fewer columns.
    """
    shortest = min(result.makespan for result in results)
    best = [_is_best(result, shortest) for result in results]
    columns = {
        "planner": [result.planner for result in results],
        "makespan": _marked(durations([result.makespan for result in results]), best),
        "speed-up": [times(_ratio(fifo_makespan, result.makespan)) for result in results],
        "busy": [percent(result.utilisation) for result in results],
        "to bound": [times(_ratio(result.makespan, result.lower_bound)) for result in results],
        f"{unit_name(results)}-hours": figures([result.device_hours for result in results]),
        "resizes": [str(result.resizes) for result in results],
        "stopped": [str(result.stopped) for result in results],
    }
    if not any(result.stopped for result in results):
        del columns["stopped"]
    if compact:
        columns = {header: columns[header] for header in ("planner", "makespan", "speed-up", "busy")}
    note = "* shortest makespan; speed-up: against fifo"
    if "to bound" in columns:
        note += "; to bound: makespan / lower bound"
    table = _table(columns, best, compact=compact)
    return Group(Text(title, style="bold"), table, Text(note, style="dim"))


def sweep_table(results: Sequence[SimulationResult], title: str, *, compact: bool = False) -> Group:
    """Numbers of devices and planners, a line each; the shortest makespan of each number is marked.

    Args:
        results: planners on several numbers of devices.
        title: stands above.
        compact: for narrow terminals: fewer columns.
    """
    ordered = sorted(results, key=lambda result: result.n)
    shortest = {n: min(run.makespan for run in runs) for n, runs in groupby(ordered, key=lambda run: run.n)}
    best = [_is_best(result, shortest[result.n]) for result in ordered]
    # The number of devices stands once, at the first of its lines.
    first = [index == 0 or ordered[index - 1].n != result.n for index, result in enumerate(ordered)]
    columns = {
        "devices": [str(result.n) if new else "" for result, new in zip(ordered, first, strict=True)],
        "planner": [result.planner for result in ordered],
        "makespan": _marked(durations([result.makespan for result in ordered]), best),
        f"{unit_name(results)}-hours": figures([result.device_hours for result in ordered]),
        "busy": [percent(result.utilisation) for result in ordered],
    }
    if compact:
        columns["hours"] = columns.pop(f"{unit_name(results)}-hours")
        del columns["busy"]
    several = len(ordered) > len(shortest)
    sections = {index - 1 for index, new in enumerate(first) if new} if several else set()
    table = _table(columns, best if several else [False] * len(best), sections, compact=compact)
    note = "* shortest makespan on that many devices"
    return Group(Text(title, style="bold"), table, Text(note, style="dim"), "")


def advise(results: Sequence[SimulationResult]) -> ClusterSizeAdvice:
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
    for before, after in pairwise(runs):
        perfect = before.makespan * (1.0 - before.n / after.n)
        if before.makespan - after.makespan >= _PAID * perfect:
            knee, before_knee = after, before
    return ClusterSizeAdvice(
        best,
        tuple(runs),
        min(runs, key=lambda run: (run.makespan, run.n)),
        min(runs, key=lambda run: (run.device_hours, run.makespan)),
        knee,
        before_knee,
    )


def advice_text(advice: ClusterSizeAdvice) -> Text:
    """The advice in words."""
    unit = unit_name([advice.fastest])
    longest = max(advice.fastest.makespan, advice.cheapest.makespan, advice.knee.makespan)
    text = Text()
    text.append(f"How many {unit}s? ", style="bold")
    text.append(f"With {advice.planner}, the best planner here:\n")
    for name, run in (("fastest", advice.fastest), ("cheapest", advice.cheapest), ("knee", advice.knee)):
        text.append(f"  {name:<10}", style="bold")
        makespan = duration(run.makespan, like=longest)
        text.append(f"{_count(run.n, unit)}: {makespan}, {number(run.device_hours)} {unit}-hours\n")
    text.append(_knee_sentence(advice, unit))
    return text


def unit_name(results: Sequence[SimulationResult]) -> str:
    """What a device is called: GPU or core."""
    return "GPU" if results[0].cluster.devices[0].kind == "gpu" else "core"


def as_json(results: Sequence[SimulationResult], advice: ClusterSizeAdvice | None = None) -> dict[str, Any]:
    """The figures of the runs, and of the advice where there is one, as ``fluid simulate --json`` prints them."""
    data: dict[str, Any] = {
        "results": [
            {
                "planner": result.planner,
                "devices": result.n,
                "makespan_s": result.makespan,
                "lower_bound_s": result.lower_bound,
                "utilisation": result.utilisation,
                "device_hours": result.device_hours,
                "resizes": result.resizes,
                "trials": result.trials,
                "stopped": result.stopped,
            }
            for result in results
        ]
    }
    if advice is not None:
        chosen = {"fastest": advice.fastest.n, "cheapest": advice.cheapest.n, "knee": advice.knee.n}
        data["advice"] = {"planner": advice.planner, **chosen}
    return data


def _knee_sentence(advice: ClusterSizeAdvice, unit: str) -> str:
    knee, before = advice.knee, advice.before_knee
    if before is None:
        return f"No step beyond {_count(knee.n, unit)} cut the makespan by half of what perfect scaling would."
    cut = 1.0 - knee.makespan / before.makespan
    perfect = 1.0 - before.n / knee.n
    said = (
        f"Adding {unit}s paid up to {knee.n}: the step from {before.n} cut the makespan by {percent(cut)}, perfect "
        f"scaling would have cut it by {percent(perfect)}."
    )
    if advice.runs[-1].n > knee.n:
        return f"{said} Further steps cut it by less than half of what perfect scaling would."
    return f"{said} These were the most tried; more may still pay."


def _count(n: int, unit: str) -> str:
    return f"{n} {unit}" if n == 1 else f"{n} {unit}s"


def _table(
    columns: Mapping[str, Sequence[str]], best: Sequence[bool], sections: Collection[int] = (), *, compact: bool
) -> Table:
    """A table of columns by header; lines that are best stand out, and ``sections`` are followed by a gap."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if compact else 2, 0, 0), pad_edge=False)
    for header in columns:
        table.add_column(header, justify="left" if header == "planner" else "right", no_wrap=True)
    for index, cells in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(*cells, style=_BEST if best[index] else "", end_section=index in sections)
    return table


def _is_best(result: SimulationResult, shortest: float) -> bool:
    return result.makespan <= shortest * (1.0 + 1e-9)


def _marked(makespans: Sequence[str], best: Sequence[bool]) -> list[str]:
    return [f"{makespan} {'*' if is_best else ' '}" for makespan, is_best in zip(makespans, best, strict=True)]


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0.0 else math.nan
