"""The figures of paper.py: bars by algorithm and system, and the devices' busy share over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

#: Colour and name by system; the colours can be told apart with any common colour blindness.
COLOURS = {"fluid": "#0072B2", "ray_default": "#E69F00", "ray_reuse_actors": "#009E73"}
COLOURS |= {"fluid_unpacked": "#56B4E9", "fluid_fifo": "#CC79A7"}
NAMES = {
    "fluid": "Fluid",
    "fluid_unpacked": "Fluid, packing off",
    "fluid_fifo": "Fluid's engine, first come first served",
    "ray_default": "Ray Tune",
    "ray_reuse_actors": "Ray Tune, reuse_actors",
}
_WIDTH = 11.0  # Inches.
_GREY, _RULE = "#555555", "#d9d9d9"
#: Number of parts of a heat map's time axis.
_BINS = 120


def save_bars(path: Path, workload: Any, cells: Mapping[str, Any], note: str) -> None:
    """Draws time to target, makespan and the busy share, a bar for each system under each algorithm.

    Args:
        path: the file to write.
        workload: what was tuned.
        cells: a ``paper.Cell`` by algorithm.
        note: the machine and setting of the measurement.
    """
    figure = Figure(figsize=(_WIDTH, 8.0), facecolor="white", layout="constrained")
    figure.suptitle(f"{workload.title} ({note})", x=0.01, ha="left", fontsize=10, parse_math=False)
    titles = {"to_target": "time to target (s)", "makespan": "makespan (s)", "busy": "devices busy (%)"}
    for axes, (what, title) in zip(figure.subplots(3, 1), titles.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        systems = [system for system in NAMES if any(system in cell.makespan for cell in cells.values())]
        pitch = 0.81 / len(systems)
        for place, system in enumerate(systems):
            values = [
                getattr(cell, what).get(system, np.nan) * (100 if what == "busy" else 1) for cell in cells.values()
            ]
            at = np.arange(len(cells)) + pitch * (place - (len(systems) - 1) / 2)
            bars = axes.bar(at, values, pitch - 0.02, color=COLOURS[system], label=NAMES[system])
            axes.bar_label(bars, _labels(values, what, cells, system), fontsize=7.5, padding=1, color=_GREY)
        axes.set_xticks(range(len(cells)), list(cells))
        axes.set_xlim(-0.6, len(cells) - 0.4)
        axes.margins(y=0.15)
        axes.grid(axis="y", color=_RULE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelsize=9)
    figure.axes[0].legend(frameon=False, fontsize=9, ncols=3, loc="upper right", bbox_to_anchor=(1.0, 1.2))
    figure.savefig(path, dpi=130)


def _labels(values: Sequence[float], what: str, cells: Mapping[str, Any], system: str) -> list[str]:
    """Returns a bar's label: the value, and its ratio to Fluid's for the other systems."""
    labels = []
    for value, cell in zip(values, cells.values(), strict=True):
        base = cell.makespan.get("fluid") if what == "makespan" else cell.to_target.get("fluid")
        if np.isnan(value):
            labels.append("")
        elif what == "busy" or system == "fluid" or base is None:
            labels.append(f"{value:.0f}")
        else:
            labels.append(f"{value / base:.1f}x")
    return labels


def save_heatmap(path: Path, workload: Any, measured: Mapping[str, Mapping[str, Sequence[Any]]], note: str) -> None:
    """Draws how busy each device was over time, a panel for each system under each algorithm.

    Args:
        path: the file to write.
        workload: what was tuned.
        measured: runs by algorithm and system; the first of each is drawn.
        note: the machine and setting of the measurement.
    """
    rows = [name for name, runs in measured.items() if any(runs.values())]
    figure = Figure(figsize=(_WIDTH, 1.2 + 0.95 * len(rows)), facecolor="white", layout="constrained")
    figure.suptitle(
        f"{workload.title}: busy share over time, a row for each device ({note})",
        x=0.01,
        ha="left",
        fontsize=10,
        parse_math=False,
    )
    systems = [system for system in NAMES if any(measured[name].get(system) for name in rows)]
    panels = figure.subplots(len(rows), len(systems), squeeze=False, sharex="row")
    drawn = None
    for line, name in zip(panels, rows, strict=True):
        runs = {system: found[0] for system, found in measured[name].items() if found}
        span = max(run["makespan"] for run in runs.values())
        for axes, system in zip(line, systems, strict=True):
            axes.set_xlim(0.0, span)
            axes.tick_params(length=0, labelsize=7)
            axes.set_yticks([])
            axes.spines[:].set_color(_RULE)
            if system not in runs:
                continue
            run = runs[system]
            shares = 100.0 * np.array([busy_shares(device, span) for device in run["busy_s"]])
            edges = np.linspace(0.0, span, _BINS + 1)
            shares[:, edges[:-1] > run["makespan"]] = np.nan
            drawn = axes.pcolormesh(edges, np.arange(len(shares) + 1), shares, cmap="viridis", vmin=0.0, vmax=100.0)
            axes.axvline(run["makespan"], color="black", linewidth=1.0)
            axes.set_title(f"{run['makespan']:.1f} s, {100 * run['busy']:.0f} % busy", fontsize=8, loc="right", pad=2)
        line[0].set_ylabel(name, fontsize=9)
    for axes, system in zip(panels[0], systems, strict=True):
        axes.set_title(NAMES[system], fontsize=10, loc="left")
    for axes in panels[-1]:
        axes.set_xlabel("seconds", fontsize=8, color=_GREY)
    if drawn is not None:
        figure.colorbar(drawn, ax=panels.ravel().tolist(), label="busy (%)", shrink=0.8, pad=0.01)
    figure.savefig(path, dpi=130)


def busy_shares(stretches: Sequence[Sequence[float]], span: float) -> np.ndarray:
    """Returns the busy share of each equal part of ``span`` seconds, of a device that was busy in these stretches."""
    edges = np.linspace(0.0, span, _BINS + 1)
    begins, ends = (np.array([stretch[side] for stretch in stretches], dtype=float) for side in (0, 1))
    # Busy seconds up to each edge.
    until = [np.clip(edge - begins, 0.0, ends - begins).sum() for edge in edges]
    return np.diff(until) * _BINS / span
