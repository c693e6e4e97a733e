"""A chart of the devices that a simulated session held over time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fluid._imports import try_import
from fluid.display.format import unit_for
from fluid.display.palette import colour
from fluid.reports.figures.gantt import save_figure

with try_import("matplotlib", extra="plot") as _imports:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from fluid.simulation.sized import HeldResult


def save_held(path: str | Path, runs: Mapping[str, HeldResult], title: str, deadline_s: float | None = None) -> None:
    """Saves a figure of the devices held over time.

    Args:
        path: the file to write; its suffix chooses the format.
        runs: at least one, by name.
        title: the title of the figure.
        deadline_s: seconds, drawn as a line; ``None`` for none.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidFieldError: the file cannot be written.
    """
    _imports.check()
    ends = [run.simulation.makespan for run in runs.values()]
    unit, seconds = unit_for(max([*ends, deadline_s or 0.0]))
    figure = Figure(figsize=(9.0, 3.6), facecolor="white", layout="constrained")
    axes = figure.subplots()
    for position, (name, run) in enumerate(runs.items()):
        times = [at / seconds for at, _ in run.held] + [run.simulation.makespan / seconds]
        counts = [held for _, held in run.held]
        axes.step(times, [*counts, 0], where="post", color=colour(position), linewidth=1.6, label=name)
    if deadline_s is not None:
        axes.axvline(deadline_s / seconds, color="#b2182b", linestyle="--", linewidth=1.2, label="deadline")
    axes.set_title(title, fontsize=11, loc="left", parse_math=False)
    axes.set_xlabel(f"time ({unit})", fontsize=9)
    axes.set_ylabel("devices held", fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0.0)
    axes.set_ylim(bottom=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)
