"""Gantt charts of plans and runs, and curves over the number of devices, as image files. Needs matplotlib.

Figures are made without pyplot, so that neither a display nor global state is involved.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fluid._imports import try_import
from fluid._private_files import replacing
from fluid.display.format import (
    duration,
    percent,
    printable,
    short_names,
    tick_label,
    tick_step,
    times,
    unit_for,
    width_name,
)
from fluid.display.palette import colour, ink
from fluid.errors import InvalidFieldError
from fluid.reports.run.timeline import Block, Timeline
from fluid.reports.tables.comparison import ClusterSizeAdvice, advise, unit_name

with try_import("matplotlib", extra="plot") as _imports:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fluid.planners.planner import Plan
    from fluid.simulation.simulation_result import SimulationResult


# -- plot style ----------------------------------------------------------------------------------
#
# The look of axes that figures of reports have in common.


GREY, RULE = "#555555", "#d9d9d9"


def plain_axes(axes: Axes) -> None:
    """Draws axes with a light grid, without a frame."""
    axes.grid(color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=GREY)


# -- gantt ---------------------------------------------------------------------------------------


_WIDTH = 12.0  # inches, of every figure
_LEFT, _RIGHT = 0.85, 0.35  # inches beside the axes
_UTILISATION = 0.5  # inches, the utilisation below a chart
_HEAD, _GAP, _FOOT = 0.5, 0.12, 0.55  # inches: a title, above the utilisation, below the last panel
_LANE_MARGIN = 0.07  # share of a lane (a device's row) left free above and below
_SHARED, _BOUND, _BUSY = "#ececec", "#b2182b", "#9fb8cf"
#: Line height and mean width of a character, in multiples of the font size.
_LINE, _CHARACTER = 1.3, 0.62
_SMALL, _LEAST_TYPE, _LARGEST_TYPE = 7.5, 4.2, 9.0


@dataclass(frozen=True)
class GanttPanel:
    """One chart of a figure.

    Attributes:
        title: the beginning of its title, such as the planner's name.
        timeline: the timeline to draw.
        note: the end of its title, after makespan, lower bound and utilisation.
    """

    title: str
    timeline: Timeline
    note: str = ""

    @classmethod
    def of_plan(cls, plan: Plan) -> GanttPanel:
        """The predicted run of a plan."""
        return cls(plan.planner, Timeline.of_plan(plan), f"{plan.schedule.resizes} resizes")

    @classmethod
    def of_result(cls, result: SimulationResult) -> GanttPanel:
        """A simulated run; it must have been simulated with ``record=True``."""
        return cls(result.label, Timeline.of_result(result), f"{result.resizes} resizes")


def save_gantt(path: str | Path, panels: Sequence[GanttPanel], title: str = "", *, field: str = "plot") -> None:
    """Saves a figure with one chart per panel, one above the other on the same time axis.

    Args:
        path: the file to write; its suffix chooses the format.
        panels: at least one.
        title: the title of the figure.
        field: the caller's name for ``path``, for errors.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidFieldError: ``panels`` is empty, or the file cannot be written.
    """
    save_figure(draw_gantt(panels, title), path, field)


def draw_gantt(panels: Sequence[GanttPanel], title: str = "") -> Figure:
    """The figure that :func:`save_gantt` saves. Each panel has two axes: the chart and the utilisation below it."""
    _imports.check()
    if not panels:
        raise InvalidFieldError("panels", panels, "must not be empty")
    charts = [_chart_height(panel.timeline, len(panels)) for panel in panels]
    top = 0.4 if title else 0.0
    height = top + sum(charts) + len(panels) * (_HEAD + _GAP + _UTILISATION) + _FOOT
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    if title:
        figure.text(_LEFT / _WIDTH, 1.0 - 0.3 / height, printable(title), fontsize=13, weight="bold", parse_math=False)
    span = max(panel.timeline.makespan for panel in panels)
    at = height - top
    for panel, chart in zip(panels, charts, strict=True):
        at -= _HEAD + chart
        axes = _add_axes(figure, at, chart)
        _Chart(axes, panel, span, chart).draw()
        at -= _GAP + _UTILISATION
        utilisation = _add_axes(figure, at, _UTILISATION)
        _draw_utilisation(utilisation, panel.timeline)
        for each in (axes, utilisation):
            _set_time_axis(each, span, labels=each is utilisation and panel is panels[-1])
    return figure


# --- One chart


def _chart_height(timeline: Timeline, panels: int) -> float:
    """Height in inches: enough to distinguish the lanes, but limited."""
    slots = max((block.slots for block in timeline.blocks), default=1)
    lane, most = (0.45, 14.0) if panels == 1 else (min(max(0.3, 0.1 * slots), 0.45), 6.0)
    return min(max(1.2, lane * len(timeline.devices)), most)


def _add_axes(figure: Figure, bottom: float, height: float) -> Axes:
    total = figure.get_figheight()
    axes = figure.add_axes((_LEFT / _WIDTH, bottom / total, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, height / total))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(length=0, labelsize=8, labelcolor=GREY)
    return axes


class _Chart:
    """Draws the chart of one panel on axes of ``height`` inches whose time axis covers ``span`` seconds."""

    def __init__(self, axes: Axes, panel: GanttPanel, span: float, height: float) -> None:
        self._axes = axes
        self._panel = panel
        self._timeline = panel.timeline
        self._span = span
        self._lanes = len(panel.timeline.devices)
        self._points_per_second = 72.0 * (_WIDTH - _LEFT - _RIGHT) / span if span > 0.0 else 0.0
        self._points_per_lane = 72.0 * height / self._lanes
        # On narrower lanes the margin would leave too little of the blocks.
        self._margin = _LANE_MARGIN if self._points_per_lane > 8.0 else 0.0
        self._short = short_names(panel.timeline.trial_ids)

    def draw(self) -> None:
        self._draw_lanes()
        self._draw_blocks()
        self._draw_limits()
        bold = self._axes.annotate(
            printable(self._panel.title),
            (0.0, 1.0),
            (0.0, 16.0),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=11,
            weight="bold",
            parse_math=False,
        )
        self._axes.annotate(
            self._figures(),
            (1.0, 0.0),
            (8.0, 0.0),
            xycoords=bold,
            textcoords="offset points",
            fontsize=9.5,
            color=GREY,
            va="bottom",
            parse_math=False,
        )

    def _figures(self) -> str:
        timeline = self._timeline
        parts = [f"makespan {duration(timeline.makespan, like=self._span)}"]
        if timeline.lower_bound > 0.0:
            parts.append(f"{times(timeline.makespan / timeline.lower_bound)} the lower bound")
        parts.append(f"devices busy {percent(timeline.utilisation)}")
        return ", ".join(parts + ([self._panel.note] if self._panel.note else []))

    def _draw_lanes(self) -> None:
        axes, devices = self._axes, self._timeline.devices
        axes.set_ylim(self._lanes, 0.0)
        shown = range(0, self._lanes, max(1, math.ceil(10.0 / self._points_per_lane)))
        names = [f"{devices[lane].kind} {devices[lane].index}" for lane in shown]
        axes.set_yticks([lane + 0.5 for lane in shown], names)
        if self._points_per_lane > 6.0:
            axes.hlines(range(1, self._lanes), 0.0, self._span, color=RULE, linewidth=0.5, zorder=0)
        for lane, device in enumerate(devices):
            # A free slot beside a trial does not make the device idle: the trial there runs at full speed.
            for start, end in self._timeline.shared_intervals[device.index]:
                corner, tall = (start, lane + self._margin), 1.0 - 2.0 * self._margin
                axes.add_artist(Rectangle(corner, end - start, tall, facecolor=_SHARED, zorder=1, gid="shared"))
            for start, end in self._timeline.absences.get(device.index, ()):
                absent = Rectangle((start, lane), end - start, 1.0, facecolor="white", edgecolor="#c8c8c8")
                absent.set(hatch="xxx", linewidth=0.0, zorder=1, gid="absent")
                axes.add_artist(absent)

    def _draw_blocks(self) -> None:
        timeline = self._timeline
        widest: dict[int, Block] = {}
        for block in timeline.blocks:
            if block.segment not in widest or block.lanes > widest[block.segment].lanes:
                widest[block.segment] = block
        # add_artist, because add_patch would update the limits, which are set already and take most of the time.
        for block in timeline.blocks:
            segment = timeline.segments[block.segment]
            fill = colour(timeline.trials[segment.row])
            tall = (block.lanes - 2.0 * self._margin) / block.slots
            corner = (segment.start, block.lane + self._margin + block.slot * tall)
            bar = Rectangle(corner, segment.end - segment.start, tall, facecolor=fill, edgecolor="white")
            bar.set(linewidth=min(0.7, 0.06 * tall * self._points_per_lane), zorder=2, gid=f"row-{segment.row}")
            self._axes.add_artist(bar)
            if segment.pause > 0.0:
                pause = Rectangle(corner, segment.pause, tall, facecolor="white", edgecolor=fill)
                pause.set(hatch="//////", linewidth=0.0, zorder=2.5, gid="pause")
                self._axes.add_artist(pause)
            if block is widest[block.segment]:
                self._label(block.segment, corner[1] + tall / 2.0, tall * self._points_per_lane, ink(fill))

    def _label(self, position: int, middle: float, height: float, pen: str) -> None:
        """Labels a block of ``height`` points with the trial and its width, as far as they fit."""
        size, segment = min(_LARGEST_TYPE, height / _LINE), self._timeline.segments[position]
        if size < _LEAST_TYPE:
            return
        begin = segment.start + segment.pause
        room = (segment.end - begin) * self._points_per_second
        name, short = printable(self._timeline.trial_ids[segment.row]), printable(self._short[segment.row])
        if pack := self._timeline.pack_name(position):
            name, short = pack, pack.split()[0]
        share = "" if segment.width == 1.0 else width_name(segment.width)
        for text in (f"{name}  {share}".rstrip(), name, f"{short} {share}".rstrip(), short):
            if (len(text) + 1) * _CHARACTER * size <= room:
                at = ((begin + segment.end) / 2.0, middle)
                written = self._axes.text(*at, text, fontsize=size, color=pen, zorder=5, parse_math=False)
                written.set(ha="center", va="center_baseline")
                return

    def _draw_limits(self) -> None:
        """Draws lines at the makespan and at the lower bound, with labels above the chart."""
        end, bound = self._timeline.makespan, self._timeline.lower_bound
        self._axes.vlines(end, 0.0, self._lanes, color="black", linewidth=1.3, zorder=3, clip_on=False)
        name = duration(end, like=self._span)
        at_edge = end + self._seconds_of(name) > self._span
        self._above(name, end, "right" if at_edge else "left", "black")
        if bound > 0.0:
            self._axes.vlines(bound, 0.0, self._lanes, color=_BOUND, linewidth=1.2, linestyle=(0, (4, 2)), zorder=4)
            text = f"lower bound {duration(bound, like=self._span)}"
            # Centred on its line, or moved to the left of the makespan's label.
            half = self._seconds_of(text) / 2.0
            free = end - (self._seconds_of(name) if at_edge else 0.0)
            self._above(text, max(half, min(bound, free - half)), "center", _BOUND)

    def _above(self, text: str, seconds: float, align: Literal["left", "center", "right"], pen: str) -> None:
        written = self._axes.annotate(
            text,
            (seconds, 1.0),
            (0.0, 3.0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=_SMALL,
            color=pen,
        )
        written.set_horizontalalignment(align)

    def _seconds_of(self, text: str) -> float:
        """Width of a small text, in seconds on the time axis."""
        return (len(text) + 1) * _CHARACTER * _SMALL / self._points_per_second if self._points_per_second else 0.0


def _draw_utilisation(axes: Axes, timeline: Timeline) -> None:
    """Draws the busy share of the devices over time."""
    edges, shares = timeline.utilisation_steps()
    if len(shares):
        axes.stairs(shares, edges, fill=True, color=_BUSY)
        axes.hlines(timeline.utilisation, 0.0, timeline.makespan, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_ylim(0.0, 1.0)
    axes.set_yticks([0.0, 0.5, 1.0], ["0", "busy", "100 %"])
    axes.tick_params(axis="y", labelsize=7)


def _set_time_axis(axes: Axes, span: float, *, labels: bool) -> None:
    axes.set_xlim(0.0, span if span > 0.0 else 1.0)
    axes.xaxis.set_major_locator(MultipleLocator(tick_step(span, 14)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: tick_label(seconds, span)))
    axes.tick_params(axis="x", labelbottom=labels)
    axes.grid(axis="x", color=RULE, linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)
    if labels:
        axes.set_xlabel(f"time ({unit_for(span)[0]})", fontsize=8.5, color=GREY, labelpad=4)


# --- Curves over the number of devices


def save_sweep(path: str | Path, results: Sequence[SimulationResult], title: str = "") -> None:
    """Saves a figure of makespan and device-hours over the number of devices, with a line for each planner.

    Args:
        path: the file to write; its suffix chooses the format.
        results: runs of the planners on several numbers of devices.
        title: the title of the figure.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidFieldError: ``results`` is empty, or the file cannot be written.
    """
    save_figure(draw_sweep(results, title), path)


def draw_sweep(results: Sequence[SimulationResult], title: str = "") -> Figure:
    """The figure that :func:`save_sweep` saves, with two axes: makespan and device-hours."""
    _imports.check()
    if not results:
        raise InvalidFieldError("results", results, "must not be empty")
    figure = Figure(figsize=(_WIDTH, 4.6), facecolor="white", layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold", parse_math=False)
    left, right = figure.subplots(1, 2)
    unit, seconds = unit_for(max(result.makespan for result in results))
    counts = sorted({result.n for result in results})
    planners = list(dict.fromkeys(result.planner for result in results))
    for position, planner in enumerate(planners):
        runs = sorted((result for result in results if result.planner == planner), key=lambda result: result.n)
        style = {"color": colour(position), "marker": "osD^v"[position % 5], "markersize": 5.5, "linewidth": 1.8}
        xs = [run.n for run in runs]
        left.plot(xs, [run.makespan / seconds for run in runs], label=planner, **style)
        right.plot(xs, [run.device_hours for run in runs], label=planner, **style)
    _draw_advice(left, advise(results), counts, seconds)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.yaxis.set_minor_locator(NullLocator())
    left.set_title(f"makespan ({unit})", fontsize=10, loc="left")
    right.set_ylim(0.0, 1.08 * max(result.device_hours for result in results))
    right.set_title(f"{unit_name(results)}-hours paid for", fontsize=10, loc="left")
    for axes in (left, right):
        _set_count_axis(axes, counts)
    left.legend(frameon=False, fontsize=9)
    return figure


def _draw_advice(axes: Axes, advice: ClusterSizeAdvice, counts: Sequence[int], unit: float) -> None:
    """Marks the knee of the best planner, and draws perfect scaling for comparison."""
    knee, fewest = advice.knee, advice.runs[0]
    perfect = [fewest.makespan / unit * fewest.n / count for count in counts]
    axes.plot(counts, perfect, color="#999999", linestyle="--", linewidth=1.0, zorder=1, label="perfect scaling")
    at = (knee.n, knee.makespan / unit)
    axes.plot(*at, marker="o", markersize=14, markerfacecolor="none", markeredgecolor="black", linewidth=0.0)
    label = f"knee: {knee.n}"
    axes.annotate(label, at, (0, -18), textcoords="offset points", ha="center", fontsize=9, weight="bold")


def _set_count_axis(axes: Axes, counts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(counts), [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("devices", fontsize=9, color=GREY)
    plain_axes(axes)


def check_plot(path: str | Path, field: str = "plot") -> None:
    """Checks in advance that a figure can be saved.

    Args:
        path: the file to write.
        field: the caller's name for ``path``, for errors.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidFieldError: the suffix is not a format of matplotlib, or the folder does not exist.
    """
    _imports.check()
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lower().lstrip(".") not in formats:
        raise InvalidFieldError(field, str(path), f"must end in one of .{', .'.join(formats)}")
    if not Path(path).parent.is_dir():
        raise InvalidFieldError(field, str(path), "cannot be written: its folder does not exist")


def save_figure(figure: Figure, path: str | Path, field: str = "plot") -> None:
    """Saves a figure; raises as :func:`check_plot` does, and if the file cannot be written."""
    check_plot(path, field)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # What the font lacks is drawn as boxes.
            with replacing(path) as draft:
                figure.savefig(draft, dpi=150, format=Path(path).suffix.lower().lstrip("."))
    except OSError as error:
        raise InvalidFieldError(field, str(path), f"cannot be written: {error.strerror or error}") from error
