"""The table of rehearsed sweeps: a line for each number of devices, algorithm or planner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fluid.display.format import dollar_column, durations, figures, number, percent
from fluid.rehearsal.outcome import SweepOutcome
from fluid.reports.rehearsal_figures import SHARES, RehearsedFigures, Spread, ValueScale, figures_of, knee_of


def rehearsal_table(
    outcomes: Mapping[str, Sequence[SweepOutcome]],
    title: str = "",
    *,
    label: str = "devices",
    scale: ValueScale | None = None,
    price: float | None = None,
    compact: bool = False,
) -> Group:
    """Compares ways to run a sweep: medians over seeds, with the range of those figures that are to be compared.

    Args:
        outcomes: those of each way, one for each seed, by name.
        title: the line above the table.
        label: what the names are.
        scale: the best and worst values that are known, for regret; ``None`` for the best that any of them found.
        price: US dollars for a device-hour; ``None`` to leave dollars out.
        compact: for narrow terminals: without ranges.
    """
    rows = figures_of(outcomes, scale=scale, price=price)
    knee = knee_of(rows) if label == "devices" else None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if compact else 2, 0, 0), pad_edge=False)
    columns = _columns(rows, label, compact=compact)
    for header in columns:
        table.add_column(header, justify="left" if header == label and label != "devices" else "right", no_wrap=True)
    for row, cells in zip(rows, zip(*columns.values(), strict=True), strict=True):
        table.add_row(*cells, style="bold green" if knee is not None and row.devices == knee.n else "")
    lines = [Text(title, style="bold")] if title else []
    return Group(*lines, table, Text(_note(rows, with_range=not compact), style="dim"))


def _columns(rows: Sequence[RehearsedFigures], label: str, *, compact: bool) -> dict[str, list[str]]:
    with_range = not compact and any(len(row.outcomes) > 1 for row in rows)

    def times(spreads: Sequence[Spread | None]) -> list[str]:
        known = [spread or Spread(math.inf, math.inf, math.inf) for spread in spreads]
        every = durations([value for spread in known for value in (spread.median, spread.low, spread.high)])
        return [_cell(every[3 * row : 3 * row + 3], with_range=with_range) for row in range(len(known))]

    def values(spreads: Sequence[Spread | None]) -> list[str]:
        shown = [
            [number_of(value) for value in (each.median, each.low, each.high)] if each else None for each in spreads
        ]
        return [_cell(each, with_range=with_range) if each else "-" for each in shown]

    columns = {label: [row.name for row in rows]}
    if label != "devices" and len({row.devices for row in rows}) > 1:
        columns["devices"] = [str(row.devices) for row in rows]
    columns["makespan"] = times([row.makespan_s for row in rows])
    if any(row.best is not None for row in rows):
        columns["best"] = values([row.best for row in rows])
        if any(row.regret is not None for row in rows):
            columns["regret"] = values([row.regret for row in rows])
        for share in SHARES:
            columns[f"to {share * 100.0:g} %"] = times([row.seconds_within(share) for row in rows])
    columns["busy"] = [percent(row.busy_share.median) for row in rows]
    columns["device-hours"] = figures([row.device_hours.median for row in rows])
    costs = [row.usd.median for row in rows if row.usd is not None]
    if len(costs) == len(rows) and costs:
        columns["dollars"] = dollar_column(costs)
    return columns


def number_of(value: float) -> str:
    """A value of a metric to four significant digits."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 or value == 0.0 else number(value)


def _cell(shown: Sequence[str], *, with_range: bool) -> str:
    middle, low, high = shown
    if not with_range or low == high:
        return middle
    unit = f" {middle.rpartition(' ')[2]}" if " " in middle else ""
    return f"{middle} ({low.removesuffix(unit)}-{high.removesuffix(unit)})"


def _note(rows: Sequence[RehearsedFigures], *, with_range: bool) -> str:
    seeds = max((len(row.outcomes) for row in rows), default=0)
    parts = [] if seeds < 2 else [f"medians over {seeds} seeds{', with the least and the most' if with_range else ''}"]
    scale = rows[0].scale if rows else None
    if scale is not None:
        metric, best = scale.goal.metric, f"{number_of(scale.best)} ({scale.goal.direction})"
        if scale.is_regret:
            parts.append(f"regret: 0 at the best known {metric}, {best}, and 1 at the worst; to 5 %: until it is 0.05")
        else:
            found = "of the same seed" if rows[0].of_seeds else "of all"
            parts.append(f"to 5 %: until {metric} is within 5 % of the best {found}; the best of all is {best}")
    return "; ".join(parts)
