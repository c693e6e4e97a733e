"""``fluid why``: what a run's journal tells of one trial."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid.cli import main
from fluid.engine.commands import (
    FreeMemory,
    NoteHung,
    NotePaused,
    NotePlaced,
    NotePreempted,
    NoteQueued,
    NoteTrial,
    NoteWaiting,
    WaitReason,
)
from fluid.engine.events import (
    SET_ASIDE,
    BudgetExtended,
    Checkpoint,
    DeviceAdded,
    PauseRequested,
    ResumeRequested,
    SessionDraining,
    TrialSaved,
    TrialSetAside,
)
from fluid.reports.page.data import page_data
from fluid.reports.page.html import html_page
from fluid.reports.run.loader import load_run
from fluid.reports.tables.why import as_json
from fluid.resources import Device
from fluid.trialgroup import Search, Shown, Trial
from tests.json_fields import undescribed

ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]
Sessions = Callable[..., Any]
#: When the sessions of conftest.py begin on their clock.
ZERO = 5000.0


def trial(trial_id: str, budget: int) -> Trial:
    return Trial(print, budget=budget, trial_id=trial_id)


def story(path: Path, name: str) -> list[str]:
    """A trial's story: each line as its time and its text."""
    run = load_run(path)
    (found,) = [each for each in run.trials if each.trial_id == name]
    return [f"{line.at:.1f} {line.text}" for line in run.story_of(found)]


def texts(path: Path, name: str) -> str:
    return "\n".join(story(path, name))


# --- What is told


def test_none_of_the_session_before_is_beside_a_trial_once_the_driver_was_killed_and_the_session_resumed(
    session: Sessions,
) -> None:
    made = session({"g": [trial("a", 2)], "now": [trial("b", 2)]})
    made.happened(
        DeviceAdded(0.0, Device(0)),
        NotePlaced("b", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        DeviceAdded(5.0, Device(0)),
        NotePlaced("a", at=5.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
    )
    assert not any("joins" in line for line in story(made.close(), "a"))


def test_a_trial_that_made_room_says_for_which(session: Sessions) -> None:
    made = session({"g": [trial("a", 2)], "now": [trial("b", 1)]})
    made.happened(
        NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        NotePreempted("a", at=0.5, successor="b", co_residents=1, urgent_group="2"),
        NoteQueued("a", at=1.0, iteration=1, why="made room for urgent group '2'"),
        NotePlaced("b", at=1.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
    )
    lines = story(made.close(), "a")
    assert "0.5 makes room for b, whose group is urgent: pauses after its iteration" in lines
    assert "1.0 paused; it goes on after iteration 1" in lines


def test_the_story_of_a_widened_trial(told_run: Path) -> None:
    assert story(told_run, "a") == [
        "-1.0 submitted, to run 6 iterations",
        "-1.0 started on gpu 0, in lane 0; its lane was ready after 0.8 s; set up in 0.2 s",
        "0.0 ran iterations 1 to 4 on gpu 0 in 8 s, 2 s each; saved once, after iteration 1, to host memory in 4 ms",
        "8.1 widened from 1 to 2 devices (gpus 0,1), paused for 0.1 s, as decided 2.1 s before; predicted to end "
        "1.9 s earlier; realised over the 2 iterations that it then ran so: 1.7 s earlier",
        "8.1 ran iterations 5 to 6 on gpus 0,1 in 2.2 s, 1.1 s each",
        "10.3 done after 6 iterations",
    ]


def test_the_story_of_a_failed_trial_names_its_log(told_run: Path) -> None:
    log = told_run / "trials" / "b" / "output.log"
    assert story(told_run, "b")[2:] == [
        "0.1 ran iteration 1 on gpu 1 in 2 s",
        "3.1 failed, failure 1 of 2: ValueError: loss is <nan>; it goes on from the beginning, and repeats 1 "
        f"iteration; log: {log}",
        "3.1 waited 2.2 s: all devices were taken, at first gpu 0 by a, gpu 1 by c",
        "5.3 started on gpu 1, in lane 1; set up in 0.1 s",
        f"6.0 failed for good (error): ValueError: loss is <nan>; log: {log}",
    ]


def test_the_story_of_a_trial_that_waited_and_was_stopped(told_run: Path) -> None:
    assert story(told_run, "c")[1:] == [
        "-1.0 waited 4.1 s: all devices were taken, at first gpu 0 by a, gpu 1 by b",
        "3.1 started on gpu 1, in lane 1; set up in 0.1 s",
        "3.2 ran iteration 1 on gpu 1 in 2 s",
        "5.2 the submitter stopped it",
        "5.3 stopped after 1 iteration",
    ]


def test_memory_lanes_and_packing_are_reasons_to_wait(session: Sessions) -> None:
    made = session({})
    made.happened(DeviceAdded(0.0, Device(0)))
    made.submit("g", [trial("a", 3), trial("b", 3), trial("wide", 3), trial("pinned", 3)])
    made.happened(
        NotePlaced("a", at=0.0, width=0.5, device_ids=(0,), lane_ids=(0,), alpha=1.1),
        NoteWaiting(
            0,
            at=0.0,
            trial_ids=("b",),
            width=0.5,
            reason=WaitReason.MEMORY,
            need_bytes=3.0 * 2**30,
            memory=(FreeMemory(0, 2.1 * 2**30, 6.0 * 2**30),),
        ),
        NoteWaiting(1, at=0.0, trial_ids=("wide",), width=2.0, reason=WaitReason.DEVICES),
        NoteWaiting(2, at=0.0, trial_ids=("pinned",), width=1.0, reason=WaitReason.LANE),
        NoteWaiting(0, at=2.0, trial_ids=(), width=0.5, reason=WaitReason.DEVICES),
        NotePlaced("b", at=5.0, width=0.5, device_ids=(0,), lane_ids=(1,), alpha=1.1),
    )
    made.results(("a", 1, 0.0, 1.0, 0.5, (0,), {}))
    path = made.close()
    assert (
        "waited 5 s: device memory was short: it needs 3 GiB, and cpu 0 had 2.1 GiB of 6 GiB free; from 2 s on, "
        "the only device was taken, at first cpu 0 by a"
    ) in texts(path, "b")
    assert "beside a, as 2 at once get 1.82x as much done as one (alpha 1.10 so far)" in texts(path, "b")
    told = texts(path, "wide")
    assert "has waited 5 s so far: it is to run on 2 devices, and fewer were free, at first cpu 0 by a" in told
    assert "; 1 other trial got devices meanwhile" in told
    assert "another trial ran in the lane that keeps its state, which cannot be saved" in texts(path, "pinned")
    assert story(path, "pinned")[-1] == "5.0 waited for a device when the journal was read"
    assert story(path, "a")[-1] == "5.0 had not ended when the journal was read, and held cpu 0"


def test_moves_preemptions_extensions_and_rare_things_are_told(session: Sessions) -> None:
    made = session({"g": [trial("a", 2), trial("b", 2)]})
    made.happened(
        NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        NotePreempted("a", at=0.5, successor="b", co_residents=1),
        NoteQueued("a", at=1.0, iteration=1, why="waits to go on"),
        NotePlaced("b", at=1.0, width=1.0, device_ids=(0,), lane_ids=(1,)),
        NotePreempted("b", at=1.5, successor=None, co_residents=3),
        TrialSaved(2.0, "a", 0, Checkpoint(1, "a/1"), dropped=True, seconds=0.5),
        NotePlaced("a", at=2.0, width=1.0, device_ids=(1,), lane_ids=(2,), iteration=1),
        NoteTrial("a", at=2.5, text="stays at width 1 instead of going to 2: it was stopped"),
        BudgetExtended(3.0, "a", 4),
        NotePlaced("a", at=4.0, width=1.0, device_ids=(1,), lane_ids=(2,), iteration=2, resident=True),
    )
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {}))
    path = made.close()
    assert story(path, "a")[3:-1] == [
        "0.5 preempted: pauses after its iteration for b, which takes its device over; all end earlier so",
        "1.0 paused; it goes on after iteration 1",
        "1.0 waited 1 s",
        "2.0 its state after iteration 1 was moved out of lane 0 to disk in 0.5 s",
        "2.0 started on device 1, in lane 2 from its checkpoint after iteration 1, moved from device 0",
        "2.5 stays at width 1 instead of going to 2: it was stopped",
        "3.0 given 4 more iterations, 6 in all",
        "4.0 went on on device 1, in lane 2, which had kept its state after iteration 2",
    ]
    assert "leaves its device after its iteration: 3 trials at once get less done there than fewer" in texts(path, "b")


def test_a_pause_by_hand_is_told(session: Sessions) -> None:
    made = session({"g": [trial("a", 4), trial("b", 2)]})
    made.happened(
        NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        PauseRequested(1.5, "a"),
        NotePaused("a", at=2.0, iteration=2, why="paused by the user"),
        NotePlaced("b", at=2.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        PauseRequested(2.5, "b"),
        NotePaused("b", at=2.6, iteration=0, why="failure 1 of 2: no", kind="error", failures=1),
        ResumeRequested(7.0, "a"),
        NoteQueued("a", at=7.0, iteration=2, why="resumed by the user"),
        NotePlaced("a", at=8.0, width=1.0, device_ids=(0,), lane_ids=(0,), iteration=2, resident=True),
    )
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {}), ("a", 2, 1.0, 2.0, 1.0, (0,), {}))
    path = made.close()
    told = story(path, "a")
    paused = told.index("1.5 the user paused it")
    assert told[paused : paused + 5] == [
        "1.5 the user paused it",
        "2.0 paused by the user: it holds no device, and goes on after iteration 2 once resumed",
        "7.0 the user resumed it",
        "7.0 waited 1 s",
        "8.0 went on on device 0, in lane 0, which had kept its state after iteration 2",
    ]
    assert "failed, failure 1 of 2: no" in texts(path, "b")
    assert story(path, "b")[-1].endswith("was paused by the user when the journal was read")
    assert [found.state for found in load_run(path).trials] == ["UNFINISHED", "PAUSED BY THE USER"]


def test_a_search_algorithm_is_named_as_such(session: Sessions) -> None:
    made = session({})
    made.submit("sweep", [Trial(print, trial_id="x", shown=Shown("302fe_00001", {}))], Search("loss", "min"))
    made.results(("x", 1, 0.0, 1.0, 1.0, (0,), {}))
    made.stop("x", "STOPPED")
    path = made.close()
    assert "its search algorithm stopped it early" in texts(path, "302fe_00001")


def test_a_timeout_and_kinds_of_failures_to_come_are_told(session: Sessions) -> None:
    made = session({"g": [trial("a", 2)]})
    made.happened(
        NoteQueued("a", at=1.0, iteration=0, why="failure 1 of 2: 70 s without a result", kind="timeout"),
        NoteQueued("a", at=2.0, iteration=0, why="failure 2 of 2: gone", kind="eaten"),
    )
    told = texts(made.close(), "a")
    assert "ran into its time limit, failure 1 of 2: 70 s without a result" in told
    assert "failed (eaten), failure 2 of 2: gone" in told


def test_entries_that_are_not_known_or_not_as_they_should_be_are_passed_over(told_run: Path) -> None:
    before = story(told_run, "a")
    with (told_run / "journal.jsonl").open("a", encoding="utf-8") as file:
        for entry in (
            {"v": 2, "what": "DrainRequested", "at": ZERO + 5.0, "trial_id": "a", "deadline_s": 3},
            {"v": 2, "what": "NotePlaced", "at": ZERO + 11.0, "trial_id": "a"},
            {"v": 2, "what": "NoteWaiting", "at": ZERO + 11.0, "line": [], "trial_ids": 3},
            {"v": 2, "what": "ReportEnd", "at": "later", "trial_id": "a"},
        ):
            file.write(json.dumps(entry) + "\n")
        file.write('{"v": 2, "what": "NotePla')
    assert story(told_run, "a") == before


def test_a_journal_of_an_older_version_tells_what_it_can(small_run: Path) -> None:
    assert load_run(small_run).idle is None
    assert story(small_run, "d") == [
        "0.0 submitted, to run 4 iterations",
        "8.0 ran iteration 1 on devices 0,1,2 in 2 s",
        "10.0 had not ended when the journal was read",
    ]


def test_hangs_lost_checkpoints_and_drains_are_told(session: Sessions) -> None:
    made = session({"g": [trial("a", 9), trial("b", 9)]})
    made.happened(
        NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        NoteWaiting(0, at=0.0, trial_ids=("b",), width=1.0, reason=WaitReason.DEVICES),
        NoteHung("a", at=60.0, seconds=50.0, limit=600.0),
        NoteHung("a", at=610.0, seconds=600.0, limit=600.0, killed=True),
        SessionDraining(620.0, deadline=700.0),
    )
    journal = made.path / "journal.jsonl"
    lost = {"v": 2, "what": "ReportSetBack", "at": ZERO + 615.0, "trial_id": "a", "group_id": "0", "lost": 4}
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**lost, "checkpoint": None, "reason": "is damaged", "cannot_load": False}) + "\n")
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {}))
    path = made.close()
    told = texts(path, "a")
    assert "gave no result for 50 s; its stacks are in its log, and after 10 min its lane is killed" in told
    assert "gave no result for 10 min, and its lane was killed" in told
    assert "its state after iteration 4 was lost: is damaged; it goes on from the beginning" in told
    assert "the session was drained, and nothing started" in texts(path, "b")


# --- The command


def test_the_command_prints_times_and_clock(told_run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["why", str(told_run), "c"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "c of sweep: stopped, 1 of 9 iterations in 2 s"
    assert max(map(len, lines)) <= 80
    assert any(re.match(r" *3\.10 s  12:35:00  started on gpu 1", line) for line in lines)


def test_the_command_as_json(told_run: Path, capsys: Captured) -> None:
    assert main(["why", str(told_run), "a", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (told,) = data["trials"]
    assert (told["trial"], told["state"], told["iterations"]) == ("a", "DONE", 6)
    resized = next(line for line in told["story"] if line["what"] == "resized")
    assert resized["at_s"] == pytest.approx(8.1) and resized["clock"] == "12:35:05"
    assert resized["facts"]["predicted_gain_s"] == 1.9
    assert resized["facts"]["realised_gain_s"] == pytest.approx(1.7)
    assert undescribed({*data, *told, *resized}, as_json) == set()


def test_an_unknown_trial_is_refused_with_similar_names(told_run: Path, capsys: Captured) -> None:
    assert main(["why", str(told_run), "aa"]) == 2
    assert capsys.readouterr().err == "fluid: error: trial='aa': is not in this run; did you mean a?\n"
    assert main(["why", str(told_run), "nothing"]) == 2
    assert "trial='nothing': is not in this run; it has 3 trials" in capsys.readouterr().err


def test_a_trial_is_found_by_either_name(session: Sessions, capsys: Captured) -> None:
    made = session({})
    made.submit("sweep", [Trial(print, trial_id="x-7", shown=Shown("302fe_00001", {}))], Search("loss", "min"))
    path = str(made.close())
    for name in ("302fe_00001", "x-7"):
        assert main(["why", path, name]) == 0
        assert "302fe_00001" in capsys.readouterr().out


def test_the_manual_shows_real_stories(told_run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    manual = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    monkeypatch.chdir(told_run.parent)
    monkeypatch.setenv("COLUMNS", "90")
    (said,) = re.findall(r"    fluid why RUN TRIAL\n\n```text\n(.*?)\n```", manual, re.DOTALL)
    assert main(["why", "run", "a"]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == said.splitlines()


# --- The page


def test_the_page_has_each_story_as_text(told_run: Path) -> None:
    data = page_data([load_run(told_run)])
    assert data["runs"][0]["clocked"]
    assert data["trials"][2]["story"][2][0] == "3.10 s"
    assert data["trials"][1]["story"][3][2].startswith("failed, failure 1 of 2: ValueError: loss is <nan>")
    assert "loss is <nan>" not in html_page([load_run(told_run)]), "it is escaped"


def test_long_stories_are_shortened_in_the_page(session: Sessions) -> None:
    made = session({"g": [trial("a", 9)]})
    made.happened(*(NoteTrial("a", at=float(number), text=f"{number} " + "x" * 5000) for number in range(500)))
    (shown,) = page_data([load_run(made.close())])["trials"]
    assert len(shown["story"]) == 201
    assert shown["story"][100][2] == "... 302 lines left out; fluid why tells all"
    assert max(len(line[2]) for line in shown["story"]) == 600


def test_a_trial_that_the_session_sets_aside_is_not_one_that_the_user_paused(session: Sessions) -> None:
    made = session({"g": [trial("a", 4)]})
    made.happened(
        NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        TrialSetAside(1.5, "a"),
        NotePaused("a", at=2.0, iteration=2, why=SET_ASIDE),
    )
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {}), ("a", 2, 1.0, 2.0, 1.0, (0,), {}))
    path = made.close()
    why = "2.0 set aside, as no further one would end in time: it holds no device, and goes on after iteration 2"
    assert f"{why} once resumed" in story(path, "a")
    assert [found.state for found in load_run(path).trials] == ["UNFINISHED"]
