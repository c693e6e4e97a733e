from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fluid.errors import InvalidFieldError
from fluid.report.run import Run, TrialRun, less_is_better, load_run
from fluid.strips import Segment
from fluid.trialgroup import Trial

Sessions = Callable[..., Any]


def trial(trial_id: str, budget: int = 1) -> Trial:
    return Trial(print, budget=budget, trial_id=trial_id)


def by_id(run: Run) -> dict[str, TrialRun]:
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
    assert (b.best("loss"), b.best("eval/f1"), b.best("nothing")) == (0.8, 0.5, None)
    assert c.failure == "ValueError: too <small>"
    assert d.failure == ""


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
    with (small_run / "results.jsonl").open("a") as file:
        file.write("\n".join(lines))
    run = load_run(small_run)
    assert run.notes == (
        "2 lines of results.jsonl could not be read.",
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


@pytest.mark.parametrize(
    ("metric", "less"),
    [
        ("loss", True),
        ("val_loss", True),
        ("eval/cross-entropy-loss", True),
        ("valloss", True),
        ("RMSE", True),
        ("accuracy", False),
        ("reward", False),
        ("glossary", False),
    ],
)
def test_less_is_better(metric: str, less: bool) -> None:
    assert less_is_better(metric) is less


def test_lines_are_in_the_documented_format(tmp_path: Path) -> None:
    """Folders may be written by other programs too."""
    result = {"group": "0", "trial": "a", "iteration": 1, "metrics": {"m": 1}, "seconds": 2, "width": 1, "devices": [4]}
    (tmp_path / "results.jsonl").write_text(json.dumps({**result, "at": 12}) + "\n")
    (tmp_path / "trials.jsonl").write_text('{"group": "0", "name": "g"}\n{"group": "0", "trial": "a", "config": "?"}\n')
    run = load_run(tmp_path)
    assert [(s.start, s.end, s.devices) for s in run.timeline.segments] == [(0.0, 2.0, (4,))]
    assert run.trials[0].config == {}
