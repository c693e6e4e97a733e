"""What ``fluid plan`` and ``fluid simulate`` print: the table of a plan, its summary line, and a progress bar.

The Gantt chart as text is in :mod:`fluid.reports.figures.text_gantt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fluid.display.format import duration, durations, fraction, percent, placement_name, printable, times
from fluid.display.palette import mark
from fluid.planners.planner import Plan
from fluid.planners.rollout import Segment
from fluid.reports.figures.text_gantt import trial_style
from fluid.reports.run.timeline import Timeline

#: Most trials in the table.
DEFAULT_TABLE_ROWS = 60

T = TypeVar("T")


def track(items: Sequence[T], describe: Callable[[T], str]) -> Iterator[T]:
    """Yields the items, with a progress bar on stderr if that is a terminal. The bar is removed at the end.

    Args:
        items: the work to do.
        describe: names an item in a few words.
    """
    console = Console(stderr=True, markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(items))
        for item in items:
            progress.update(task, description=describe(item))
            yield item
            progress.advance(task)


def plan_table(plan: Plan, *, rows: int = DEFAULT_TABLE_ROWS, compact: bool = False) -> Table:
    """The trials of a plan: runtime alone on one device, allocation, and predicted start and end.

    Args:
        plan: a plan of at least one trial.
        rows: most trials shown; a caption says how many are left out.
        compact: for narrow terminals: only the allocation and the end of each trial.
    """
    ids = plan.instance.trial_ids
    shown = range(min(rows, len(ids)))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.title = f"{len(ids)} trials on {plan.instance.n} devices, planned by {plan.planner}"
    table.title_justify = table.caption_justify = "left"
    columns: dict[str, Sequence[Text | str]] = {
        "": [Text(mark(row), style=trial_style(row)) for row in shown],
        "trial": [Text(printable(ids[row])) for row in shown],
        "alone": durations([float(plan.instance.heights[row]) for row in shown]),
        "gets": [allocation_history(segments) for segments in _histories(plan, shown)],
        "starts": durations([plan.schedule.started[row] for row in shown]),
        "ends": durations([plan.schedule.finished[row] for row in shown]),
    }
    if compact:
        del columns["alone"], columns["starts"]
    for header in columns:
        figures = header in ("alone", "starts", "ends")
        table.add_column(header, justify="right" if figures else "left", no_wrap=figures or not header, overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    if len(ids) > rows:
        table.caption = f"... and {len(ids) - rows} more trials; --json lists the widths of all"
    return table


def allocation_history(segments: Sequence[Segment]) -> str:
    """The devices of a trial over its segments: ``"device 3, then 2 devices"``."""
    ordered = sorted(segments, key=lambda segment: segment.start)
    if not ordered:
        return "-"
    first = placement_name(ordered[0].width, ordered[0].devices)
    later = [_share(segment) for segment in ordered[1:]]
    if len(later) > 2:
        return f"{first}, then {len(later)} resizes to {later[-1]}"
    return ", then ".join([first, *later])


def plan_summary(plan: Plan, fifo_makespan: float) -> Text:
    """The plan as one line: makespan, its ratio to the lower bound, utilisation, and the makespan under FIFO.

    Args:
        plan: the plan.
        fifo_makespan: seconds under FIFO, which runs one trial per device, first come first served.
    """
    timeline = Timeline.of_plan(plan)
    line = Text()
    line.append(f"makespan {duration(plan.makespan)}", style="bold")
    bound = duration(plan.lower_bound, like=plan.makespan)
    line.append(f" ({times(plan.makespan / plan.lower_bound)} the lower bound, {bound})")
    line.append(f"; devices busy {percent(timeline.utilisation)}")
    line.append(f"; FIFO would take {duration(fifo_makespan)} ({times(fifo_makespan / plan.makespan)})")
    return line


def _histories(plan: Plan, rows: range) -> list[list[Segment]]:
    """The segments of each row."""
    histories: dict[int, list[Segment]] = {row: [] for row in rows}
    for segment in plan.schedule.segments:
        if segment.row in histories:
            histories[segment.row].append(segment)
    return list(histories.values())


def _share(segment: Segment) -> str:
    if segment.width < 1.0:
        return f"{fraction(segment.width)} of device {segment.devices[0]}"
    return "1 device" if len(segment.devices) == 1 else f"{len(segment.devices)} devices"
