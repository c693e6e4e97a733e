from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fluid.cli import main
from fluid.engine.commands import NoteDeviceLost, NoteResize
from fluid.engine.events import DeviceAdded, Failure
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.planners.rollout import Segment
from fluid.reports.page.data import page_data
from fluid.reports.run.loader import load_run
from fluid.reports.run.run import RecordedRun, TrialRun
from fluid.reports.tables.run import as_json, run_tables
from fluid.resources import Device
from fluid.search_shape import SearchShape
from fluid.trialgroup import Search, Shown, Trial
from tests.checked_files import without_checksums

Sessions = Callable[..., Any]


def trial(trial_id: str, budget: int = 1) -> Trial:
    return Trial(print, budget=budget, trial_id=trial_id)


def tables(run: RecordedRun) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(run_tables(run))
    return console.export_text()


def by_id(run: RecordedRun) -> dict[str, TrialRun]:
    return {found.trial_id: found for found in run.trials}


# --- What is read


def test_a_run_is_read_whole(small_run: Path) -> None:
    run = load_run(small_run)
    assert run.notes == ()
    assert run.name == "run"
    assert run.session["planner"] == "portfolio"
    assert [(group.name, [t.trial_id for t in group.trials]) for group in run.groups] == [
        ("rung 0", ["a", "b", "c"]),
        ("rung 1", ["d"]),
    ]
    assert [device.host for device in run.timeline.devices] == ["node"] * 3
    assert run.metrics == ("loss", "eval/f1", "epoch")
    assert run.resizes == 1


def test_trials_know_what_came_of_them(small_run: Path) -> None:
    trials = by_id(load_run(small_run))
    assert {name: found.state for name, found in trials.items()} == {
        "a": "DONE",
        "b": "DONE",
        "c": "FAILED",
        "d": "UNFINISHED",
    }
    a, b, c, d = trials.values()
    assert (a.iterations, a.budget, d.iterations, d.budget) == (3, 3, 1, 4)
    assert a.seconds == pytest.approx(5.5)
    assert a.widths == {0.5: 4.0, 2.0: pytest.approx(1.5)}
    assert a.config == {"lr": 0.1, "act": "relu"}
    assert a.key == "net"
    assert a.last == {"loss": 0.4, "epoch": 3, "phase": "last"}
    assert b.ranges["loss"] == (0.8, 0.85)
    found = [b.best("loss", less=True), b.best("eval/f1", less=False), b.best("nothing", less=True)]
    assert found == [0.8, 0.5, None]
    assert c.failure_text == "ValueError: too <small>"
    assert d.failure_text == ""


def test_groups_have_a_makespan(small_run: Path) -> None:
    first, second = load_run(small_run).groups
    assert (first.makespan, second.makespan) == (pytest.approx(8.0), pytest.approx(2.0))
    assert (first.iterations, second.iterations) == (6, 1)
    assert dict(first.states) == {"DONE": 2, "FAILED": 1}


def test_the_profile_says_what_was_measured(small_run: Path) -> None:
    (key,) = load_run(small_run).keys
    assert (key.key, key.seconds, key.packing, key.c) == ("net", 2.0, 2, 2)
    assert key.alpha == pytest.approx(1.25)
    assert key.beta == 1.0


def test_neighbours_that_come_and_go_resize_nobody(session: Sessions) -> None:
    made = session({"g": [trial("a", 9)]})
    widths = [0.5, 0.25, 0.5, 1.0, 1.0, 2.0, 0.5]
    made.results(*(("a", k + 1, k, k + 1.0, w, (0, 1)[: max(1, int(w))], None) for k, w in enumerate(widths)))
    assert load_run(made.close()).resizes == 3


# --- Segments and utilisation


def test_iterations_that_follow_one_another_are_one_segment(small_run: Path) -> None:
    line = load_run(small_run).timeline
    assert [(s.row, s.start, s.end, s.devices, s.width) for s in line.segments] == [
        (0, 0.0, 4.0, (0,), 0.5),
        (0, 6.5, 8.0, (1, 2), 2.0),
        (1, 0.0, 6.0, (0,), 0.5),
        (2, 0.0, 4.0, (1, 2), 2.0),
        (3, 8.0, 10.0, (0, 1, 2), 3.0),
    ]
    assert line.makespan == 10.0
    times, shares = line.utilisation_steps()
    busy = dict(zip(times[:-1].tolist(), np.round(shares * 3).tolist(), strict=True))
    assert busy == {0.0: 3.0, 4.0: 1.0, 6.0: 0.0, 6.5: 2.0, 8.0: 3.0}


def segments(session: Sessions, *rows: Any, folder: str = "run") -> list[Segment]:
    made = session({"g": [trial(name, 99) for name in dict.fromkeys(row[0] for row in rows)]}, folder)
    made.results(*rows)
    return list(load_run(made.close()).timeline.segments)


def test_a_pause_of_more_than_an_iteration_splits(session: Sessions) -> None:
    one = ("a", 1, 0.0, 2.0, 1.0, (0,), None)
    assert len(segments(session, one, ("a", 2, 4.0, 5.0, 1.0, (0,), None))) == 1
    assert len(segments(session, one, ("a", 3, 4.1, 5.0, 1.0, (0,), None), folder="other")) == 2


def test_a_pause_in_which_another_trial_started_there_splits(session: Sessions) -> None:
    found = segments(
        session,
        ("a", 1, 0.0, 2.0, 1.0, (0,), None),
        ("b", 1, 2.0, 3.0, 1.0, (0,), None),
        ("a", 2, 3.0, 5.0, 1.0, (0,), None),
    )
    assert [(s.row, s.start, s.end) for s in found] == [(0, 0.0, 2.0), (0, 3.0, 5.0), (1, 2.0, 3.0)]


def test_neighbours_do_not_split_one_another(session: Sessions) -> None:
    rows = [("a", k + 1, 2.0 * k, 2.0 * k + 1.99, 0.5, (0,), None) for k in range(5)]
    rows += [("b", k + 1, 2.0 * k + 0.5, 2.0 * k + 2.49, 0.5, (0,), None) for k in range(5)]
    assert len(segments(session, *rows)) == 2


def test_clocks_that_differ_a_little_make_no_neighbours(session: Sessions) -> None:
    made = session({"g": [trial("a"), trial("b")]})
    made.results(("a", 1, 0.0, 4.01, 1.0, (0,), None), ("b", 1, 4.0, 8.0, 1.0, (0,), None))
    line = load_run(made.close()).timeline
    assert [bar.slots for bar in line.bars[0]] == [1, 1]
    assert line.segments[0].end == 4.0


def test_trials_that_do_share_a_device_stay_as_they_are(session: Sessions) -> None:
    made = session({"g": [trial("a"), trial("b")]})
    made.results(("a", 1, 0.0, 4.0, 0.5, (0,), None), ("b", 1, 3.0, 8.0, 0.5, (0,), None))
    line = load_run(made.close()).timeline
    assert [bar.slots for bar in line.bars[0]] == [2, 2]
    assert line.segments[0].end == 4.0


def test_a_session_that_went_on_after_a_restart_of_its_machine(session: Sessions) -> None:
    found = segments(
        session,
        ("a", 1, 500.0, 510.0, 1.0, (0,), None),
        ("b", 1, 505.0, 510.5, 1.0, (1,), None),
        ("a", 2, -4000.0, -3990.0, 2.0, (0, 1), None),
        ("a", 3, -3990.0, -3980.0, 2.0, (0, 1), None),
    )
    assert [(s.row, s.start, s.end) for s in found] == [(0, 0.0, 10.0), (0, 10.5, 30.5), (1, 5.0, 10.5)]


# --- Folders that are not whole


def test_a_torn_last_line_is_passed_over(small_run: Path) -> None:
    whole = load_run(small_run)
    for name in ("results.jsonl", "trials.jsonl", "journal.jsonl"):
        with (small_run / name).open("ab") as file:
            file.write(b'{"group": "0", "trial": "\xc3')
    torn = load_run(small_run)
    assert torn.notes == ()
    assert torn.trials == whole.trials


def test_other_broken_lines_are_counted(small_run: Path) -> None:
    lines = [
        "nonsense",
        "[1]",
        '{"trial": "a"}',
        '{"trial": "a", "iteration": 9, "seconds": -1, "at": 5, "width": 1}',
        "",
    ]
    with (without_checksums(small_run) / "results.jsonl").open("a") as file:
        file.write("\n".join(lines))
    run = load_run(small_run)
    assert run.notes == (
        "2 lines of results.jsonl could not be read, the first at line 8.",
        "2 lines of results.jsonl could not be used.",
    )
    assert by_id(run)["a"].iterations == 3


@pytest.mark.parametrize("name", ["session.json", "trials.jsonl", "journal.jsonl", "profile.json"])
def test_a_missing_file_leaves_the_rest(small_run: Path, name: str) -> None:
    (small_run / name).unlink()
    run = load_run(small_run)
    assert len(run.trials) == 4
    assert run.timeline.makespan == 10.0
    assert len(run.timeline.devices) == 3
    if name == "journal.jsonl":
        assert {found.state for found in run.trials} == {"UNKNOWN"}
        assert {found.budget for found in run.trials} == {None}


@pytest.mark.parametrize("name", ["session.json", "journal.jsonl", "profile.json"])
def test_a_broken_file_is_told_of(small_run: Path, name: str) -> None:
    (small_run / name).write_text('{"v": 99\n{"v": 99}\n{}')
    run = load_run(small_run)
    assert len(run.notes) == 1
    assert len(run.trials) == 4


@pytest.fixture
def shared_folder(session: Sessions) -> Path:
    """A folder that two sessions of an older Fluid wrote, one after the other: ids begin anew, session.json is new."""
    folders = []
    for k in (1.0, 100.0):
        made = session({"sweep": [Trial(print, {"k": k}, budget=2, trial_id="trial-00000")]}, name=f"session-{k:g}")
        made.results(*(("trial-00000", n, n - 1.0, float(n), 1.0, (0,), {"loss": k / n}) for n in (1, 2)))
        made.end("trial-00000", iteration=2)
        folders.append(without_checksums(made.close()))
    first, second = folders
    for name in ("results.jsonl", "trials.jsonl", "journal.jsonl"):
        (first / name).write_bytes((first / name).read_bytes() + (second / name).read_bytes())
    (first / "session.json").write_bytes((second / "session.json").read_bytes())
    return first


def test_a_folder_that_two_sessions_wrote_says_so(shared_folder: Path) -> None:
    (note,) = load_run(shared_folder).notes
    assert note.startswith("Two sessions of an older Fluid wrote this folder.")
    with pytest.raises(InvalidFieldError, match="two sessions of an older Fluid wrote there"):
        FluidExecutor.resume(shared_folder, verbose=0)
    (shared_folder / "journal.jsonl").unlink()
    assert load_run(shared_folder).notes[1].startswith("Two sessions")


def test_iterations_that_two_drivers_reported_are_counted(small_run: Path) -> None:
    lines = (without_checksums(small_run) / "results.jsonl").read_text().splitlines(keepends=True)
    (small_run / "results.jsonl").write_text("".join([*lines, *lines[:2]]))
    (note,) = load_run(small_run).notes
    assert note.startswith("2 iterations were reported more than once: two drivers")


def test_lone_surrogates_of_an_older_fluid_can_be_shown(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {
        '"a"': r'"\ud800a \ud83d\ude00"',
        '"act"': r'"act\udfff"',
        '"relu"': r'"\ud801"',
        '"net"': r'"net\ud800"',
        '"rung 0"': r'"\udc00"',
    }
    for name in ("results.jsonl", "trials.jsonl", "journal.jsonl", "profile.json"):
        text = (without_checksums(small_run) / name).read_text()
        for before, after in written.items():
            text = text.replace(before, after)
        (small_run / name).write_text(text)
    run = load_run(small_run)
    assert run.notes == ()
    shown = by_id(run)["\\ud800a \N{GRINNING FACE}"]
    assert (shown.state, shown.iterations, shown.config) == ("DONE", 3, {"lr": 0.1, "act\\udfff": "\\ud801"})
    assert [group.name for group in run.groups] == ["\\udc00", "rung 1"]
    assert [key.key for key in run.keys] == ["net\\ud800"]
    for arguments in ([], ["--json"]):
        assert main(["report", str(small_run), *arguments]) == 0
        assert "ud800a \N{GRINNING FACE}" in capsys.readouterr().out


def test_only_results(small_run: Path) -> None:
    for path in small_run.iterdir():
        if path.is_file() and path.name != "results.jsonl":
            path.unlink()
    run = load_run(small_run)
    assert [group.name for group in run.groups] == ["0", "1"]
    assert run.timeline.makespan == 10.0


def test_a_session_that_has_only_begun(session: Sessions) -> None:
    run = load_run(session({"g": [trial("a")]}, devices=[{"index": 0, "kind": "cpu"}, {"no": "index"}, 7]).close())
    assert run.timeline.makespan == 0.0
    assert [device.kind for device in run.timeline.devices] == ["cpu"]
    (only,) = run.trials
    assert (only.state, only.iterations, only.last, only.widths) == ("UNFINISHED", 0, {}, {})
    assert run.groups[0].makespan == 0.0
    assert run.metrics == ()


def test_a_group_that_was_refused_is_left_out(small_run: Path) -> None:
    with (small_run / "trials.jsonl").open("a") as file:
        file.write('{"group": "2", "name": "refused"}\n{"group": "2", "trial": "z", "config": {}, "key": "net"}\n')
    assert [group.name for group in load_run(small_run).groups] == ["rung 0", "rung 1"]


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, reason in ((tmp_path / "none", "does not exist"), (file, "is a file"), (tmp_path, "no results.jsonl")):
        with pytest.raises(InvalidFieldError, match=reason) as caught:
            load_run(path)
        assert (caught.value.field, caught.value.value) == ("run", str(path))


# --- Searches


def sweep(session: Sessions, *parts: Trial, **search: Any) -> Any:
    """Begins a session that is one sweep; its trials are shown under names of their own."""
    made = session({"sweep": []}, name="folder")
    made.submit("sweep", parts, search=Search(**search))
    return made


def part(trial_id: str, shown: str, iterations: int = 0, **config: Any) -> Trial:
    return Trial(print, {"job": b"..."}, trial_id=trial_id, shown=Shown(shown, config, iterations, "result"))


def test_the_iterations_of_a_trial_that_was_stopped_are_of_the_sweeps_budget(session: Sessions) -> None:
    made = session({}, name="run")
    shape = SearchShape(algorithm="asha", rungs=(1, 3, 9))
    made.submit("sweep", [trial("a"), trial("b", 9)], Search("loss", "min", trials=2, extends=True, shape=shape))
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"loss": 2.0}), ("b", 1, 0.0, 1.0, 1.0, (1,), {"loss": 1.0}))
    made.stop("a", "STOPPED")
    made.end("a", iteration=1)
    run = load_run(made.close())
    assert [(each.iterations, each.budget) for each in run.trials] == [(1, 9), (1, 9)]
    assert "1/9" in tables(run) and "1/1" not in tables(run)
    assert page_data([run])["trials"][0]["budget"] == 9


def test_a_sweep_is_told_by_its_own_name_and_metric(session: Sessions) -> None:
    made = sweep(session, part("a", "a", lr=0.1), part("b", "b", lr=0.2), metric="margin", mode="min", trials=2)
    made.results(
        ("a", 1, 0.0, 1.0, 1.0, (0,), {"result": {"score": 7.0, "margin": 2.0, "config": None}, "saved": None}),
        ("b", 1, 0.0, 1.0, 1.0, (1,), {"result": {"score": 9.0, "margin": 3.0}, "saved": "a long text"}),
    )
    run = load_run(made.close())
    assert (run.name, run.is_one_search, run.metrics) == ("sweep", True, ("margin", "score"))
    assert run.mode_of("margin") == "min" and run.mode_of("score") is None
    a, b = run.trials
    assert (a.config, a.budget, a.last) == ({"lr": 0.1}, None, {"score": 7.0, "margin": 2.0})
    assert b.last == {"score": 9.0, "margin": 3.0}
    shown = tables(run)
    assert "best margin" in shown and shown.index("a  ") < shown.index("b  ")
    assert "2 unfinished; 2 iterations" in shown


def test_what_a_search_says_came_of_a_trial_is_its_state(session: Sessions) -> None:
    outcomes = {"a": "DONE", "b": "STOPPED", "c": "FAILED", "d": "PAUSED"}
    made = sweep(session, *(part(name, name) for name in (*outcomes, "e", "f")), extends=True)
    for name, outcome in outcomes.items():
        made.end(name)
        made.stop(name, outcome)
        made.forget(name)
    made.end("e")
    assert [found.state for found in load_run(made.close()).trials] == [*outcomes.values(), "PAUSED", "UNFINISHED"]


def test_a_trial_that_came_back_is_one_trial(session: Sessions) -> None:
    made = sweep(session, part("a", "a", x=1), part("b", "b"), part("a.1", "a", 2, x=5), metric="score", mode="max")
    made.results(
        ("a", 1, 0.0, 1.0, 1.0, (0,), {"result": {"score": 1.0}}),
        ("a", 2, 1.0, 2.0, 1.0, (0,), {"result": {"score": 2.0}}),
        ("b", 1, 2.0, 3.0, 1.0, (0,), {"result": {"score": 0.0}}),
        ("a.1", 1, 3.0, 4.0, 1.0, (1,), {"result": {"score": 7.0}}),
    )
    made.end("a", "FAILED", failure=Failure("error", "once"))
    made.stop("a", "PAUSED")
    made.forget("a")
    made.end("a.1")
    made.stop("a.1", "DONE")
    made.forget("a.1")
    run = load_run(made.close())
    a = run.trials[0]
    assert (a.trial_id, a.state, a.failure_text, a.config) == ("a", "DONE", "", {"x": 5})
    assert [(each.number, each.metrics["score"]) for each in a.finished] == [(1, 1.0), (2, 2.0), (3, 7.0)]
    intervals = [(s.row, s.start, s.devices) for s in run.timeline.segments]
    assert intervals == [(0, 0.0, (0,)), (0, 3.0, (1,)), (1, 2.0, (0,))]
    assert [entry["trial"] for entry in as_json(run)["trials"]] == ["a", "b"]


def test_a_trial_that_was_forgotten_keeps_its_state_budget_and_failure(session: Sessions) -> None:
    made = session({"g": [trial("a", 3), trial("b", 2)]})
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"loss": 1.0}))
    made.end("a", "FAILED", failure=Failure("error", "no more"))
    made.forget("a")
    a, b = load_run(made.close()).trials
    assert (a.state, a.budget, a.failure_text, a.iterations, a.last) == ("FAILED", 3, "no more", 1, {"loss": 1.0})
    assert (b.state, b.budget) == ("UNFINISHED", 2)


# --- Devices that come and go, and resizes


def test_a_device_that_is_lost_ends_there(session: Sessions) -> None:
    devices = [{"index": index, "kind": "gpu"} for index in range(2)]
    made = session({"g": [trial("a", 4)]}, devices=devices)
    made.happened(DeviceAdded(-1.0, Device(0, kind="gpu")), DeviceAdded(-1.0, Device(1, kind="gpu")))
    made.results(("a", 1, 0.0, 4.0, 1.0, (0,), None), ("a", 2, 6.0, 10.0, 1.0, (2,), None))
    made.happened(NoteDeviceLost(0, 4.0), DeviceAdded(6.0, Device(2, host="other", kind="gpu")), NoteDeviceLost(9, 7.0))
    line = load_run(made.close()).timeline
    assert line.absences == {0: ((4.0, 10.0),), 2: ((0.0, 6.0),)}
    assert [(device.index, device.host) for device in line.devices] == [
        (0, "localhost"),
        (1, "localhost"),
        (2, "other"),
        (9, "localhost"),
    ]
    assert line.busy_fractions == {0: 1.0, 1: 0.0, 2: 1.0, 9: 0.0}


def test_a_run_names_the_devices_that_were_given_up(session: Sessions) -> None:
    made = session({"g": [trial("a", 4)]})
    made.happened(NoteDeviceLost(0, 4.0, "it is broken"), NoteDeviceLost(1, 5.0))
    assert load_run(made.close()).notes == ("Device 0 was given up: it is broken.",)


def test_a_run_tells_for_how_long_devices_were_held_if_some_came_or_went(session: Sessions) -> None:
    made = session({"g": [trial("a", 4)]})
    made.happened(DeviceAdded(-1.0, Device(0)))
    made.results(("a", 1, 0.0, 90.0, 1.0, (0,), None))
    assert load_run(made.path).devices_held == "1 device"
    made.happened(DeviceAdded(10.0, Device(1)), NoteDeviceLost(1, 40.0))
    run = load_run(made.close())
    assert run.devices_held == "2 devices, held for 120 s in all"
    assert run.timeline.utilisation == 90.0 / 120.0


def test_devices_that_a_session_did_not_find_again_when_it_was_resumed_were_absent_from_then_on(
    session: Sessions,
) -> None:
    made = session({"g": [trial("a", 9)]})
    made.happened(*(DeviceAdded(400.0, Device(index)) for index in range(3)))
    made.results(("a", 1, 500.0, 510.0, 1.0, (0,), None))
    made.happened(DeviceAdded(520.0, Device(0)), DeviceAdded(520.0, Device(2)), DeviceAdded(525.0, Device(3)))
    made.results(("a", 2, 520.0, 540.0, 1.0, (0,), None))
    assert load_run(made.path).timeline.absences == {1: ((20.0, 40.0),), 3: ((0.0, 25.0),)}
    made.happened(NoteDeviceLost(2, 530.0))
    assert load_run(made.close()).timeline.absences == {1: ((20.0, 40.0),), 2: ((30.0, 40.0),), 3: ((0.0, 25.0),)}


def test_a_device_that_was_given_up_and_is_there_again_when_the_session_is_resumed_is_not_the_only_one(
    session: Sessions,
) -> None:
    made = session({"g": [trial("a", 9)]})
    made.happened(*(DeviceAdded(500.0, Device(index)) for index in range(3)), NoteDeviceLost(0, 505.0))
    made.results(("a", 1, 500.0, 510.0, 1.0, (1,), None))
    made.happened(*(DeviceAdded(520.0 + index / 10, Device(index)) for index in range(2)))
    made.results(("a", 2, 520.0, 540.0, 1.0, (1,), None))
    line = load_run(made.close()).timeline
    assert line.absences == {0: ((5.0, 20.0),), 2: ((pytest.approx(20.1), 40.0),)}


def test_a_resize_is_a_pause_at_the_beginning_of_what_follows(session: Sessions) -> None:
    made = session({"g": [trial("a", 4), trial("b", 1)]})
    made.results(
        ("a", 1, 0.0, 2.0, 1.0, (0,), None),
        ("a", 2, 3.0, 4.0, 2.0, (0, 1), None),
        ("a", 3, 4.0, 5.0, 2.0, (0, 1), None),
        ("b", 1, 0.0, 2.0, 1.0, (1,), None),
    )
    made.happened(
        NoteResize("a", at=2.9, width=2.0, device_ids=(1, 0), seconds=0.5),
        NoteResize("unknown", at=3.0, width=2.0, device_ids=(0, 1), seconds=1.0),
    )
    line = load_run(made.close()).timeline
    assert [(s.row, s.start, s.end, s.pause) for s in line.segments] == [
        (0, 0.0, 2.0, 0.0),
        (0, pytest.approx(2.4), 5.0, pytest.approx(0.5)),
        (1, 0.0, 2.0, 0.0),
    ]
    assert [(block.lane, block.lanes) for block in line.blocks] == [(0, 1), (0, 2), (1, 1)]


def test_a_resize_that_came_to_nothing_is_no_pause(session: Sessions) -> None:
    made = session({"g": [trial("a", 4)]})
    made.results(("a", 1, 0.0, 2.0, 1.0, (0,), None), ("a", 2, 3.0, 4.0, 1.0, (1,), None))
    made.happened(NoteResize("a", at=2.9, width=2.0, device_ids=(0, 1), seconds=0.5))
    assert [s.pause for s in load_run(made.close()).timeline.segments] == [0.0, 0.0]


def test_places_of_a_session_that_went_on_after_a_restart_are_on_its_time(session: Sessions) -> None:
    made = session({"g": [trial("a", 9)]})
    made.happened(DeviceAdded(400.0, Device(0)), DeviceAdded(400.0, Device(1)))
    made.results(("a", 1, 500.0, 510.0, 1.0, (0,), None))
    made.happened(DeviceAdded(-4100.0, Device(0)), DeviceAdded(-4100.0, Device(1)))
    made.results(("a", 2, -4000.0, -3990.0, 1.0, (0,), None))
    made.happened(NoteDeviceLost(1, -3995.0))
    assert load_run(made.close()).timeline.absences == {1: ((15.0, 20.0),)}


# --- Metrics


def test_metrics_of_any_kind(session: Sessions) -> None:
    made = session({"g": [trial("a", 3)]})
    made.results(
        ("a", 1, 0.0, 1.0, 1.0, (0,), {"x": {"y": {"z": 1}}, "flag": True, "note": "hi", "list": [1]}),
        ("a", 2, 1.0, 2.0, 1.0, (0,), 0.5),
        ("a", 3, 2.0, 3.0, 1.0, (0,), {"nan": float("nan"), "inf": float("inf")}),
    )
    (found,) = load_run(made.close()).trials
    assert found.ranges == {"x/y/z": (1, 1), "value": (0.5, 0.5)}
    assert found.last["note"] == "hi"
    assert found.last["flag"] is True


def test_bookkeeping_comes_last(session: Sessions) -> None:
    made = session({"g": [trial("a")]})
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"training_iteration": 1, "pid": 7, "reward": 2.0}))
    assert load_run(made.close()).metrics == ("reward", "training_iteration", "pid")


def test_lines_are_in_the_documented_format(tmp_path: Path) -> None:
    """Folders may be written by other programs too."""
    result = {"group": "0", "trial": "a", "iteration": 1, "metrics": {"m": 1}, "seconds": 2, "width": 1, "devices": [4]}
    (tmp_path / "results.jsonl").write_text(json.dumps({**result, "at": 12}) + "\n")
    (tmp_path / "trials.jsonl").write_text('{"group": "0", "name": "g"}\n{"group": "0", "trial": "a", "config": "?"}\n')
    run = load_run(tmp_path)
    assert [(s.start, s.end, s.devices) for s in run.timeline.segments] == [(0.0, 2.0, (4,))]
    assert run.trials[0].config == {}


@pytest.mark.parametrize(
    ("facts", "kind", "expected"),
    [
        ({"sharing": "mps", "sharing_why": ""}, "gpu", "NVIDIA MPS"),
        (
            {"sharing": "timeslice", "sharing_why": "it is not installed"},
            "gpu",
            "time slices (no MPS: it is not installed)",
        ),
        ({"sharing": "timeslice", "sharing_why": ""}, "gpu", "time slices"),
        ({"sharing": "timeslice", "sharing_why": ""}, "cpu", ""),
        ({}, "gpu", ""),
    ],
)
def test_how_gpus_were_shared(session: Callable[..., Any], facts: dict[str, str], kind: str, expected: str) -> None:
    made = session({"rung 0": [trial("a")]}, devices=[{"index": 0, "kind": kind, "host": "node"}], **facts)
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"loss": 1.0}))
    run = load_run(made.close())
    assert run.sharing == expected
    table, facts = tables(run), page_data([run])["runs"][0]["facts"]
    if expected:
        assert ["GPUs shared by", expected] in facts
        assert f"GPUs shared by {expected}\n" in table
    else:
        assert "GPUs shared" not in str(facts) + table
