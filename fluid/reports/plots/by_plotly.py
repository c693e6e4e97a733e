"""Draws the plots of a sweep by plotly, as figures that a notebook shows and a reader can zoom into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fluid._imports import try_import
from fluid.display.format import count
from fluid.reports.plots.field import field
from fluid.reports.plots.trials import NONE, PlotAxis, PlotData, PlottedTrial, spread
from fluid.reports.tables.hyperparameters import value_text

with try_import("plotly", install="pip install plotly") as imports:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

_COLOURS, _BLUE = "Viridis_r", "#0072b2"
_CELLS, _COLUMNS = 100, 4


def history(data: PlotData) -> Any:
    """The best value of each trial in order of submission, and the best so far."""
    figure = _figure(data)
    numbers, values = data.best_so_far
    last = data.trials[-1].number
    figure.add_scatter(
        x=[trial.number for trial in data.trials],
        y=data.values,
        text=[_said(trial) for trial in data.trials],
        mode="markers",
        name="trial",
        marker={"color": _BLUE, "opacity": 0.5},
    )
    figure.add_scatter(
        x=[*numbers, last],
        y=[*values, values[-1]],
        mode="lines",
        name="best so far",
        line={"shape": "hv", "color": _BLUE, "width": 2.5},
    )
    figure.update_xaxes(title="trial, in order of submission")
    figure.update_yaxes(**_value_axis(data))
    return figure


def parallel(data: PlotData, shown: Sequence[PlotAxis]) -> Any:
    """A line per trial across an axis per hyperparameter, and one for the metric."""
    low, high, _ = data.limits
    metric = PlotAxis(data.goal.metric, (), data.log, low, high)
    values = [min(high, max(low, trial.value)) for trial in data.drawn]
    dimensions = [_dimension(each, [each.place(trial) for trial in data.drawn]) for each in shown]
    figure = _figure(data)
    figure.add_parcoords(
        dimensions=[*dimensions, _dimension(metric, values)],
        line={**_colours(data), "color": [trial.quality for trial in data.drawn]},
    )
    return figure


def importance(data: PlotData) -> Any:
    """A bar per hyperparameter, the most important first."""
    found = data.importances
    names = list(found.shares)[::-1]
    shares = [found.shares[name] for name in names]
    figure = _figure(data)
    figure.add_bar(
        x=shares, y=names, orientation="h", text=[f"{share:.0%}" for share in shares], marker={"color": _BLUE}
    )
    figure.update_xaxes(title=f"importance for {found.metric} ({found.method} of {found.trials} trials)")
    figure.update_yaxes(type="category")
    return figure


def slices(data: PlotData, shown: Sequence[PlotAxis]) -> Any:
    """The metric against each hyperparameter."""
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = make_subplots(rows, columns, shared_yaxes=True, figure=_figure(data))
    for k, each in enumerate(shown):
        trials = [trial for trial in data.drawn if not math.isnan(each.place(trial))]
        row, column = k // columns + 1, k % columns + 1
        figure.add_scatter(row=row, col=column, y=[trial.value for trial in trials], **_dots(data, trials, k == 0))
        figure.data[-1].x = [_spread_place(each, trial) for trial in trials]
        figure.update_xaxes(row=row, col=column, **_parameter_axis(each))
        figure.update_yaxes(row=row, col=column, **(_value_axis(data) if column == 1 else {}))
    figure.update_layout(height=60 + 260 * rows)
    return figure


def contour(data: PlotData, across: PlotAxis, up: PlotAxis) -> Any:
    """How good trials are over two hyperparameters."""
    placed = [t for t in data.drawn if not math.isnan(across.place(t)) and not math.isnan(up.place(t))]
    columns, rows = len(across.categories) or _CELLS, len(up.categories) or _CELLS
    points = [(across.share(trial), up.share(trial), trial.quality) for trial in placed]
    cells = field(points, columns, rows, across.is_numeric, up.is_numeric)
    middles = [[each.at((k + 0.5) / n) for k in range(n)] for each, n in ((across, columns), (up, rows))]
    figure = _figure(data)
    figure.add_heatmap(
        x=middles[0],
        y=middles[1],
        z=cells,
        hoverinfo="skip",
        zmin=0,
        zmax=1,
        colorscale=_COLOURS,
        showscale=False,
    )
    figure.add_scatter(y=[_spread_place(up, trial) for trial in placed], **_dots(data, placed, True))
    figure.data[-1].x = [_spread_place(across, trial) for trial in placed]
    figure.data[-1].marker.line = {"color": "white", "width": 1}
    figure.update_xaxes(**_parameter_axis(across))
    figure.update_yaxes(**_parameter_axis(up))
    return figure


def _figure(data: PlotData) -> Any:
    return go.Figure(layout={"template": "plotly_white", "showlegend": False, "margin": {"t": 40}})


def _said(trial: PlottedTrial) -> str:
    config = "<br>".join(f"{name} {value_text(value, 4)}" for name, value in list(trial.config.items())[:14])
    return f"{trial.trial_id}<br>{config}"


def _colours(data: PlotData) -> dict[str, Any]:
    """A scale of colours from the worst to the best, which tells the values."""
    words = ("worst ", "", "median ", "", "best ")
    labels = [f"{word}{data.value_at(k / 4):.4g}" for k, word in enumerate(words)]
    bar = {"tickvals": [0, 0.25, 0.5, 0.75, 1], "ticktext": labels}
    return {"colorscale": _COLOURS, "cmin": 0, "cmax": 1, "showscale": True, "colorbar": bar}


def _dots(data: PlotData, trials: Sequence[PlottedTrial], with_scale: bool) -> dict[str, Any]:
    colours = {**_colours(data), "showscale": with_scale, "color": [trial.quality for trial in trials]}
    return {"mode": "markers", "text": [_said(trial) for trial in trials], "marker": colours}


def _value_axis(data: PlotData) -> dict[str, Any]:
    low, high, beyond = data.limits
    left_out = f"<br>(beyond the axis: {count(beyond, 'trial')})" if beyond else ""
    title = f"{data.goal.metric} ({data.goal.direction}){left_out}"
    return {"title": title, "type": "log"} if data.log else {"title": title, "range": [low, high]}


def _parameter_axis(each: PlotAxis) -> dict[str, Any]:
    if each.categories:
        places = list(range(len(each.categories)))
        return {"title": each.name, "tickvals": places, "ticktext": [label[:24] for label in each.categories]}
    ticks = {"tickvals": list(each.few), "ticktext": [f"{value:g}" for value in each.few]} if each.few else {}
    return {"title": each.name, "type": "log" if each.log else "linear", "exponentformat": "power", **ticks}


def _spread_place(axis: PlotAxis, trial: PlottedTrial) -> float:
    return axis.place(trial) + (0.5 * spread(trial.number) if axis.categories else 0.0)


def _dimension(axis: PlotAxis, places: Sequence[float]) -> dict[str, Any]:
    """An axis of parallel coordinates. Lines have no gaps: trials without such a number stand below the others."""
    label = f"{axis.name} (log)" if axis.log else axis.name
    if axis.categories:
        positions = list(range(len(axis.categories)))
        return {"label": label, "values": list(places), "tickvals": positions, "ticktext": list(axis.categories)}
    values = [math.log10(place) if axis.log else place for place in places]
    low, high = (math.log10(end) if axis.log else end for end in (axis.low, axis.high))
    marks = [math.log10(value) if axis.log else value for value in axis.few] or list(np.linspace(low, high, 5))
    ticks = [f"{10**mark if axis.log else mark:.3g}" for mark in marks]
    if not any(map(math.isnan, values)):
        return {"label": label, "values": values, "tickvals": marks, "ticktext": ticks}
    below = low - 0.15 * ((high - low) or 1.0)
    known = [below if math.isnan(value) else value for value in values]
    return {"label": label, "values": known, "tickvals": [below, *marks], "ticktext": [NONE, *ticks]}
