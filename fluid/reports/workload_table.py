"""Compares simulated group policies: which of several workloads ended when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fluid.display.format import durations, percent
from fluid.reports.comparison import as_json

if TYPE_CHECKING:
    from fluid.simulation.simulation_result import SimulationResult

_BEST = "bold green"


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
    policies = _table(("policy", "mean completion", "longest", "makespan", "busy"))
    for label, mean, most, makespan, result, is_best in zip(
        labels, means, longest, makespans, results, best, strict=True
    ):
        mark = "*" if is_best else " "
        row = (label, f"{mean} {mark}", most, makespan, percent(result.utilisation))
        policies.add_row(*row, style=_BEST if is_best else "")
    first = results[0].workloads
    workloads = _table(("workload", "owner", "trials", "arrived", *labels))
    arrived = durations([workload.arrived for workload in first])
    taken = [durations([workload.completion for workload in result.workloads]) for result in results]
    for place, workload in enumerate(first):
        times = (column[place] for column in taken)
        workloads.add_row(workload.name, workload.owner, str(workload.trials), arrived[place], *times)
    tables: list[Any] = [Text(title, style="bold"), policies, workloads]
    of_owner = [result.mean_completions for result in results]
    if 1 < len(of_owner[0]) < len(first):
        owners = _table(("owner", *labels))
        columns = [durations(list(means.values())) for means in of_owner]
        for place, owner in enumerate(of_owner[0]):
            owners.add_row(owner, *(column[place] for column in columns))
        tables.append(owners)
    note = "* shortest mean completion; completion: from a workload's arrival to its end"
    return Group(*tables, Text(note, style="dim"))


def policies_as_json(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """The output of ``fluid simulate --json`` for several workloads."""
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
            }
            for workload in result.workloads
        ]
    return data


def _table(headers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in ("policy", "workload", "owner") else "right", no_wrap=True)
    return table
