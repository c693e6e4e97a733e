"""Runs whose trials start from others' states, or share iterations: what results, tables and reports say of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from msgspec import structs

import fluid
from fluid.cli import main
from fluid.engine.commands import NotePlaced, Report, ReportEnd
from fluid.engine.events import Checkpoint, DeviceAdded, GroupSubmitted, StartState, TrialForked, TrialSpec
from fluid.rehearsal.outcome import outcomes_of
from fluid.rehearsal.run_records import read_records
from fluid.reports.figures.forks import lineages
from fluid.reports.page.data import page_data
from fluid.reports.page.html import html_page
from fluid.reports.run.loader import RunReader, load_run
from fluid.resources import Device
from fluid.results.best import BestTracker
from fluid.results.runs import summarize
from fluid.results.stored_run import read_run
from fluid.results.submitted import GroupLine
from fluid.session.folder.folder import RunFolder
from fluid.session.folder.resume import read_session
from fluid.trainables.encoded_metrics import encode_metrics
from fluid.trainables.payload import payload_of
from fluid.trial_fields import StartFrom
from fluid.trialgroup import Search, Trial, TrialState
from fluid.wire import Frame

Captured = pytest.CaptureFixture[str]
ZERO = 5000.0
#: The shared run of the trials that agree until iteration 4.
SHARED = "sweep-shared-00000"


def train(config: Any) -> Any:
    """Never run here."""


class Folder:
    """Has a session's own writer write what happened; times begin at 0."""

    def __init__(self, path: Path, trials: Sequence[Trial], search: Search | None = None) -> None:
        self.path = path
        self._folder = RunFolder.create(path)
        devices = [{"index": index, "kind": "cpu"} for index in range(2)]
        clock = {"at": ZERO - 1.0, "time": "2026-01-31 12:34:56"}
        self._folder.write_session(devices=devices, clock=clock, price_per_device_hour=3600.0)
        self._folder.write_trials(
            "0", GroupLine("sweep", search), {each: payload_of(train, each.config, None) for each in trials}
        )
        specs = tuple(TrialSpec(each.id, each.budget, profile_key="net", start=start_of(each)) for each in trials)
        self.tell(*(DeviceAdded(-1.0, Device(index, "localhost", "cpu")) for index in range(2)))
        self.tell(GroupSubmitted(-1.0, "0", specs))

    def tell(self, *items: Frame) -> None:
        for item in items:
            timed = structs.replace(item, at=ZERO + item.at)
            is_decision = isinstance(item, (Report, ReportEnd, NotePlaced))
            self._folder.journal([] if is_decision else [timed], [timed] if is_decision else [])

    def runs(self, trial: str, iterations: Iterable[int], at: float, each: float = 1.0, **facts: Any) -> None:
        """A trial runs iterations, of so many seconds each, from a time on."""
        for place, iteration in enumerate(iterations):
            placed: dict[str, Any] = {"device_ids": (0,), "width": 1.0, **facts}
            metrics = encode_metrics({"loss": 10.0 / iteration})
            end = at + (place + 1) * each
            self.tell(Report(trial, "0", iteration=iteration, metrics=metrics, seconds=each, at=end, **placed))

    def forks(self, child: str, parent: str, iteration: int, at: float) -> None:
        checkpoint = Checkpoint(iteration, f"{child}/{iteration}")
        self.tell(TrialForked(at, child, parent=parent, lane_id=0, checkpoint=checkpoint, seconds=0.1))

    def ends(self, trial: str, iteration: int, at: float = 0.0) -> None:
        self.tell(ReportEnd(trial, "0", state=TrialState.DONE, iteration=iteration, at=at, failure=None))

    def close(self) -> Path:
        self._folder.close()
        return self.path


def start_of(trial: Trial) -> StartState | None:
    start = trial.start_from
    return None if start is None else StartState(start.parent, start.at, is_shared=start.is_shared)


def trial(trial_id: str, budget: int, start: StartFrom | None = None, **config: Any) -> Trial:
    shared = "-shared-" in trial_id
    made = Trial(train, config, budget=budget, trial_id=trial_id, start_from=start)
    return made.changed(is_shared_run=True) if shared else made


@pytest.fixture
def forked(tmp_path: Path) -> Path:
    """``child`` starts from the newest state of ``a``, which was at iteration 3, as that went on; ``late`` waits."""
    trials = [trial("a", 5, lr=1.0), trial("child", 6, StartFrom("a"), lr=2.0), trial("late", 9, StartFrom("a", 8))]
    folder = Folder(tmp_path / "run", trials)
    folder.tell(NotePlaced("a", at=-1.0, width=1.0, device_ids=(0,), lane_ids=(0,)))
    folder.runs("a", range(1, 4), at=0.0)
    folder.forks("child", "a", 3, at=3.0)
    folder.runs("a", range(4, 6), at=3.0)
    folder.ends("a", 5, at=5.0)
    folder.tell(NotePlaced("child", at=3.1, width=1.0, device_ids=(1,), lane_ids=(1,)))
    folder.runs("child", range(4, 7), at=3.5, device_ids=(1,))
    folder.ends("child", 6, at=6.5)
    return folder.close()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """``a`` and ``b`` share iterations 1 to 4, which took 1 s each; then each ran two of its own, of 1 s."""
    starts = StartFrom(SHARED, 4, is_shared=True)
    trials = [trial("a", 6, starts, lr=1.0), trial("b", 6, starts, lr=2.0), trial(SHARED, 4, lr=9.0)]
    folder = Folder(tmp_path / "run", trials, Search("loss", "min", trials=2))
    folder.tell(NotePlaced(SHARED, at=-1.0, width=1.0, device_ids=(0,), lane_ids=(0,)))
    folder.runs(SHARED, range(1, 5), at=0.0)
    folder.ends(SHARED, 4, at=4.0)
    for place, name in enumerate("ab"):
        folder.forks(name, SHARED, 4, at=4.0)
        folder.runs(name, range(1, 5), at=0.0, source=SHARED)
        folder.tell(NotePlaced(name, at=4.0, width=1.0, device_ids=(place,), lane_ids=(place,)))
        folder.runs(name, range(5, 7), at=4.5, device_ids=(place,))
        folder.ends(name, 6, at=6.5)
    return folder.close()


def story(path: Path, name: str) -> str:
    run = load_run(path)
    (found,) = [each for each in run.rows if each.trial_id == name]
    return "\n".join(line.text for line in run.story_of(found))


# -- forks -------------------------------------------------------------------------------------------------------------


def test_a_fork_names_its_parent_and_the_iteration_that_was_unknown(forked: Path) -> None:
    a, child, late = fluid.load(forked).trials
    assert a.start is None
    assert child.start == StartFrom("a", 3)
    assert late.start == StartFrom("a", 8)
    assert child.iteration == 6
    assert [each.iteration for each in child.results] == [4, 5, 6]


def test_iterations_of_the_parent_are_not_missing_from_a_fork(forked: Path) -> None:
    assert not [note for note in fluid.load(forked).notes if "missing" in note]
    left = read_session(forked)
    assert left.recovered.skipped == {"child": 3}


def test_a_lost_line_of_a_fork_is_still_told(forked: Path) -> None:
    lines = (forked / "results.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not ('"child"' in line and '"iteration": 5' in line)]
    (forked / "results.jsonl").write_text("".join(kept))
    assert any("1 iteration is missing" in note and "child (5)" in note for note in fluid.load(forked).notes)


def test_why_tells_from_where_a_fork_starts_and_what_one_waits_for(forked: Path, capsys: Captured) -> None:
    assert "it starts from trial 'a', from its newest state" in story(forked, "child")
    assert "starts from trial 'a' after 3 iterations; its state was saved to disk in 0.1 s" in story(forked, "child")
    assert "waits for the state of 'a' at iteration 8: that one has done 5" in story(forked, "late")
    main(["why", str(forked), "child", "--json"])
    (told,) = json.loads(capsys.readouterr().out)["trials"]
    assert told["start"] == {"parent": "a", "at": 3, "path": "", "is_shared": False}
    assert not told["is_shared_run"]


def test_why_tells_that_a_state_could_not_be_had(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", [trial("a", 5), trial("child", 6, StartFrom("a", 2))])
    folder.runs("a", range(1, 4), at=0.0)
    folder.tell(TrialForked(3.0, "child", parent="a", lane_id=0, problem="it is at iteration 3", is_past=True))
    assert "the state of trial 'a' could not be had: it is at iteration 3" in story(folder.close(), "child")


def test_tables_have_a_column_for_the_parent(forked: Path, capsys: Captured) -> None:
    main(["report", str(forked), "--columns", "from"])
    assert "a@3" in capsys.readouterr().out
    main(["report", str(forked), "--json"])
    starts = [each["start"] for each in json.loads(capsys.readouterr().out)["trials"]]
    assert [start and (start["parent"], start["at"]) for start in starts] == [None, ("a", 3), ("a", 8)]
    table = fluid.load(forked).dataframe()
    assert table["parent"].fillna("").tolist() == ["", "a", "a"]
    assert table["at"].tolist()[1:] == [3, 8]
    assert "source" not in fluid.load(forked).dataframe(every="iteration")


def test_tables_have_no_such_columns_without_forks(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", [trial("a", 1)])
    folder.runs("a", [1], at=0.0)
    found = fluid.load(folder.close())
    assert not {"parent", "at", "source"} & {*found.dataframe(), *found.dataframe(every="iteration")}
    assert page_data([load_run(folder.path)])["runs"][0]["forks"] == []


def test_a_fork_of_another_run_names_its_checkpoint(forked: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "other", [trial("c", 9, StartFrom("a", 5, "/runs/one/trials/a/kept/5"))])
    run = load_run(folder.close())
    (only,) = run.trials
    assert only.start is not None
    assert only.start.text == "trial 'a' (/runs/one/trials/a/kept/5) after 5 iterations"
    assert lineages(run.rows) == [(0, None, 5, 5, "a")]


def test_a_fork_of_a_path_alone_names_the_path(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "other", [trial("c", 9, StartFrom("", 5, "/kept/5"))])
    (only,) = fluid.load(folder.close()).trials
    assert only.start is not None
    assert only.start.text == "the checkpoint /kept/5 after 5 iterations"


# -- shared runs -------------------------------------------------------------------------------------------------------


def test_shared_iterations_are_the_trials_own_with_their_source(shared: Path) -> None:
    found = fluid.load(shared)
    assert [each.trial_id for each in found.trials] == ["a", "b"]
    assert [each.source for each in found.trials[0].results] == [SHARED] * 4 + [""] * 2
    assert [each.metrics["loss"] for each in found.trials[0].results][:2] == [10.0, 5.0]
    assert found.best.trial.trial_id == "a"
    assert found.trials[0].start == StartFrom(SHARED, 4, is_shared=True)
    assert found.dataframe(every="iteration")["source"].fillna("").tolist()[3:6] == [SHARED, "", ""]
    assert not found.notes


def test_device_seconds_of_shared_iterations_count_once(shared: Path) -> None:
    a, b = fluid.load(shared).trials
    assert [each.device_seconds for each in a.results] == [0.0] * 4 + [1.0] * 2
    assert (a.seconds, a.device_seconds) == (b.seconds, b.device_seconds) == (2.0, 2.0)
    run = load_run(shared)
    (group,) = run.groups
    assert group.device_seconds == 4.0 + 2.0 + 2.0
    assert group.makespan == 6.5
    assert run.timeline.makespan == 6.5
    assert {run.rows[each.row].trial_id for each in run.timeline.segments} == {"a", "b", SHARED}
    assert run.costs.as_json()["device_seconds_busy"] == 8.0
    assert [run.costs.usd_of(each.device_seconds) for each in run.trials] == [2.0, 2.0]


def test_shared_runs_are_no_trials_of_the_user(shared: Path, capsys: Captured) -> None:
    main(["report", str(shared), "--columns", "iterations"])
    shown = capsys.readouterr().out
    assert "2 trials on 2 devices" in shown
    assert "2 done; 12 iterations" in shown
    assert "1 shared run: 8 iterations ran for the 12 of the trials, 67 %" in shown
    assert SHARED not in shown
    main(["report", str(shared), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [each["trial"] for each in told["trials"]] == ["a", "b"]
    assert told["iterations_run"] == 8
    assert (told["groups"][0]["trials"], told["groups"][0]["shared_runs"]) == (2, 1)
    assert summarize(shared).trials == {"DONE": 2}


def test_why_tells_of_shared_iterations_and_of_the_shared_run(shared: Path, capsys: Captured) -> None:
    told = story(shared, "a")
    assert f"its first 4 iterations are run once for several trials, by '{SHARED}'" in told
    assert f"iterations 1 to 4 are those of '{SHARED}'" in told
    assert "ran iterations 5 to 6 on cpu 0" in told
    assert "ran iterations 1" not in told
    main(["why", str(shared), SHARED])
    assert "a shared run, which Fluid has added" in capsys.readouterr().out


def test_rehearsals_of_a_shared_run_count_its_iterations_once(shared: Path) -> None:
    records = read_records(shared)
    assert [(each.trial_id, each.last) for each in records.trials] == [("a", 6), ("b", 6)]
    assert [one.seconds for one in records.trials[0].iterations.values()] == [1.0] * 6
    (outcome,) = outcomes_of(shared)
    assert (outcome.trials, outcome.results) == (2, 8)
    assert [each.device_seconds for each in outcome.played] == [2.0, 2.0]


def test_rehearsals_of_a_fork_have_what_its_parent_had_done(forked: Path) -> None:
    """What it reports goes on from there: it would be a guess without."""
    a, child = read_records(forked, "loss", "min").trials
    assert [*child.iterations] == [1, 2, 3, 4, 5, 6]
    assert [child.iterations[number].metrics for number in (1, 2, 3)] == [
        a.iterations[number].metrics for number in (1, 2, 3)
    ]


def test_the_time_axis_does_not_go_back_with_shared_iterations(tmp_path: Path) -> None:
    """They are reported once the trial has forked, maybe long after they ended: that is no reset of the clock."""
    starts = StartFrom(SHARED, 2, is_shared=True)
    folder = Folder(tmp_path / "run", [trial("a", 4, starts), trial(SHARED, 2)])
    folder.runs(SHARED, [1, 2], at=0.0, each=200.0)
    folder.runs("a", [1, 2], at=0.0, each=200.0, source=SHARED)
    folder.runs("a", [3], at=400.0, each=200.0)
    run = load_run(folder.close())
    assert run.timeline.makespan == 600.0
    assert run.trials[0].span == (400.0, 600.0)


def test_a_resumed_session_takes_shared_runs_for_no_trials(shared: Path) -> None:
    left = read_session(shared)
    results = left.results.groups["0"]
    assert results.last_end - results.first_start == 6.5
    tracker = BestTracker(None)
    tracker.enter(trial(SHARED, 4))
    assert not tracker.states
    added = {
        each.trial_id for group in read_run(shared).groups for parts in group.shared_runs.values() for each in parts
    }
    assert added == {SHARED}


def test_loggers_log_shared_iterations_as_the_trials_own(shared: Path, tmp_path: Path) -> None:
    main(["export", str(shared), "--csv", str(tmp_path / "csv")])
    rows = list(csv.DictReader((tmp_path / "csv" / "trials.csv").read_text().splitlines()))
    assert [(row["trial"], row["parent"], row["at"], row["seconds"]) for row in rows] == [
        ("a", SHARED, "4", "2.0"),
        ("b", SHARED, "4", "2.0"),
    ]
    rows = list(csv.DictReader((tmp_path / "csv" / "iterations.csv").read_text().splitlines()))
    assert [row["iteration"] for row in rows if row["trial"] == "a"] == list("123456")
    assert [row["source"] for row in rows if row["trial"] == "a"] == [SHARED] * 4 + [""] * 2


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_shows_forks_and_shared_runs(shared: Path) -> None:
    (data,) = page_data([load_run(shared)])["runs"]
    assert data["forks"] == [[2, -1, 0, 4, ""], [0, 2, 4, 6, ""], [1, 2, 4, 6, ""]]
    assert [each["id"] for each in data["shared"]] == [SHARED]
    assert data["trials"] == 2
    assert {segment[0] for segment in data["segments"]} == {0, 1, 2}


def test_a_page_reads_on_while_a_shared_run_goes_on(tmp_path: Path) -> None:
    starts = StartFrom(SHARED, 4, is_shared=True)
    folder = Folder(tmp_path / "run", [trial("a", 6, starts), trial(SHARED, 4)])
    folder.runs(SHARED, [1], at=0.0)
    folder.runs("a", [1], at=0.0, source=SHARED)
    reader = RunReader(folder.path)
    reader.read()
    folder.runs(SHARED, [2], at=1.0)
    folder.runs("a", [2], at=1.0, source=SHARED)
    run = reader.read_on()
    folder.close()
    assert run is not None
    assert [(each.trial_id, each.iterations, each.device_seconds) for each in run.rows] == [
        ("a", 2, 0.0),
        (SHARED, 2, 2.0),
    ]
    assert (run.makespan, run.groups[0].device_seconds) == (2.0, 2.0)


def test_lines_to_children_cross_no_others(tmp_path: Path) -> None:
    """Children are below their parent, those that leave it latest nearest to it."""
    trials = [
        trial("root", 9),
        trial("early", 9, StartFrom("root", 2)),
        trial("late", 9, StartFrom("root", 6)),
        trial("grandchild", 9, StartFrom("late", 7)),
        trial("alone", 9),
    ]
    folder = Folder(tmp_path / "run", trials)
    folder.runs("root", range(1, 9), at=0.0)
    run = load_run(folder.close())
    found = lineages(run.rows)
    assert [run.rows[each.row].trial_id for each in found] == ["root", "late", "grandchild", "early"]
    assert [(each.at, each.last) for each in found] == [(0, 8), (6, 6), (7, 7), (2, 2)]


@pytest.mark.browser
def test_a_click_on_the_forks_follows_a_trial_and_none_follows_a_shared_run(
    shared: Path, tmp_path: Path, browser: Browser
) -> None:
    """The rows are the shared run, then ``a`` and ``b``, which start at iteration 4 of 6, in the right third."""
    file = tmp_path / "page.html"
    file.write_text(html_page([load_run(shared)]), encoding="utf-8")
    with browser.page(1200, 900) as page:
        page.open(file)
        page.run("document.getElementById('forks-card').scrollIntoView()")
        page.drawn()  # A chart that is not in sight may be drawn later.
        note = "2 of 3 start from another's state; 1 in grey were run once for several trials"
        assert page.text("#forks-note") == note
        page.run("document.getElementById('forks').scrollIntoView()")
        x, y = page.corner("#forks")
        page.click((x + 1000, y + 8 + 33))
        assert page.text("#detail h3") == "a"
        assert f"iterations 1 to 4 are those of '{SHARED}'" in page.text("#detail")
        x, y = page.corner("#forks")  # The panel beside it has made it narrower, and maybe moved it.
        page.move((x + 300, y + 8 + 11))
        assert page.text("#tooltip").startswith(f"{SHARED}\nto iteration 4")
        page.click((x + 300, y + 8 + 11))
        assert page.text("#detail h3") == "a"
        page.press("Escape")
        page.run("document.getElementById('gantt').scrollIntoView()")
        x, y = page.corner("#gantt")
        page.click((x + 300, y + 20))
        assert page.run("model.state.chosen") is None
        assert page.problems == []
