"""The picture of rehearsed sweeps: the best so far over hours, and what more devices bring. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fluid._imports import try_import
from fluid.display.format import printable, unit_for
from fluid.display.palette import colour
from fluid.errors import InvalidFieldError
from fluid.rehearsal.outcome import SweepOutcome
from fluid.reports.analysis.knee import Knee
from fluid.reports.figures.gantt import GREY, plain_axes, save_figure
from fluid.reports.tables.rehearsal import RehearsedFigures, Spread, ValueScale, figures_of, knee_of

with try_import("matplotlib", extra="plot") as _imports:
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator


#: Points of a curve.
_POINTS = 400
#: From so many seeds on, bands are quartiles; of fewer, they are ranges.
_QUARTILES_FROM = 5
#: Values that span more than this factor above the best are drawn on a logarithmic axis.
_LOG_FROM = 4.0


def save_rehearsal(
    path: str | Path,
    outcomes: Mapping[str, Sequence[SweepOutcome]],
    title: str = "",
    *,
    label: str = "devices",
    scale: ValueScale | None = None,
    price: float | None = None,
    field: str = "png",
) -> None:
    """Saves a figure of rehearsed sweeps.

    Args:
        path: the file to write; its suffix chooses the format.
        outcomes: those of each way to run the sweep, one for each seed, by name.
        title: the title of the figure.
        label: what the names are; with ``"devices"``, a second part shows makespan and cost over their number.
        scale: the best and worst values that are known: the curves show regret then; ``None`` for the values.
        price: US dollars for a device-hour; ``None`` for device-hours in place of dollars.
        field: the caller's name for ``path``, for errors.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidFieldError: there is no outcome, or the file cannot be written.
    """
    save_figure(draw_rehearsal(outcomes, title, label=label, scale=scale, price=price), path, field)


def draw_rehearsal(
    outcomes: Mapping[str, Sequence[SweepOutcome]],
    title: str = "",
    *,
    label: str = "devices",
    scale: ValueScale | None = None,
    price: float | None = None,
) -> Figure:
    """The figure that :func:`save_rehearsal` saves."""
    _imports.check()
    rows = figures_of(outcomes, scale=scale, price=price)
    if not rows:
        raise InvalidFieldError("outcomes", outcomes, "must not be empty")
    knee = knee_of(rows) if label == "devices" and len(rows) > 1 else None
    has_curves = any(outcome.trace for row in rows for outcome in row.outcomes)
    parts = [*(["curves"] if has_curves else []), *(["makespan", "cost"] if knee is not None else [])]
    parts = parts or ["curves"]
    ratios = [2.2 if part == "curves" else 1.0 for part in parts]
    figure = Figure(figsize=(1.0 + 2.9 * sum(ratios), 4.8), facecolor="white", layout="constrained")
    if title:
        figure.suptitle(printable(title), x=0.01, ha="left", fontsize=13, weight="bold", parse_math=False)
    for part, axes in zip(parts, np.atleast_1d(figure.subplots(1, len(parts), width_ratios=ratios)), strict=True):
        if part == "curves":
            _draw_curves(axes, rows, label, is_regret=scale is not None and scale.is_regret)
        elif knee is not None:
            _draw_sizes(axes, rows, knee, part)
    return figure


# --- The best so far


def _draw_curves(axes: Axes, rows: Sequence[RehearsedFigures], label: str, *, is_regret: bool) -> None:
    longest = max(row.makespan_s.high for row in rows)
    unit, size = unit_for(longest)
    shades = _shades(len(rows), label)
    logarithmic = False
    ends = [trace[0][0] for row in rows for trace in (each.trace for each in row.outcomes) if trace]
    is_wide = bool(ends) and longest > 4.0 * min(row.makespan_s.median for row in rows) and min(ends) > 0.0
    for position, row in enumerate(rows):
        first = max((each.trace[0][0] for each in row.outcomes if each.trace), default=None)
        if first is None:
            continue
        last = row.makespan_s.high
        grid = np.geomspace(first, last, _POINTS) if is_wide else np.linspace(first, last, _POINTS)
        found = np.array([_values_at(each, grid) for each in row.outcomes if each.trace])
        if is_regret and row.scale is not None:
            found = np.vectorize(row.scale.regret, otypes=[float])(found)
        low, middle, high = _band(found)
        count = f"{row.name} device{'' if row.name == '1' else 's'}" if label == "devices" else row.name
        axes.step(grid / size, middle, where="post", color=shades[position], linewidth=1.9, label=printable(count))
        if len(found) > 1:
            axes.fill_between(grid / size, low, high, step="post", color=shades[position], alpha=0.16, linewidth=0.0)
        end = min(row.makespan_s.median, last)
        there = middle[max(0, int(np.searchsorted(grid, end, side="right")) - 1)]
        axes.plot(end / size, there, marker="o", markersize=5, color=shades[position])
        positive = middle[np.isfinite(middle)]
        logarithmic |= bool(len(positive)) and positive.min() > 0.0 and positive.max() > _LOG_FROM * positive.min()
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    if is_wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_xlim(left=0.0)
    goal = None if rows[0].scale is None else rows[0].scale.goal
    seeds = max(len(row.outcomes) for row in rows)
    band = "" if seeds < 2 else f", {'quartiles' if seeds >= _QUARTILES_FROM else 'range'} over {seeds} seeds"
    what = "regret" if is_regret else "best value so far"
    if goal is not None and not is_regret:
        what = f"best {goal.metric} so far, {goal.direction}"
    axes.set_title(printable(f"{what}{band}"), fontsize=10, loc="left", parse_math=False)
    axes.set_xlabel(f"time ({unit})", fontsize=9, color=GREY)
    plain_axes(axes)
    axes.legend(frameon=False, fontsize=8.5, ncols=1 if len(rows) <= 6 else 2)


def _shades(count: int, label: str) -> list[str | tuple[float, ...]]:
    """Colours of lines: numbers of devices get darker with their number; other names are told apart."""
    if label != "devices":
        return [colour(position) for position in range(count)]
    shades = colormaps["viridis"]
    return [shades(0.88 * (1.0 - position / max(1, count - 1))) for position in range(count)]


def _values_at(outcome: SweepOutcome, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best so far at some times, seconds; NaN before the first value."""
    at, best = np.array(outcome.trace, dtype=float).T
    position = np.searchsorted(at, grid * (1.0 + 1e-12), side="right") - 1
    return np.where(position >= 0, best[np.maximum(position, 0)], np.nan)


def _band(found: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Low end, median and high end over seeds; those that have no value yet do not count."""
    shares = (0.25, 0.5, 0.75) if len(found) >= _QUARTILES_FROM else (0.0, 0.5, 1.0)
    low, middle, high = np.nanquantile(found, shares, axis=0)
    return low, middle, high


# --- Numbers of devices


def _draw_sizes(axes: Axes, rows: Sequence[RehearsedFigures], knee: Knee, part: str) -> None:
    ordered = sorted(rows, key=lambda row: row.devices)
    counts = [row.devices for row in ordered]
    if part == "makespan":
        unit, size = unit_for(max(row.makespan_s.high for row in ordered))
        spreads, title = [row.makespan_s for row in ordered], f"makespan ({unit})"
        perfect = [ordered[0].makespan_s.median / size * counts[0] / count for count in counts]
        axes.plot(counts, perfect, color="#999999", linestyle="--", linewidth=1.0, zorder=1, label="perfect scaling")
    else:
        size, costs = 1.0, [row.usd for row in ordered]
        paid = [cost for cost in costs if cost is not None]
        has_price = len(paid) == len(ordered)
        spreads = paid if has_price else [row.device_hours for row in ordered]
        title = "US dollars" if has_price else "device-hours"
    _draw_spreads(axes, counts, spreads, size)
    at = next(spread.median / size for count, spread in zip(counts, spreads, strict=True) if count == knee.n)
    axes.plot(knee.n, at, marker="o", markersize=14, markerfacecolor="none", markeredgecolor="black", linewidth=0.0)
    ha = "right" if knee.n == counts[-1] else "left" if knee.n == counts[0] else "center"
    axes.annotate(
        f"knee: {knee.n}", (knee.n, at), (0, 12), textcoords="offset points", ha=ha, fontsize=9, weight="bold"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("devices", fontsize=9, color=GREY)
    axes.set_title(title, fontsize=10, loc="left")
    if part == "makespan":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.legend(frameon=False, fontsize=8.5)
    else:
        axes.set_ylim(0.0, 1.2 * max(spread.high for spread in spreads) / size or 1.0)
    plain_axes(axes)


def _draw_spreads(axes: Axes, counts: Sequence[int], spreads: Sequence[Spread], size: float) -> None:
    middle = [spread.median / size for spread in spreads]
    axes.plot(counts, middle, color=colour(0), marker="o", markersize=5.5, linewidth=1.8)
    if any(spread.high > spread.low and math.isfinite(spread.high) for spread in spreads):
        low, high = [spread.low / size for spread in spreads], [spread.high / size for spread in spreads]
        axes.fill_between(counts, low, high, color=colour(0), alpha=0.16, linewidth=0.0)
