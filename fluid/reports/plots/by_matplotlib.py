"""Draws the plots of a sweep by matplotlib, without pyplot: neither a display nor global state is involved."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fluid._imports import try_import
from fluid.display.format import count
from fluid.reports.figures.gantt import GREY, RULE, plain_axes
from fluid.reports.plots.field import field
from fluid.reports.plots.trials import PlotAxis, PlotData, PlottedTrial, spread

with try_import("matplotlib", extra="plot") as imports:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import BoundaryNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    class PlotFigure(Figure):
        """A figure that a notebook shows, also where pyplot was never imported."""

        def _repr_png_(self) -> bytes:
            image = io.BytesIO()
            self.savefig(image, format="png", dpi=100, bbox_inches="tight")
            return image.getvalue()


#: The colours of qualities: the best are dark.
_COLOURS = "viridis_r"
_BLUE = "#0072b2"
#: Cells of a contour along an axis of numbers, and its levels.
_CELLS, _LEVELS = 100, 12
#: Most slices beside each other.
_COLUMNS = 4


def _plain(text: str) -> str:
    """A text of the user's: a dollar in it begins no formula."""
    return text.replace("$", r"\$")


def history(data: PlotData) -> Any:
    """The best value of each trial in order of submission, and the best so far."""
    figure, axes = _one(8.0, 4.2)
    x = [trial.number for trial in data.trials]
    axes.scatter(x, data.values, s=14, color=_BLUE, alpha=0.45, linewidths=0, label="trial")
    numbers, values = data.best_so_far
    last = data.trials[-1].number
    axes.step([*numbers, last], [*values, values[-1]], where="post", color=_BLUE, linewidth=2.0, label="best so far")
    axes.set_xlabel("trial, in order of submission")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _value_axis(axes, data)
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def parallel(data: PlotData, shown: Sequence[PlotAxis]) -> Any:
    """A line per trial across an axis per hyperparameter, and one for the metric."""
    low, high, _ = data.limits
    all_axes = [*shown, PlotAxis(data.goal.metric, (), data.log, low, high)]
    figure, axes = _one(max(6.0, 1.35 * len(all_axes)), 4.2)
    lines = [
        [(k, each.share(trial)) for k, each in enumerate(shown)] + [(len(shown), _share_of(all_axes[-1], trial.value))]
        for trial in data.drawn
    ]
    drawn = LineCollection(lines, cmap=_COLOURS, linewidths=1.1, alpha=max(0.25, min(0.8, 60 / len(lines))))
    drawn.set_array([trial.quality for trial in data.drawn])
    drawn.set_clim(0.0, 1.0)
    axes.add_collection(drawn)
    for k, each in enumerate(all_axes):
        axes.axvline(k, color=GREY, linewidth=1.0)
        name = _plain(each.name) + ("\n(log)" if each.log else "")
        axes.text(
            k, 1.05, name, ha="center", va="bottom", fontsize=8.5, weight="bold" if each is all_axes[-1] else None
        )
        for share, label in _marks(each):
            text = axes.text(k + 0.04, share, _plain(label), va="center", fontsize=7.5, color=GREY)
            text.set_bbox({"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5})
    axes.set(xlim=(-0.3, len(all_axes) - 0.4), ylim=(-0.03, 1.03))
    axes.set_axis_off()
    _colour_bar(figure, axes, drawn, data)
    return figure


def importance(data: PlotData) -> Any:
    """A bar per hyperparameter, the most important first."""
    found = data.importances
    shares = {_plain(name): share for name, share in found.shares.items()}
    names = list(shares)[::-1]
    figure, axes = _one(7.0, 0.9 + 0.32 * len(names))
    axes.barh(names, [shares[name] for name in names], color=_BLUE, height=0.62)
    for name in names:
        axes.text(shares[name], name, f" {shares[name]:.0%}", va="center", fontsize=8.5, color=GREY)
    axes.set_xlabel(f"importance for {_plain(found.metric)} ({found.method} of {found.trials} trials)")
    axes.margins(x=0.1)
    plain_axes(axes)
    axes.grid(visible=False, axis="y")
    return figure


def slices(data: PlotData, shown: Sequence[PlotAxis]) -> Any:
    """The metric against each hyperparameter."""
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = PlotFigure(figsize=(max(4.0, 2.9 * columns), 2.6 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axes, each in zip(grid, shown, strict=False):
        trials = [trial for trial in data.drawn if not math.isnan(each.place(trial))]
        x = [_spread_place(each, trial) for trial in trials]
        drawn = _dots(axes, x, [trial.value for trial in trials], trials, s=14, linewidths=0)
        _parameter_axis(axes.xaxis, axes.set_xscale, each)
        axes.set_xlabel(_plain(each.name))
        _value_axis(axes, data, label=axes in grid[::columns])
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    _colour_bar(figure, list(grid), drawn, data)
    return figure


def contour(data: PlotData, across: PlotAxis, up: PlotAxis) -> Any:
    """How good trials are over two hyperparameters."""
    figure, axes = _one(6.4, 4.8)
    placed = [t for t in data.drawn if not math.isnan(across.place(t)) and not math.isnan(up.place(t))]
    columns, rows = len(across.categories) or _CELLS, len(up.categories) or _CELLS
    points = [(across.share(trial), up.share(trial), trial.quality) for trial in placed]
    cells = field(points, columns, rows, across.is_numeric, up.is_numeric)
    edges = [[each.at(k / n) for k in range(n + 1)] for each, n in ((across, columns), (up, rows))]
    norm = BoundaryNorm(np.linspace(0.0, 1.0, _LEVELS + 1), 256)
    drawn = axes.pcolormesh(*edges, np.ma.masked_invalid(cells), cmap=_COLOURS, norm=norm)
    x, y = ([_spread_place(each, trial) for trial in placed] for each in (across, up))
    _dots(axes, x, y, placed, s=22, edgecolors="white", linewidths=0.8)
    _parameter_axis(axes.xaxis, axes.set_xscale, across)
    _parameter_axis(axes.yaxis, axes.set_yscale, up)
    axes.set(xlabel=_plain(across.name), ylabel=_plain(up.name))
    plain_axes(axes)
    axes.grid(visible=False)
    _colour_bar(figure, axes, drawn, data)
    return figure


def _one(width: float, height: float) -> tuple[Any, Any]:
    """A figure of so many inches with one axes."""
    figure = PlotFigure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _dots(axes: Any, x: Sequence[float], y: Sequence[float], trials: Sequence[PlottedTrial], **look: Any) -> Any:
    """Trials as dots in the colours of their qualities."""
    return axes.scatter(x, y, c=[trial.quality for trial in trials], cmap=_COLOURS, vmin=0.0, vmax=1.0, **look)


def _value_axis(axes: Any, data: PlotData, *, label: bool = True) -> None:
    low, high, beyond = data.limits
    if data.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(low, high)
    if label:
        left_out = f"\n(beyond the axis: {count(beyond, 'trial')})" if beyond else ""
        axes.set_ylabel(f"{_plain(data.goal.metric)} ({data.goal.direction}){left_out}")
    plain_axes(axes)


def _parameter_axis(axis: Any, set_scale: Any, each: PlotAxis) -> None:
    if each.categories:
        axis.set_ticks(range(len(each.categories)), [_plain(label[:24]) for label in each.categories])
        return
    if each.log:
        set_scale("log")
    if each.few:
        axis.set_minor_locator(NullLocator())
        axis.set_ticks(each.few, [f"{value:g}" for value in each.few])


def _spread_place(axis: PlotAxis, trial: PlottedTrial) -> float:
    return axis.place(trial) + (0.5 * spread(trial.number) if axis.categories else 0.0)


def _share_of(axis: PlotAxis, value: float) -> float:
    """Where a value of the metric stands on its axis; one beyond the axis at its end."""
    trial = PlottedTrial("", 0, {axis.name: value}, value, 0.0)
    return min(1.0, max(0.0, axis.share(trial)))


def _marks(axis: PlotAxis) -> list[tuple[float, str]]:
    """The labels on an axis of parallel coordinates, each with its share of the axis."""
    if axis.categories:
        n = len(axis.categories)
        return [((k + 0.5) / n, axis.categories[k][:18]) for k in range(0, n, math.ceil(n / 14))]
    locator = LogLocator(numticks=6) if axis.log else MaxNLocator(5)
    ticks = axis.few or locator.tick_values(axis.low, axis.high)
    values = [value for value in ticks if axis.low <= value <= axis.high]
    return [(_share_of(axis, float(value)), f"{value:.4g}") for value in values or [axis.low]]


def _colour_bar(figure: Any, axes: Any, drawn: Any, data: PlotData) -> None:
    """Tells which values the colours are of."""
    bar = figure.colorbar(drawn, ax=axes, ticks=[0.0, 0.25, 0.5, 0.75, 1.0], pad=0.02)
    words = ("worst ", "", "median ", "", "best ")
    bar.ax.set_yticklabels([f"{word}{data.value_at(k / 4):.4g}" for k, word in enumerate(words)], fontsize=7.5)
    bar.ax.tick_params(length=0, labelcolor=GREY)
    bar.outline.set_edgecolor(RULE)
    bar.solids.set_alpha(1.0)
