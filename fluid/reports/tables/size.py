"""What a deadline costs on fixed numbers of devices and on as many as the sizer decides: a table, and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fluid.display.format import count, dollar_column, dollars, duration, durations, figures, number, percent, times

if TYPE_CHECKING:
    from fluid.simulation.size_comparison import SizeComparison, SizeFigures
    from fluid.simulation.sized import HeldResult


_BARS = "▁▂▃▄▅▆▇█"
_BEST = "bold green"
#: Characters of the line of devices over time.
_LINE = 60


def size_table(comparison: SizeComparison, title: str, unit: str, *, compact: bool = False) -> Group:
    """A line for each fixed number of devices, and for the sizer; the cheapest number that suffices is marked.

    Args:
        comparison: the runs.
        title: the line above the table.
        unit: the word for a device.
        compact: for narrow terminals: fewer columns.
    """
    rows = [*comparison.fixed, *comparison.sized]
    cheapest = comparison.cheapest
    columns = {
        f"{unit}s": [_name(row) for row in rows],
        "half by": durations([row.median_s for row in rows]),
        "90 % by": durations([row.late_s for row in rows]),
        "met": ["-" if row.met is None else percent(row.met) for row in rows],
        f"{unit}-h": figures([row.device_hours for row in rows]),
    }
    if comparison.goals.price_per_device_hour is not None:
        costs = dollar_column([row.cost_usd or 0.0 for row in rows])
        columns["cost"] = [cost + (" *" if row is cheapest else "  ") for cost, row in zip(costs, rows, strict=True)]
    if any(run.preempted for row in rows for run in row.runs):
        columns["taken"] = [number(sum(run.preempted for run in row.runs) / len(row.runs)) for row in rows]
    if compact:
        columns = {name: cells for name, cells in columns.items() if name not in ("half by", "taken")}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if compact else 2, 0, 0), pad_edge=False)
    for header in columns:
        table.add_column(header, justify="left" if header == f"{unit}s" else "right", no_wrap=True)
    last_fixed = len(comparison.fixed) - 1
    for index, cells in enumerate(zip(*columns.values(), strict=True)):
        style = _BEST if rows[index] is cheapest else ""
        table.add_row(*cells, style=style, end_section=index == last_fixed)
    note = "half by, 90 % by: when so many runs have ended; met: share of the runs that met the goals"
    if "taken" in columns:
        note += "; taken: devices taken back"
    if cheapest is not None and "cost" in columns:
        note = f"* cheapest fixed number that meets the goals in {percent(comparison.goals.odds)}; {note}"
    return Group(Text(title, style="bold"), table, Text(note, style="dim"), "")


def size_text(comparison: SizeComparison, unit: str, most: int) -> Text:
    """What the table says, in words.

    Args:
        comparison: the runs.
        unit: the word for a device.
        most: devices that could be had.
    """
    goals, first = comparison.goals, comparison.first
    text = Text()
    if goals.deadline_s is not None:
        text.append(f"Deadline {duration(goals.deadline_s)}: ", style="bold")
        if first.meets is False and first.earliest_s is not None:
            text.append(
                f"cannot be met with {percent(goals.odds)} on up to {count(most, unit)}, by what is known at the "
                f"start; the earliest that can is {duration(first.earliest_s)}.\n"
            )
        elif first.meets:
            text.append(f"begins on {count(first.devices, unit)}, by what is known at the start.\n")
        elif first.meets is False:
            text.append(
                f"cannot be met with {percent(goals.odds)} within the budget, by what is known at the start; begins on "
                f"{count(first.devices, unit)}.\n"
            )
        else:
            text.append(f"nothing is known at the start; it is measured on {count(first.devices, unit)} first.\n")
    if goals.budget_usd is not None:
        text.append(f"Budget {dollars(goals.budget_usd)}: ", style="bold")
        if first.cost_usd is None or first.within_budget is None:
            text.append("whether it suffices is not known at the start.\n")
        else:
            verdict = "suffices" if first.within_budget else "does not suffice"
            text.append(f"{verdict}; at the start {dollars(first.cost_usd)} are expected.\n")
    for row in comparison.sized:
        text.append(f"{_name(row).capitalize()}: ", style="bold")
        text.append(_verdict(row, comparison, unit) + "\n")
    return text


def held_line(run: HeldResult, unit: str, seed: int) -> Text:
    """The devices of one run over time, as a line of bars.

    Args:
        run: the run.
        unit: the word for a device.
        seed: of the run.
    """
    end = run.simulation.makespan
    most = max(held for _, held in run.held)
    bars = ""
    for position in range(_LINE):
        at = (position + 0.5) / _LINE * end
        held = next((held for since, held in reversed(run.held) if since <= at), 0)
        bars += " " if not held else _BARS[max(0, math.ceil(len(_BARS) * held / most) - 1)]
    text = Text(f"{unit}s over time, seed {seed}: at most {most}, ends after {duration(end)}\n")
    text.append(bars)
    return text


def sizes_as_json(comparison: SizeComparison) -> dict[str, Any]:
    """The output of ``fluid simulate --json`` with ``--deadline`` or ``--budget``.

    * ``scenario``, ``seed``, ``seeds`` (their number), ``planner``
    * ``deadline_s``, ``budget_usd``, ``price_per_device_hour`` and ``odds``: the goals, and with which odds they are to
      be met
    * ``first``: the decision at the start: ``devices``, whether it ``meets`` the goals and with which ``odds``,
      ``earliest_s`` end, ``cost_usd``, and whether that is ``within_budget``
    * ``fixed``: of each fixed number of ``devices`` (``null`` where sized), ``preemptible``, ``met`` (share of the
      seeds), ``median_s`` and ``late_s`` (when half and 90 % have ended), ``device_hours``, ``cost_usd``, and devices
      ``taken_back``; ``cheapest_fixed``: the number that meets the goals for least
    * ``sized``: the same where the devices are sized, and ``held``, how many were held from when on, with the first
      seed
    """
    goals, first = comparison.goals, comparison.first
    return {
        "deadline_s": goals.deadline_s,
        "budget_usd": goals.budget_usd,
        "price_per_device_hour": goals.price_per_device_hour,
        "odds": goals.odds,
        "first": {
            "devices": first.devices,
            "meets": first.meets,
            "odds": first.odds,
            "earliest_s": first.earliest_s,
            "cost_usd": first.cost_usd,
            "within_budget": first.within_budget,
        },
        "fixed": [_row_json(row) for row in comparison.fixed],
        "cheapest_fixed": None if comparison.cheapest is None else comparison.cheapest.devices,
        "sized": [{**_row_json(row), "held": [list(each) for each in row.runs[0].held]} for row in comparison.sized],
    }


def _row_json(row: SizeFigures) -> dict[str, Any]:
    return {
        "devices": row.devices,
        "preemptible": row.preemptible,
        "met": row.met,
        "median_s": row.median_s,
        "late_s": row.late_s,
        "device_hours": row.device_hours,
        "cost_usd": row.cost_usd,
        "taken_back": sum(run.preempted for run in row.runs) / len(row.runs),
    }


def _name(row: SizeFigures) -> str:
    if row.devices is not None:
        return str(row.devices)
    return "sized, preemptible" if row.preemptible else "sized"


def _verdict(row: SizeFigures, comparison: SizeComparison, unit: str) -> str:
    most = max(held for run in row.runs for _, held in run.held)
    what = f"{number(row.device_hours)} {unit}-hours" if row.cost_usd is None else dollars(row.cost_usd)
    met = "" if row.met is None else f"meets the goals in {percent(row.met)} of the runs, "
    sentence = f"{met}for {what} on up to {count(most, unit)}"
    cheapest = comparison.cheapest
    if cheapest is None or not cheapest.device_hours:
        few = ", ".join(str(each.devices) for each in _sorted(comparison.fixed))
        return f"{sentence}; no fixed number ({few}) meets them in {percent(comparison.goals.odds)}."
    if row.cost_usd is None or cheapest.cost_usd is None or not cheapest.cost_usd:
        ratio = row.device_hours / cheapest.device_hours
    else:
        ratio = row.cost_usd / cheapest.cost_usd
    assert cheapest.devices is not None
    return f"{sentence}: {times(ratio)} the cost of {count(cheapest.devices, unit)} all the time."


def _sorted(rows: Sequence[SizeFigures]) -> list[SizeFigures]:
    return sorted(rows, key=lambda row: row.devices or 0)
