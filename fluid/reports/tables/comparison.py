"""Compares simulated runs: planners on one cluster, and one workload on clusters of different sizes.

:func:`advise` answers "how many GPUs should I use".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fluid.display.format import duration, durations, figures, number, percent, times
from fluid.reports.analysis.knee import Knee

if TYPE_CHECKING:
    from fluid.simulation.simulation_result import SimulationResult


_BEST = "bold green"


@dataclass(frozen=True)
class ClusterSizeAdvice:
    """How many devices to use, from a sweep over their number.

    Attributes:
        planner: the planner with the shortest makespans over the whole sweep.
        runs: its runs, by number of devices.
        fastest: its run with the shortest makespan; among equals, on the fewest devices.
        cheapest: its run with the fewest device-hours; among equals, with the shortest makespan.
        knee: its run on the most devices up to which adding devices paid.
        knee_found: that number, and what the step to it saved.
    """

    planner: str
    runs: tuple[SimulationResult, ...]
    fastest: SimulationResult
    cheapest: SimulationResult
    knee: SimulationResult
    knee_found: Knee


def comparison_table(
    results: Sequence[SimulationResult], fifo_makespan: float, title: str, *, compact: bool = False
) -> Group:
    """Compares planners on one cluster: a line for each; the shortest makespan is marked.

    Args:
        results: at least one run of one scenario.
        fifo_makespan: seconds; the reference of the speed-ups.
        title: the line above the table.
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
        "fused": [str(result.peak_rows) for result in results],
    }
    if results[0].peak_rows is None:
        del columns["fused"]
    if not any(result.stopped for result in results):
        del columns["stopped"]
    if compact:
        columns = {header: columns[header] for header in ("planner", "makespan", "speed-up", "busy")}
    note = "* shortest makespan; speed-up: over fifo"
    if "to bound" in columns:
        note += "; to bound: makespan / lower bound"
    table = _table(columns, best, compact=compact)
    return Group(Text(title, style="bold"), table, Text(note, style="dim"))


def sweep_table(results: Sequence[SimulationResult], title: str, *, compact: bool = False) -> Group:
    """Compares numbers of devices and planners: a line for each pair; the shortest makespan of each number is marked.

    Args:
        results: runs of the planners on several numbers of devices.
        title: the line above the table.
        compact: for narrow terminals: fewer columns.
    """
    ordered = sorted(results, key=lambda result: result.n)
    shortest = {n: min(run.makespan for run in runs) for n, runs in groupby(ordered, key=lambda run: run.n)}
    best = [_is_best(result, shortest[result.n]) for result in ordered]
    # The number of devices is shown in the first of its lines only.
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
    """Recommends numbers of devices, for the best of the compared planners.

    Args:
        results: a run of every planner on every number of devices.
    """
    planners = list(dict.fromkeys(result.planner for result in results))
    by_planner = {
        planner: sorted((r for r in results if r.planner == planner), key=lambda r: r.n) for planner in planners
    }
    # In logarithms every number of devices counts the same, although makespans on few devices are far longer. Of two
    # equal planners the later in the list wins, as it is the more capable one.
    best = min(
        reversed(planners),
        key=lambda planner: sum(math.log(max(run.makespan, 1e-12)) for run in by_planner[planner]),
    )
    runs = by_planner[best]
    found = Knee.of([(run.n, run.makespan) for run in runs])
    return ClusterSizeAdvice(
        best,
        tuple(runs),
        min(runs, key=lambda run: (run.makespan, run.n)),
        min(runs, key=lambda run: (run.device_hours, run.makespan)),
        next(run for run in runs if run.n == found.n),
        found,
    )


def advice_text(advice: ClusterSizeAdvice) -> Text:
    """The advice as sentences."""
    unit = unit_name([advice.fastest])
    longest = max(advice.fastest.makespan, advice.cheapest.makespan, advice.knee.makespan)
    text = Text()
    text.append(f"How many {unit}s? ", style="bold")
    text.append(f"With {advice.planner}, the planner with the shortest makespans:\n")
    for name, run in (("fastest", advice.fastest), ("cheapest", advice.cheapest), ("knee", advice.knee)):
        text.append(f"  {name:<10}", style="bold")
        makespan = duration(run.makespan, like=longest)
        text.append(f"{_plural(run.n, unit)}: {makespan}, {number(run.device_hours)} {unit}-hours\n")
    text.append(advice.knee_found.sentence(unit))
    return text


def unit_name(results: Sequence[SimulationResult]) -> str:
    """The word for a device: ``GPU`` or ``core``."""
    return "GPU" if results[0].cluster.devices[0].kind == "gpu" else "core"


def as_json(results: Sequence[SimulationResult], advice: ClusterSizeAdvice | None = None) -> dict[str, Any]:
    """The output of ``fluid simulate --json``, after ``scenario`` and ``seed``.

    * ``results``: of each run ``planner``, ``devices``, ``makespan_s``, ``lower_bound_s`` (0 if it is unknown),
      ``utilisation`` (0 to 1), ``device_hours``, ``resizes``, ``trials``, ``stopped`` early, and, of scenarios with
      ``fused``, ``peak_rows``, most trials that took a step together
    * ``advice``, with several numbers of devices: ``planner``, and the numbers that are ``fastest``, ``cheapest`` and
      the ``knee``: the largest number up to which each step saves at least half of the time that perfect scaling would
      save
    """
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
                **({} if result.peak_rows is None else {"peak_rows": result.peak_rows}),
            }
            for result in results
        ]
    }
    if advice is not None:
        chosen = {"fastest": advice.fastest.n, "cheapest": advice.cheapest.n, "knee": advice.knee.n}
        data["advice"] = {"planner": advice.planner, **chosen}
    return data


def _plural(n: int, unit: str) -> str:
    return f"{n} {unit}" if n == 1 else f"{n} {unit}s"


def _table(
    columns: Mapping[str, Sequence[str]], best: Sequence[bool], sections: Collection[int] = (), *, compact: bool
) -> Table:
    """A table from its columns by header. The best lines are highlighted; a gap follows each line in ``sections``."""
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


# -- workload table ------------------------------------------------------------------------------
#
# Compares simulated group policies: which of several workloads ended when.


def policy_tables(results: Sequence[SimulationResult], title: str) -> Group:
    """A line for each run, and below it a line for each workload, with how long it took from its arrival.

    Args:
        results: at least one run of one scenario with several workloads; the runs differ in planner or group policy.
        title: the line above the tables.
    """
    planners = {result.planner for result in results}
    labels = [r.group_policy if len(planners) == 1 else f"{r.planner} {r.group_policy}" for r in results]
    shortest = min(result.mean_completion for result in results)
    best = [result.mean_completion <= shortest * (1.0 + 1e-9) for result in results]
    means = durations([result.mean_completion for result in results])
    longest = durations([max(workload.completion for workload in result.workloads) for result in results])
    makespans = durations([result.makespan for result in results])
    met = [[workload.met for workload in result.workloads if workload.met is not None] for result in results]
    headers = ("policy", "mean completion", "longest", "makespan", "busy", *(["deadlines met"] if met[0] else []))
    policies = _workload_table(headers)
    for place, (label, mean, most, makespan, result, is_best) in enumerate(
        zip(labels, means, longest, makespans, results, best, strict=True)
    ):
        mark = "*" if is_best else " "
        of_all = [f"{sum(met[place])} of {len(met[place])}"] if met[0] else []
        row = (label, f"{mean} {mark}", most, makespan, percent(result.utilisation), *of_all)
        policies.add_row(*row, style=_BEST if is_best else "")
    first = results[0].workloads
    due = durations([workload.deadline for workload in first if workload.deadline is not None])
    workloads = _workload_table(("workload", "owner", "trials", "arrived", *(["deadline"] if due else []), *labels))
    arrived = durations([workload.arrived for workload in first])
    taken = [durations([workload.completion for workload in result.workloads]) for result in results]
    for place, workload in enumerate(first):
        times = [
            column[place] + (" late" if result.workloads[place].met is False else "")
            for column, result in zip(taken, results, strict=True)
        ]
        by = [("" if workload.deadline is None else due.pop(0))] if met[0] else []
        workloads.add_row(workload.name, workload.owner, str(workload.trials), arrived[place], *by, *times)
    tables: list[Any] = [Text(title, style="bold"), policies, workloads]
    of_owner = [result.mean_completions for result in results]
    if 1 < len(of_owner[0]) < len(first):
        owners = _workload_table(("owner", *labels))
        columns = [durations(list(means.values())) for means in of_owner]
        for place, owner in enumerate(of_owner[0]):
            owners.add_row(owner, *(column[place] for column in columns))
        tables.append(owners)
    note = "* shortest mean completion; completion: from a workload's arrival to its end"
    return Group(*tables, Text(note, style="dim"))


def policies_as_json(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """The output of ``fluid simulate --json`` for several workloads: as for one, and of each run besides

    * ``group_policy``, ``mean_completion_s`` from a workload's arrival to its end, ``mean_completion_s_of_owners``
    * ``workloads``: of each ``name``, ``owner``, ``arrived_s``, ``completion_s``, ``trials``, and, with a deadline,
      ``deadline_s`` from its arrival (of steps the first) and ``deadline_met``
    """
    data = as_json(results)
    for run, result in zip(data["results"], results, strict=True):
        run["group_policy"] = result.group_policy
        run["mean_completion_s"] = result.mean_completion
        run["mean_completion_s_of_owners"] = result.mean_completions
        run["workloads"] = [
            {
                "name": workload.name,
                "owner": workload.owner,
                "arrived_s": workload.arrived,
                "completion_s": workload.completion,
                "trials": workload.trials,
                **({} if workload.met is None else {"deadline_s": workload.deadline, "deadline_met": workload.met}),
            }
            for workload in result.workloads
        ]
    return data


def _workload_table(headers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in ("policy", "workload", "owner") else "right", no_wrap=True)
    return table
