"""Draws a plot of a sweep by matplotlib or plotly, whichever is there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from fluid._imports import install_command
from fluid.errors import FluidError, MissingDependencyError, require_one_of
from fluid.reports.plots.trials import PlotData
from fluid.results.metrics import Goal
from fluid.results.records import TrialResult

#: The packages that can draw, the preferred one first.
BACKENDS = ("matplotlib", "plotly")


def draw_plot(
    kind: str,
    trials: Sequence[TrialResult],
    goal: Goal,
    backend: str | None = None,
    parameters: Sequence[str] | None = None,
) -> Any:
    """Draws a plot.

    Args:
        kind: ``"history"``, ``"parallel"``, ``"importance"``, ``"slices"`` or ``"contour"``.
        trials: the trials of a sweep, at least one of them with a value of the metric.
        goal: the metric and its direction.
        backend: ``"matplotlib"`` or ``"plotly"``; ``None`` for the first of them that is installed.
        parameters: the hyperparameters to show; ``None`` for all, or for a contour the two most important ones.

    Returns:
        A :class:`matplotlib.figure.Figure` or a :class:`plotly.graph_objects.Figure`.

    Raises:
        InvalidFieldError: the backend or a hyperparameter is not known.
        MissingDependencyError: neither package is installed, or not the one that is asked for.
        FluidError: there is nothing to draw; the message says why.
    """
    module, data = _backend(backend), PlotData.of(trials, goal)
    if kind == "history":
        return module.history(data)
    if kind == "importance":
        if not data.importances.shares:
            raise FluidError(f"there are no importances for {goal.metric}: {data.importances.note}")
        return module.importance(data)
    if kind == "contour":
        return module.contour(data, *data.chosen(parameters, count=2))
    return getattr(module, kind)(data, data.chosen(parameters))


def _backend(name: str | None) -> Any:
    """The module that draws by a package."""
    if name is None:
        name = next((each for each in BACKENDS if importlib.util.find_spec(each) is not None), None)
        if name is None:
            text = "plots need matplotlib or plotly, of which neither is installed; to install one: "
            raise MissingDependencyError(f"{text}{install_command('plot')}")
    module = importlib.import_module(f"fluid.reports.plots.by_{require_one_of('backend', name, BACKENDS)}")
    module.imports.check()
    return module
