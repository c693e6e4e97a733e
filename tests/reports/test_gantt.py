from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from fluid.display.palette import colour
from fluid.errors import InvalidFieldError
from fluid.planners.instance import Instance
from fluid.planners.planner import Plan
from fluid.planners.portfolio import PLANNERS, make_planner
from fluid.planners.rollout import Segment
from fluid.reports.figures.gantt import GanttPanel, draw_gantt, draw_sweep, save_gantt, save_sweep, short_names
from fluid.reports.run.timeline import Timeline
from fluid.resources import Cluster
from fluid.simulation.simulation_result import SimulationResult

PNG = b"\x89PNG\r\n\x1a\n"


def plan_of(planner: str, instance: Instance) -> Plan:
    return Plan(planner, instance, make_planner(planner).arrange(instance))


def toy(planner: str, epsilon: float = 0.0) -> Plan:
    names = ["a1", "a2", "a3", "a4"]
    return plan_of(planner, Instance.build([4.0, 4.0, 12.0, 30.0], 5, c=2, d=5, trial_ids=names, epsilon=epsilon))


def chart_of(figure: Figure, panel: int = 0) -> Axes:
    return figure.axes[2 * panel]


def bars(axes: Axes, row: int) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_gid() == f"row-{row}"]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def size_of_png(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(PNG)
    width, height = struct.unpack(">II", head[16:24])
    return width, height


# --- The chart


def test_a_wide_trial_is_one_rectangle_over_its_devices() -> None:
    axes = chart_of(draw_gantt([GanttPanel.of_plan(toy("static"))]))
    (a4,) = bars(axes, 3)
    assert (a4.get_x(), a4.get_width()) == (0.0, pytest.approx(10.0))
    assert 0.0 < a4.get_y() < 0.2
    assert 2.8 < a4.get_y() + a4.get_height() < 3.0
    assert axes.get_ylim() == (5.0, 0.0)


def test_co_residents_lie_side_by_side_in_their_lane() -> None:
    axes = chart_of(draw_gantt([GanttPanel.of_plan(toy("static"))]))
    (a1,), (a2,) = bars(axes, 0), bars(axes, 1)
    assert a1.get_height() == pytest.approx(a2.get_height())
    assert a1.get_y() + a1.get_height() == pytest.approx(a2.get_y())
    assert a1.get_y() > 4.0
    assert a2.get_y() + a2.get_height() < 5.0


def test_a_shared_lane_is_tinted_while_it_is_shared() -> None:
    axes = chart_of(draw_gantt([GanttPanel.of_plan(toy("dynamic"))]))
    (tint,) = [patch for patch in axes.patches if patch.get_gid() == "shared"]
    assert isinstance(tint, Rectangle)
    assert (tint.get_x(), tint.get_width()) == (0.0, pytest.approx(4.0))


def test_scattered_devices_have_a_rectangle_each_and_one_label() -> None:
    segment = Segment(0, 0.0, 1.0, (0, 2, 3), 3.0)
    timeline = Timeline(Cluster.of(4).devices, (segment,), ("lonely",), 1.0)
    axes = chart_of(draw_gantt([GanttPanel("p", timeline)]))
    assert len(bars(axes, 0)) == 2
    assert texts(axes).count("lonely  x3") == 1


def test_pauses_are_hatched() -> None:
    axes = chart_of(draw_gantt([GanttPanel.of_plan(toy("dynamic", epsilon=0.25))]))
    (pause,) = [patch for patch in axes.patches if patch.get_gid() == "pause"]
    assert isinstance(pause, Rectangle)
    assert pause.get_hatch()
    assert (pause.get_x(), pause.get_width()) == (pytest.approx(10.0), pytest.approx(0.25))
    plain = chart_of(draw_gantt([GanttPanel.of_plan(toy("dynamic"))]))
    assert not [patch for patch in plain.patches if patch.get_gid() == "pause"]


def test_absent_devices_are_hatched() -> None:
    segment = Segment(0, 0.0, 9.0, (0,), 1.0)
    timeline = Timeline(Cluster.of(2).devices, (segment,), ("t",), 9.0, changes=((4.0, 1, False),))
    axes = chart_of(draw_gantt([GanttPanel("p", timeline)]))
    (absent,) = [patch for patch in axes.patches if patch.get_gid() == "absent"]
    assert isinstance(absent, Rectangle)
    assert (absent.get_x(), absent.get_y(), absent.get_width()) == (4.0, 1.0, 5.0)


def test_labels_name_the_trial_and_its_width_where_they_fit() -> None:
    said = texts(chart_of(draw_gantt([GanttPanel.of_plan(toy("static"))])))
    assert {"a1  1/2", "a2  1/2", "a3", "a4  x3"} <= set(said)
    assert "lower bound 8.2 s" in said
    assert "12 s" in said
    assert "makespan 12 s, 1.46x the lower bound, devices busy 77 %, 0 resizes" in said


def test_short_names_where_long_ones_do_not_fit() -> None:
    heights = np.random.default_rng(1).lognormal(2.0, 0.8, 120)
    said = texts(chart_of(draw_gantt([GanttPanel.of_plan(plan_of("fifo", Instance.build(heights, 8)))])))
    labels = [text for text in said if text.split()[0].isdecimal()]
    assert len(labels) > 40
    assert any(text.startswith("trial-") for text in said)


def test_short_names() -> None:
    assert short_names(["trial-00017", "trial-00003"]) == ("17", "3")
    assert short_names(["trial 3, stage 1", "trial 12, stage 0"]) == ("3", "12")
    assert short_names(["lr=0.1,bs=32", "lr=0.01,bs=64"]) == ("lr=0.1", "lr=0.01")
    assert short_names(["alone-7"]) == ("7",)
    assert short_names(["x-", "x-"]) == ("x-", "x-")
    assert short_names([]) == ()


def test_panels_share_the_axis_of_time() -> None:
    figure = draw_gantt([GanttPanel.of_plan(toy(name)) for name in PLANNERS], "a title")
    assert len(figure.axes) == 2 * len(PLANNERS)
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, 30.0)}
    assert [text.get_text() for text in figure.texts] == ["a title"]
    for panel, name in enumerate(PLANNERS):
        assert name in texts(chart_of(figure, panel))


def test_a_trial_has_one_colour_in_every_panel() -> None:
    figure = draw_gantt([GanttPanel.of_plan(toy(name)) for name in ("fifo", "static")])
    found = {bars(chart_of(figure, panel), 3)[0].get_facecolor() for panel in (0, 1)}
    assert len(found) == 1
    assert colour(3) != colour(2)


# --- Files


def test_a_png_of_sensible_size(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    save_gantt(path, [GanttPanel.of_plan(toy(name)) for name in PLANNERS], "all planners")
    width, height = size_of_png(path)
    assert width == 1800
    assert 1200 < height < 3000
    assert path.stat().st_size > 20_000


@pytest.mark.parametrize(("k", "n"), [(1, 1), (150, 16), (300, 200)])
def test_small_and_large_charts(tmp_path: Path, k: int, n: int) -> None:
    heights = np.random.default_rng(0).lognormal(5.0, 1.0, k)
    plan = plan_of("dynamic", Instance.build(heights, n, alpha=1.1, beta=1.05, epsilon=5.0))
    path = tmp_path / "chart.png"
    save_gantt(path, [GanttPanel.of_plan(plan)])
    assert size_of_png(path)[1] < 2600


def test_an_empty_run_is_drawn(tmp_path: Path) -> None:
    save_gantt(tmp_path / "chart.png", [GanttPanel("p", Timeline(Cluster.of(2).devices, (), (), 0.0))])
    assert size_of_png(tmp_path / "chart.png")[0] == 1800


def test_names_are_not_formulas(tmp_path: Path) -> None:
    plan = plan_of("fifo", Instance.build([1.0], 1, trial_ids=[r"$\frac$"]))
    panel = GanttPanel(r"$\bad$", Timeline.of_plan(plan))
    named = [text for text in draw_gantt([panel], r"$\nothing$").findobj(Text) if "$" in text.get_text()]
    assert {text.get_text() for text in named} == {r"$\frac$", r"$\bad$", r"$\nothing$"}
    assert not any(text.get_parse_math() for text in named)
    save_gantt(tmp_path / "chart.png", [panel], r"$\nothing$")
    assert size_of_png(tmp_path / "chart.png")[0] == 1800


def test_other_formats(tmp_path: Path) -> None:
    save_gantt(tmp_path / "chart.svg", [GanttPanel.of_plan(toy("static"))])
    assert "<svg" in (tmp_path / "chart.svg").read_text()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    panel = GanttPanel.of_plan(toy("static"))
    with pytest.raises(InvalidFieldError, match="panels"):
        draw_gantt([])
    with pytest.raises(InvalidFieldError, match="results"):
        draw_sweep([])
    with pytest.raises(InvalidFieldError, match=r"plot=.*cannot be written"):
        save_gantt(tmp_path / "no" / "chart.png", [panel])
    with pytest.raises(InvalidFieldError, match=r"plot=.*must end in one of .*\.png"):
        save_gantt(tmp_path / "chart.nonsense", [panel])
    with pytest.raises(InvalidFieldError, match=r"plot=.*must end in"):
        save_gantt(tmp_path / "chart", [panel])
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InvalidFieldError, match=r"plot=.*cannot be written"):
        save_gantt(tmp_path / "folder.png", [panel])


# --- Curves


def result(planner: str, n: int, makespan: float) -> SimulationResult:
    return SimulationResult(
        planner=planner,
        n=n,
        makespan=makespan,
        busy_device_seconds=n * makespan,
        utilisation=1.0,
        lower_bound=1.0,
        device_hours=n * makespan / 3600.0,
        resizes=0,
        trials=1,
        stopped=0,
        groups=(),
        segments=(),
        trial_ids=(),
        cluster=Cluster.of(n),
        device_changes=(),
    )


def test_a_line_for_each_planner(tmp_path: Path) -> None:
    results = [result("fifo", n, 3600.0) for n in (1, 2, 4)]
    results += [result("portfolio", n, 3600.0 / n) for n in (4, 2, 1)]
    figure = draw_sweep(results, "a title")
    left, right = figure.axes
    lines = {line.get_label(): line for line in left.get_lines()}
    assert lines["fifo"].get_xydata().tolist() == [[1, 60], [2, 60], [4, 60]]
    assert lines["portfolio"].get_xydata().tolist() == [[1, 60], [2, 30], [4, 15]]
    assert lines["perfect scaling"].get_xydata().tolist() == [[1, 60], [2, 30], [4, 15]]
    assert "knee: 4" in texts(left)
    hours = {line.get_label(): line for line in right.get_lines()}
    assert hours["fifo"].get_xydata().tolist() == [[1, 1], [2, 2], [4, 4]]
    save_sweep(tmp_path / "sweep.png", results)
    assert size_of_png(tmp_path / "sweep.png") == (1800, 690)
