from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from fluid.planners.instance import Instance
from fluid.planners.planner import Plan
from fluid.planners.portfolio import make_planner
from fluid.planners.rollout import Segment
from fluid.reports.figures.text_gantt import TextGantt
from fluid.reports.run.timeline import Timeline
from fluid.reports.tables.terminal import allocation_history, plan_summary, plan_table
from fluid.resources import Cluster

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def text_of(thing: RenderableType, width: int = 100, *, colour: bool = False) -> str:
    file = io.StringIO()
    system = "truecolor" if colour else None
    Console(file=file, width=width, force_terminal=colour, color_system=system, highlight=False).print(thing)
    return file.getvalue()


def plan_of(planner: str, instance: Instance) -> Plan:
    return Plan(planner, instance, make_planner(planner).arrange(instance))


def toy(planner: str = "portfolio", epsilon: float = 0.0) -> Plan:
    names = ["a1", "a2", "a3", "a4"]
    return plan_of(planner, Instance.build([4.0, 4.0, 12.0, 30.0], 5, c=2, d=5, trial_ids=names, epsilon=epsilon))


def many(k: int, n: int, planner: str = "dynamic") -> Plan:
    heights = np.random.default_rng(0).lognormal(5.0, 1.0, k)
    return plan_of(planner, Instance.build(heights, n, alpha=1.1, beta=1.05, c=4, d=8, epsilon=5.0))


def picture(plan: Plan, width: int = 100, *, colour: bool = False) -> list[str]:
    return text_of(TextGantt(Timeline.of_plan(plan)), width, colour=colour).splitlines()


# --- The picture


TOY_AT_59 = """\
gpu 0 │ddddddddddddddddddddddddddddddddddddddddddd·········
gpu 1 │ddddddddddddddddddddddddddddddddddddddddddd·········
gpu 2 │ddddddddddddddddddddddddddddddddddddddddddd·········
gpu 3 │cccccccccccccccccccccccccccccccccccccccccccccccccccc
gpu 4 ┌aaaaaaaaaaaaaaaaa···················┊···············
      └bbbbbbbbbbbbbbbbb···················┊···············
busy  │█████████████████▇▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▃▂▂▂▂▂▂▂▂
      └┴────────┴───────┴────────┴────────┴───────┴───────┴
       0        2       4        6        8       10   12 s
                         lower bound 8.2 s ▲
                                            makespan 12 s ▲
a a1  b a2  c a3  d a4
"""


def test_the_toy_example_as_a_picture() -> None:
    assert "\n".join(picture(toy("static"), 59)) + "\n" == TOY_AT_59


def test_every_device_has_its_line_and_wide_trials_their_letter_on_each() -> None:
    lines = picture(toy("static"), 107)
    rows = [line for line in lines if line.startswith("gpu")]
    assert [row.split()[1][0] for row in rows] == ["0", "1", "2", "3", "4"]
    columns = 94  # 107 less the names at the left and the shares at the right
    for row in rows[:3]:
        assert row.count("d") == round(columns * 10.0 / 12.0)
    assert rows[3].count("c") == columns
    assert rows[3].rstrip().endswith("100 %")


def test_co_residents_have_lines_of_their_own() -> None:
    lines = picture(toy("static"))
    first = next(index for index, line in enumerate(lines) if line.startswith("gpu 4"))
    assert "┌aaaa" in lines[first]
    assert "└bbbb" in lines[first + 1]
    assert lines[first].count("a") == lines[first + 1].count("b")


def test_a_trial_alone_fills_all_lines_of_a_shared_device() -> None:
    lines = picture(toy("portfolio"))
    first = next(index for index, line in enumerate(lines) if line.startswith("gpu 4"))
    assert lines[first].replace("a", "b")[7:94] == lines[first + 1][7:94]


def test_axis_and_markers() -> None:
    text = "\n".join(picture(toy("static")))
    assert "▲ lower bound 8.2 s" in text
    assert "makespan 12 s ▲" in text
    assert re.search(r"^ +0 +2 +4 +6 +8 +10 +12 s$", text, re.MULTILINE)
    assert "┊" in text


def test_pauses_are_marked() -> None:
    lines = picture(toy("dynamic", epsilon=1.0))
    assert any("~c" in line for line in lines)
    assert lines[-1] == "~ pause of a resize"
    assert not any("~" in line for line in picture(toy("dynamic")))


def test_an_absent_device_is_shown() -> None:
    segments = (Segment(0, 0.0, 10.0, (0,), 1.0), Segment(1, 0.0, 4.0, (1,), 1.0))
    line = Timeline(Cluster.of(2).devices, segments, ("x", "y"), 10.0, 0.0, ((5.0, 1, False),))
    lines = text_of(TextGantt(line), 50).splitlines()
    assert re.fullmatch(r"gpu 1 │b{17}·{5}/{21}", lines[1])
    assert not any("lower bound" in line for line in lines)
    assert "/ device absent" in lines[-1]


def test_a_trial_shorter_than_a_column_is_shown_where_nothing_else_is() -> None:
    segments = (Segment(0, 0.0, 100.0, (0,), 1.0), Segment(1, 50.0, 50.001, (1,), 1.0))
    line = Timeline(Cluster.of(2).devices, segments, ("x", "y"), 100.0)
    assert text_of(TextGantt(line), 50).splitlines()[1].count("b") == 1


def test_colour_puts_the_letter_at_the_start_only() -> None:
    lines = picture(toy("static"), colour=True)
    assert ANSI.sub("", lines[0]).count("d") == 1
    assert "\x1b[" in lines[0]
    assert "\x1b[" not in "".join(picture(toy("static")))


def test_letters_wrap_into_numbers_and_the_legend_is_cut() -> None:
    lines = picture(many(80, 8), 100)
    text = "\n".join(lines)
    assert "75====" in text
    legend = [line for line in lines if line.startswith(("a trial-00000", "g ", "m "))]
    assert len(legend) == 3
    assert re.search(r"\+\d+ more$", legend[-1])
    assert sum(line.count(" trial-") for line in legend) + int(legend[-1].split("+")[1].split()[0]) == 80


def test_legend_can_be_left_out() -> None:
    assert "a1" not in text_of(TextGantt(Timeline.of_plan(toy()), legend_lines=0))


def test_many_devices_are_cut_and_counted() -> None:
    lines = picture(many(300, 128, "fifo"), 120)
    shown = sum(line.startswith("gpu") for line in lines)
    assert shown == 32
    assert any(line.startswith("… and 96 more devices, busy ") for line in lines)
    assert len(lines) < 64


def test_ascii_where_the_output_can_take_no_more() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    Console(file=file, width=80).print(TextGantt(Timeline.of_plan(toy("static"))))
    file.flush()
    assert b"gpu 3 |ccc" in raw.getvalue()


def test_nothing_to_draw() -> None:
    lines = text_of(TextGantt(Timeline(Cluster.of(2).devices, (), (), 0.0)), 60).splitlines()
    assert lines[0].startswith("gpu 0 │···")


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 200),
    k=st.integers(1, 70),
    n=st.integers(1, 40),
    planner=st.sampled_from(["fifo", "static", "dynamic"]),
    colour=st.booleans(),
)
def test_no_width_breaks_it(width: int, k: int, n: int, planner: str, colour: bool) -> None:
    plan = many(k, n, planner)
    for line in picture(plan, width, colour=colour):
        assert len(ANSI.sub("", line)) <= max(width, 1)
    text_of(plan_table(plan, compact=width < 60), width, colour=colour)


# --- The table and the summary


def test_the_table_says_what_each_trial_gets() -> None:
    lines = text_of(plan_table(toy("dynamic"))).splitlines()
    cells = {line.split()[1]: re.split(r"\s{2,}", line.strip())[2:] for line in lines if re.match(r" [a-d] ", line)}
    assert cells == {
        "a1": ["4 s", "1/2 of device 4", "0 s", "4.00 s"],
        "a2": ["4 s", "1/2 of device 4", "0 s", "4.00 s"],
        "a3": ["12 s", "device 3, then 5 devices", "0 s", "10.40 s"],
        "a4": ["30 s", "3 devices: 0,1,2", "0 s", "10.00 s"],
    }


def test_a_compact_table_has_fewer_columns() -> None:
    text = text_of(plan_table(toy(), compact=True), 40)
    assert "ends" in text
    assert "starts" not in text
    assert all(len(line) <= 40 for line in text.splitlines())


def test_a_long_table_is_cut_and_says_so() -> None:
    text = text_of(plan_table(many(75, 8, "static")))
    assert "trial-00059" in text
    assert "trial-00060" not in text
    assert "... and 15 more trials" in text


def test_names_are_not_markup() -> None:
    plan = plan_of("fifo", Instance.build([1.0], 1, trial_ids=["[red]x[/red]:smile:"]))
    assert "[red]x[/red]:smile:" in text_of(plan_table(plan))
    assert "[red]x[/red]:smile:" in "\n".join(picture(plan))


def test_widths_in_words() -> None:
    def at(start: float, width: float, *devices: int) -> Segment:
        return Segment(0, start, start + 1.0, devices, width)

    assert allocation_history([]) == "-"
    assert allocation_history([at(1.0, 2.0, 0, 1), at(0.0, 1.0, 0)]) == "device 0, then 2 devices"
    assert allocation_history([at(0.0, 2.0, 0, 1), at(1.0, 0.25, 1)]) == "2 devices: 0,1, then 1/4 of device 1"
    story = [at(0.0, 1.0, 3), at(1.0, 2.0, 3, 4), at(2.0, 3.0, 3, 4, 5), at(3.0, 1.0, 3)]
    assert allocation_history(story) == "device 3, then 3 resizes to 1 device"


@pytest.mark.parametrize(
    ("planner", "said"),
    [
        (
            "static",
            "makespan 12 s (1.46x the lower bound, 8.2 s); devices busy 77 %; FIFO would take 30 s (2.50x)\n",
        ),
        ("fifo", "makespan 30 s (3.66x the lower bound, 8.2 s); devices busy 33 %; FIFO would take 30 s (1.00x)\n"),
    ],
)
def test_the_summary_is_one_line(planner: str, said: str) -> None:
    assert text_of(plan_summary(toy(planner), 30.0), 200) == said
