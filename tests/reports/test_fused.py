"""What reports show of fused trials: one bar per pack, its gain in words and figures, and device time by shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fluid.engine.commands import NoteMeasured, NotePlaced, NoteTrial
from fluid.engine.events import DeviceAdded, TrialStarted
from fluid.measure.profile import Profile
from fluid.reports.figures.gantt import GanttPanel, draw_gantt
from fluid.reports.figures.text_gantt import TextGantt
from fluid.reports.page.data import page_data
from fluid.reports.run.loader import load_run
from fluid.reports.run.run import TrialRun
from fluid.reports.tables.run import as_json, run_tables
from fluid.resources import Device
from fluid.results.loading import load
from fluid.trialgroup import Trial

NAMES = [f"t{number}" for number in range(8)]


def train(config: Mapping[str, Any]) -> Any:
    """Never run here."""


def trial(name: str, budget: int = 1) -> Trial:
    """A trial."""
    return Trial(train, {}, budget=budget, trial_id=name, profile_key="net")


def measured(rows: int, at: float, **fields: Any) -> NoteMeasured:
    """What the engine notes of the key of all trials."""
    facts = {"seconds": 2.0, "packing": 1, "width": 1, "alpha": 1.0, "beta": 1.0, **fields}
    return NoteMeasured(trial("t0").key, at=at, rows=rows, **facts)


@pytest.fixture
def fused_run(session: Callable[..., Any]) -> Path:
    """Eight trials of one shape on one core: one alone for 2 s, then two, then all eight fused, of which two leave."""
    run = session({"nets": [trial(name, 6) for name in NAMES]}, devices=[{"index": 0, "kind": "cpu"}])
    run.happened(DeviceAdded(0.0, Device(0, kind="cpu")))
    for name in NAMES:
        run.happened(
            NotePlaced(name, at=0.0, width=0.125, device_ids=(0,), lane_ids=(0,)),
            TrialStarted(0.0, name, 0, iteration=0, seconds=0.0),
        )
    run.happened(measured(1, 2.0))
    run.results(("t0", 1, 0.0, 2.0, 1.0, (0,), {"loss": 1.0}))
    run.step(NAMES, 2, 2.0, 4.0)
    run.step(NAMES, 3, 4.0, 6.0)
    run.happened(measured(8, 6.0, fused_gain=8.0))
    run.step(NAMES[2:], 4, 6.0, 8.0)
    run.step(NAMES[2:], 5, 8.0, 10.0)
    profile = Profile()
    for rows, seconds in ((1, 2.0), (2, 2.0), (4, 2.0), (8, 2.0)):
        for _ in range(3):
            profile.observe(trial("t0").key, seconds, rows=rows)
    return run.close(profile)


def named(path: Path, name: str) -> TrialRun:
    """One of the trials."""
    return next(found for found in load_run(path).trials if found.trial_id == name)


def text_of(renderable: Any, width: int = 100) -> str:
    """What a terminal of so many characters shows."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_pack_is_one_bar_and_counts_once(fused_run: Path) -> None:
    line = load_run(fused_run).timeline
    shown = [(s.start, s.end, s.width, line.pack_name(position)) for position, s in enumerate(line.segments)]
    assert sorted(shown) == [(0.0, 2.0, 1.0, ""), (2.0, 6.0, 1.0, "8 fused"), (6.0, 10.0, 1.0, "6 fused")]
    assert sorted(line.packs.values()) == [tuple(range(8)), tuple(range(2, 8))]
    assert (line.utilisation, line.makespan) == (1.0, 10.0)
    assert all(bar.slots == 1 for bar in line.bars[0]), "nothing runs beside a pack"


def test_a_trial_that_leaves_its_pack_for_another_one_has_two_segments(session: Callable[..., Any]) -> None:
    run = session({"nets": [trial(name) for name in NAMES[:4]]})
    run.step(["t0", "t1", "t2"], 1, 0.0, 1.0)
    run.step(["t0", "t1"], 2, 1.0, 2.0)
    run.step(["t2", "t3"], 2, 1.0, 2.0, device=1)
    run.step(["t0", "t1", "t2"], 3, 2.0, 3.0)
    line = load_run(run.close()).timeline
    found = [(line.packs[position], s.devices, s.start, s.end) for position, s in enumerate(line.segments)]
    assert sorted(found, key=lambda each: (each[2], each[1])) == [
        ((0, 1, 2), (0,), 0.0, 1.0),
        ((0, 1), (0,), 1.0, 2.0),
        ((2, 3), (1,), 1.0, 2.0),
        ((0, 1, 2), (0,), 2.0, 3.0),
    ]


def test_a_fused_trial_used_its_part_of_the_device(fused_run: Path) -> None:
    run = load_run(fused_run)
    parts = {found.trial_id: found.device_seconds for found in run.trials}
    assert parts["t0"] == pytest.approx(2.0 + 4.0 / 8) and parts["t7"] == pytest.approx(4.0 / 8 + 4.0 / 6)
    assert sum(parts.values()) == pytest.approx(10.0), "as long as the device was busy"
    data = as_json(run)["trials"][0]
    assert (data["seconds"], data["device_seconds"], data["fused_rows"]) == (6.0, pytest.approx(2.5), 8)


def test_results_say_how_many_trials_were_fused(fused_run: Path) -> None:
    first = next(found for found in load(fused_run).trials if found.trial_id == "t0")
    assert [result.rows for result in first.results] == [1, 8, 8]


def test_rows_that_are_none_are_no_iterations(session: Callable[..., Any]) -> None:
    run = session({"nets": [trial("t0", 2)]})
    run.step(["t0"], 1, 0.0, 1.0)
    path = run.close()
    file = path / "results.jsonl"
    file.write_text(file.read_text() + file.read_text().replace('"rows": 1', '"rows": 0'))
    assert [found.rows for found in named(path, "t0").finished] == [1]
    assert "could not be used" in " ".join(load_run(path).notes)


def test_the_story_says_what_fusing_gained(fused_run: Path) -> None:
    lines = load_run(fused_run).story_of(named(fused_run, "t2"))
    ran = [line for line in lines if line.what == "ran"]
    assert [line.text for line in ran] == [
        "ran iterations 2 to 5 on cpu 0 in 8 s, 2 s each; fused with 7 others, at the end with 5: 7.0x the iterations "
        "per second of one alone"
    ]
    assert ran[0].facts["rows"] == 8 and ran[0].facts["fused_gain"] == pytest.approx(7.0)
    first = [line.text for line in load_run(fused_run).story_of(named(fused_run, "t0")) if line.what == "ran"]
    assert first[0].startswith("ran iteration 1 on cpu 0 in 2 s") and "fused" not in first[0]
    assert "fused with 7 others: 8.0x" in first[1]


def test_no_gain_is_told_where_no_trial_was_alone(session: Callable[..., Any]) -> None:
    run = session({"nets": [trial(name, 2) for name in NAMES]})
    run.happened(NotePlaced("t0", at=0.0, width=0.125, device_ids=(0,), lane_ids=(0,)))
    run.step(NAMES, 1, 0.0, 5.0)
    run.happened(measured(64, 5.0, seconds=5.0))  # The seconds of a pack, in place of those alone.
    run.step(NAMES, 2, 5.0, 10.0)
    profile = Profile()
    profile.observe("net", 5.0, rows=8)
    path = run.close(profile)
    (ran,) = [line.text for line in load_run(path).story_of(named(path, "t0")) if line.what == "ran"]
    assert ran.endswith("fused with 7 others")
    (key,) = load_run(path).keys
    assert key.seconds is None and not profile.only_fused("other")
    assert "alone" not in text_of(run_tables(load_run(path)), 200)


def test_the_story_says_with_whom_a_trial_is_to_be_fused(session: Callable[..., Any]) -> None:
    run = session({"nets": [trial(name) for name in NAMES]})
    run.happened(DeviceAdded(0.0, Device(0, kind="cpu")))
    for name in NAMES[:2]:
        run.happened(NotePlaced(name, at=0.0, width=0.5, device_ids=(0,), lane_ids=(0,), alpha=1.0))
    run.happened(NotePlaced("t2", at=0.0, width=0.5, device_ids=(0,), lane_ids=(1,), alpha=1.1))
    path = run.close()
    told = [line.text for line in load_run(path).story_of(named(path, "t1"))]
    assert "started on cpu 0, in lane 0; joins t0 there, to be fused" in told
    told = [line.text for line in load_run(path).story_of(named(path, "t2"))]
    assert any("beside t0 and t1" in text and "alpha 1.10" in text for text in told)


def test_a_wait_for_fusing_to_be_measured_is_told_as_that(session: Callable[..., Any]) -> None:
    run = session({"nets": [trial(name) for name in NAMES[:2]]})
    run.happened(DeviceAdded(0.0, Device(0, kind="cpu")))
    run.happened(NotePlaced("t0", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)))
    run.happened(measured(1, 0.5, packing=1), measured(2, 1.0, packing=2), measured(4, 2.0, packing=4))
    run.happened(NotePlaced("t1", at=3.0, width=0.5, device_ids=(0,), lane_ids=(0,)))
    path = run.close()
    (waited,) = [line.text for line in load_run(path).story_of(named(path, "t1")) if line.what == "waited"]
    assert "fusing was being measured, up to 2 from" in waited and "packing" not in waited


def test_the_story_says_that_fusing_did_not_pay(session: Callable[..., Any]) -> None:
    run = session({"nets": [trial(name, 3) for name in NAMES[:3]]})
    run.happened(NotePlaced("t0", at=0.0, width=0.5, device_ids=(0,), lane_ids=(0,)))
    run.happened(measured(1, 1.0), measured(2, 1.5), measured(1, 4.0))
    run.results(("t0", 1, 0.0, 1.0, 1.0, (0,), {"loss": 1.0}))
    run.step(["t0", "t1"], 2, 1.0, 4.0)
    run.results(("t0", 3, 4.0, 5.0, 1.0, (0,), {"loss": 1.0}), ("t2", 1, 5.0, 6.0, 1.0, (0,), {"loss": 1.0}))
    path = run.close()
    text = "trials like it are not fused any more: 2 at once did not pay, or were refused"
    told = {name: [line.text for line in load_run(path).story_of(named(path, name))] for name in NAMES[:3]}
    assert text in told["t0"] and text not in told["t1"] + told["t2"], "it ended while the first ran, not the others"


def test_the_story_says_why_trials_are_not_fused(session: Callable[..., Any]) -> None:
    run = session({"nets": [trial("t0")]})
    reason = "it is not fused: nn.LSTM has no batching rule in torch.func.vmap"
    run.happened(NoteTrial("t0", at=0.5, text=reason))
    run.results(("t0", 1, 0.0, 1.0, 1.0, (0,), {"loss": 1.0}))
    path = run.close()
    assert reason in [line.text for line in load_run(path).story_of(named(path, "t0"))]


def test_the_measurements_say_how_many_rows_pay(fused_run: Path, session: Callable[..., Any]) -> None:
    (key,) = load_run(fused_run).keys
    assert (key.rows, key.fused, key.gain) == (8, 8, 8.0)
    assert "8 fused do 8.0x the iterations of one" in text_of(run_tables(load_run(fused_run)), 200)
    profile = Profile()
    for rows, seconds in ((1, 2.0), (2, 5.0), (4, 12.0)):
        for _ in range(3):
            profile.observe("conv", seconds, rows=rows)
    (key,) = load_run(session({"nets": [trial("a")]}, "conv").close(profile)).keys
    assert (key.fused, key.gain) == (1, pytest.approx(0.8))
    text = text_of(run_tables(load_run(fused_run.parent / "conv")), 200)
    assert "fusing does not pay (2 fused do 0.80x the iterations of one)" in text


def test_the_table_shows_device_time_and_widths(fused_run: Path) -> None:
    text = text_of(run_tables(load_run(fused_run), width=120), 120)
    assert "device time" in text and "1/8" in text
    rows = [line for line in text.splitlines() if line.strip().startswith("t7 ")]
    assert len(rows) == 1 and "1.17 s" in rows[0] and "1/8, 1/6" in rows[0]
    assert "resize" not in text, "that others come or go changes no trial's devices"


def test_the_text_chart_names_packs(fused_run: Path) -> None:
    chart = text_of(TextGantt(load_run(fused_run).timeline), 100)
    device = next(line for line in chart.splitlines() if line.startswith("cpu 0"))
    assert "8 fused" in device and "6 fused" in device and "100 %" in device
    assert "t0" in chart and "t7" not in chart, "the legend has the trials with a bar of their own"


def test_the_picture_names_packs(fused_run: Path) -> None:
    figure = draw_gantt([GanttPanel("run", load_run(fused_run).timeline)])
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"8 fused", "6 fused", "t0"} <= texts


def test_the_page_has_the_trials_of_each_pack(fused_run: Path) -> None:
    data = page_data([load_run(fused_run)])
    segments = data["runs"][0]["segments"]
    assert sorted(segment[5] for segment in segments if len(segment) > 5) == [list(range(8)), list(range(2, 8))]
    assert data["runs"][0]["keys"][0]["fused"] == ", 8 fused do 8.0x the iterations of one"
    facts = data["trials"][0]["facts"]
    assert (facts["fused"], data["trials"][0]["device_seconds"]) == ("with up to 7 others", 2.5)


def test_a_device_is_not_short_of_trials_while_all_are_fused(fused_run: Path) -> None:
    idle = load_run(fused_run).idle
    assert idle is not None and idle.ramp_up == 0.0
